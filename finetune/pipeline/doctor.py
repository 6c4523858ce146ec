"""Feeds the doctor's checks with what a recipe names: its rows, its tokenizer and its model."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from finetune.data.build import build_dataset, default_builds_root
from finetune.data.tokenise import TokenisedRow, tokenise_rows
from finetune.doctor.finding import Finding, exit_code_of, faults_in, told_once
from finetune.doctor.invariants import check_invariants, choose_rows, disturb
from finetune.doctor.remedies import mend_recipe
from finetune.errors import ExitCode, UserError
from finetune.model.load import load_tokenizer
from finetune.model.new_tokens import add_new_tokens
from finetune.pipeline.doctor_trials import TRIALS, left_out, try_training
from finetune.pipeline.inputs import gather_inputs
from finetune.pipeline.material import Say
from finetune.pipeline.survey import survey
from finetune.pipeline.trainable import load_to_train
from finetune.recipe.resolve import read_recipe

# Rows that are tokenised to choose from: the checks need a few of uneven lengths, not the set.
_CANDIDATE_ROWS = 256
_MOST_ROUNDS = 3  # of mending: one remedy may uncover what the next one is for
# With faults of these, a training would not begin, or say nothing but them again.
_IN_THE_WAY = ("recipe", "memory")
_IN_THE_WAY_TOO = ("dataset", "rows", "vocabulary", "pad token", "long rows", "packs", "turn weights")


@dataclass
class Examination:
    """What the doctor found of a recipe. `patch`: what --fix wrote into the file, as a difference."""

    recipe: str
    findings: list[Finding] = field(default_factory=list)
    patch: str = ""
    seconds: float = 0.0

    @property
    def exit_code(self) -> ExitCode:
        return exit_code_of(self.findings)

    def to_dict(self) -> dict[str, Any]:
        return {
            "recipe": self.recipe,
            "findings": [finding.to_dict() for finding in self.findings],
            "faults": len(faults_in(self.findings)),
            "warnings": sum(finding.status == "warning" for finding in self.findings),
            "patch": self.patch,
            "seconds": round(self.seconds, 1),
            "exit_code": int(self.exit_code),
        }


def examine_recipe(path: str, overrides: Sequence[str] = (), *, fix: bool = False, say: Say) -> Examination:
    """Every check of the recipe at `path`, all faults at once.

    With `fix`, values that mend it without changing what is learnt are written into its file, and what they mend is looked
    at again. Raises UserError only where a fix cannot be written.
    """
    started = time.monotonic()
    found = Examination(path)
    for _ in range(_MOST_ROUNDS):
        cheap, material = survey(path, overrides, say)
        found.findings = told_once(cheap)
        changes = {key: value for one in cheap for key, value in one.changes.items()}
        if not fix or not changes:
            break
        found.patch += mend_recipe(read_recipe(path, overrides), changes)
        say(f"mended: {', '.join(changes)}")
    in_the_way = [one for one in faults_in(found.findings) if _stops_training(one)]
    if material is None or in_the_way:
        found.findings += left_out(TRIALS, "the faults above come first")
    else:
        found.findings = told_once([*found.findings, *try_training(material, say)])
    found.seconds = time.monotonic() - started
    return found


def _stops_training(finding: Finding) -> bool:
    return finding.group in _IN_THE_WAY or finding.check in _IN_THE_WAY_TOO


def check_recipe_invariants(
    path: str, overrides: Sequence[str], *, n_rows: int, say: Say
) -> Iterator[Finding]:
    """The invariants of `path` on its own model (fp32) and train rows. Raises UserError as a run of it would."""
    inputs = gather_inputs(path, overrides, say=say)
    recipe = inputs.recipe
    if recipe.train.method != "sft":
        raise UserError(
            f"the invariants are those of train.method sft, not of {recipe.train.method}",
            where="train.method",
            fix="--set train.method=sft over a dataset of conversations or texts",
        )
    build = build_dataset(inputs.spec_path, default_builds_root())
    tokenizer = load_tokenizer(inputs.source)
    new = add_new_tokens(tokenizer, recipe.model.new_tokens)
    rows = build.rows("train")[:_CANDIDATE_ROWS]
    tokenised: list[TokenisedRow] = tokenise_rows(
        rows,
        tokenizer,
        max_tokens=recipe.data.max_tokens,
        long_rows=recipe.data.long_rows,
        train_on=recipe.data.train_on,
    ).rows
    chosen = choose_rows(tokenised, n_rows)
    say(
        f"measuring on {len(chosen)} rows of {len(chosen[0].input_ids)} to {len(chosen[-1].input_ids)} tokens, in fp32"
    )
    model = load_to_train(inputs, new_tokens=new, rows=tokenised, dtype="fp32", attention="sdpa")
    disturb(model, recipe.seed)
    yield from check_invariants(recipe, model, tokenizer, rows, chosen)
