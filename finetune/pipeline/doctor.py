"""Feeds the doctor's checks with what a recipe names: its rows, its tokenizer and its model."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from finetune.data.build import DatasetBuild, build_dataset, default_builds_root
from finetune.data.check import check_build
from finetune.data.decontaminate import decontaminate
from finetune.data.pair_tokens import PreferenceSplit
from finetune.data.rows import Row
from finetune.data.tokenise import TokenisedRow, TokenisedSplit, tokenise_rows
from finetune.doctor.finding import Finding, examine, exit_code_of, faults_in, faults_of
from finetune.doctor.invariants import check_invariants, choose_rows, disturb, quick_invariants
from finetune.doctor.memory import read_room
from finetune.doctor.remedies import mend_recipe
from finetune.doctor.rows import check_contamination, check_leaks
from finetune.doctor.suites import check_power
from finetune.doctor.trained import check_trained
from finetune.doctor.trials import Trials, not_tried
from finetune.errors import ExitCode, UserError
from finetune.evaluation.records import read_records
from finetune.evaluation.suite_data import SuiteData
from finetune.model.adapter_files import load_adapter
from finetune.model.load import load_tokenizer
from finetune.model.memory import release_memory
from finetune.model.new_tokens import NewTokens, add_new_tokens
from finetune.model.source import resolve_model
from finetune.paths import runs_root
from finetune.pipeline.alignment import check_teacher
from finetune.pipeline.before import tokenizer_before
from finetune.pipeline.checks import Forecasts, environment_findings, forecasts_here, row_findings
from finetune.pipeline.decontaminate import suite_questions
from finetune.pipeline.distil import teacher_plan
from finetune.pipeline.generate import ensure_generated
from finetune.pipeline.inputs import RunInputs, gather_inputs
from finetune.pipeline.methods import Split, plain_rows, tokenise_side, train_by_method
from finetune.pipeline.preflight import check_packs, preflight
from finetune.pipeline.trainable import load_base, load_to_train
from finetune.recipe.resolve import read_recipe
from finetune.recipe.schema import Recipe
from finetune.training.branches import row_tokens

# Rows that are tokenised to choose from: the checks need a few of uneven lengths, not the set.
_CANDIDATE_ROWS = 256
_QUICK_ROWS, _QUICK_TOKENS = 3, 128
_MOST_ROUNDS = 3  # of mending: one remedy may uncover what the next one is for
_ROUND_TO = 8
_NO_LIMIT = 2**31
_TRIALS = (
    "trained part",
    "longest batch",
    "resume",
    "examples by heart",
    "save and reload",
    "accumulation",
    "packing",
)
_FP32_BYTES, _FP32_SHARE = 4, 0.5  # weights in fp32 may take half of the memory
# Where a fault of the machine or the recipe is mended by one value that changes nothing of what is learnt.
_MENDED_BY: Mapping[str, Any] = {"train.activation_offload": False, "train.fp8": False}

Say = Callable[[str], None]


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


@dataclass(frozen=True)
class Material:
    """What the checks look at, as a run of the recipe would have it."""

    inputs: RunInputs
    build: DatasetBuild
    contamination: Mapping[str, Any]
    suites: Sequence[SuiteData]
    rows: Sequence[Row]
    split: Split
    tokenizer: Any
    new: NewTokens
    forecasts: Forecasts | None

    @property
    def n_parameters(self) -> int:
        """Those of the base."""
        if self.forecasts is not None:
            return self.forecasts.training.n_parameters
        return self.inputs.source.n_parameters or 0


def examine_recipe(path: str, overrides: Sequence[str] = (), *, fix: bool = False, say: Say) -> Examination:
    """Every check of the recipe at `path`, all faults at once.

    With `fix`, values that mend it without changing what is learnt are written into its file, and what they mend is looked
    at again. Raises UserError only where a fix cannot be written.
    """
    started = time.monotonic()
    found = Examination(path)
    material: Material | None = None
    for _ in range(_MOST_ROUNDS):
        cheap, material = _cheap(path, overrides, say)
        found.findings = cheap
        changes = {key: value for one in cheap for key, value in one.changes.items()}
        if not fix or not changes:
            break
        found.patch += mend_recipe(read_recipe(path, overrides), changes)
        say(f"mended: {', '.join(changes)}")
    if material is None or faults_in(found.findings):
        reason = "the faults above come first"
        found.findings += [replace(one, group="training") for one in not_tried(_TRIALS, reason)]
    else:
        found.findings += list(_trials(material, say))
    found.seconds = time.monotonic() - started
    return found


def _cheap(path: str, overrides: Sequence[str], say: Say) -> tuple[list[Finding], Material | None]:
    """All that needs no weights: the machine, the recipe, the rows, their tokens, the suites, the forecast."""
    try:
        inputs = gather_inputs(path, overrides, say=say)
    except UserError as error:
        recipe_faults = [replace(one, group="recipe") for one in faults_of("recipe", error)]
        return [*environment_findings("fp32"), *recipe_faults], None
    recipe = inputs.recipe
    findings = [*environment_findings(recipe.model.dtype)]
    try:
        preflight(recipe, inputs.source, inputs.start)
        check_teacher(inputs)
        findings.append(
            Finding("recipe", "ok", "it goes with this machine, this model and its names", group="recipe")
        )
    except UserError as error:
        findings += [
            replace(_with_changes(one, recipe), group="recipe") for one in faults_of("recipe", error)
        ]
    material: Material | None = None
    try:
        say("doctor: the rows, their tokens and the suites")
        material, length_faults = gather_material(inputs, say)
        findings += length_faults
    except UserError as error:
        return [*findings, *(replace(one, group="data") for one in faults_of("data", error))], None
    findings += row_findings(
        recipe,
        inputs.config,
        material.forecasts,
        material.rows,
        material.split,
        material.tokenizer,
        n_parameters=material.n_parameters,
        n_validation=int(material.build.manifest["splits"]["validation"]["rows"]),
        n_added_tokens=len(material.new.ids),
    )
    findings += examine("data", "leaks", lambda: check_leaks(check_build(material.build)))
    findings += examine("data", "contamination", lambda: check_contamination(material.contamination))
    for data in material.suites:
        findings += examine("suite", f"power of {data.suite.name}", partial(_power, inputs, data))
    return findings, material


def _with_changes(finding: Finding, recipe: Recipe) -> Finding:
    """The finding with what mends it, where one value does."""
    if finding.where in _MENDED_BY:
        return replace(finding, changes={finding.where: _MENDED_BY[finding.where]})
    if finding.where == "model.dtype" and recipe.model.dtype == "fp16":
        return replace(finding, changes={"model.dtype": "bf16"})
    if finding.where == "train.report_to":
        left = [name for name in recipe.train.report_to if f"tracker {name} " not in finding.detail]
        return replace(finding, changes={"train.report_to": left})
    return finding


def gather_material(inputs: RunInputs, say: Say) -> tuple[Material, list[Finding]]:
    """What a run of the recipe would train on and be asked, and the faults of rows that are too long for it."""
    recipe = inputs.recipe
    ensure_generated(inputs.spec_path, say=say, server=inputs.teacher.server if inputs.teacher else None)
    built = build_dataset(inputs.spec_path, default_builds_root())
    suites = [inputs.data_of(suite) for suite in inputs.suites]
    build, contamination = decontaminate(built, suite_questions(suites, inputs.spec_path))
    tokenizer, new = tokenizer_before(inputs), NewTokens()
    if recipe.model.new_tokens and inputs.start is None:
        tokenizer = load_tokenizer(inputs.source)
        new = add_new_tokens(tokenizer, recipe.model.new_tokens)
    rows = build.rows("train")[: recipe.data.max_train_rows]
    split, findings = _tokenise(inputs, rows, tokenizer)
    forecasts = forecasts_here(recipe, inputs.config, split, inputs.suites, teacher_plan(inputs))
    return Material(inputs, built, contamination, suites, rows, split, tokenizer, new, forecasts), findings


def _tokenise(inputs: RunInputs, rows: Sequence[Row], tokenizer: Any) -> tuple[Split, list[Finding]]:
    """The rows, and a finding where some are longer than the recipe or its packs allow; the other checks see those too."""
    recipe = inputs.recipe
    try:
        split = tokenise_side(recipe, rows, tokenizer)
    except UserError as error:
        if recipe.data.long_rows != "error" or error.faults[0].where != "data.max_tokens":
            raise
        data = recipe.data.model_copy(update={"max_tokens": _NO_LIMIT})
        split = tokenise_side(recipe.model_copy(update={"data": data}), rows, tokenizer)
        longest = max(len(row.input_ids) for row in split.rows)
        changes = _longer(recipe, inputs.config, longest)
        return split, [replace(one, group="data", changes=changes) for one in faults_of("long rows", error)]
    findings: list[Finding] = []
    try:
        check_packs(recipe, split)
    except UserError as error:
        changes = {"train.pack_tokens": _rounded(max(example_lengths(recipe, split)))}
        findings += [replace(one, group="data", changes=changes) for one in faults_of("packs", error)]
    return split, findings


def _longer(recipe: Recipe, config: Mapping[str, Any], longest: int) -> dict[str, Any]:
    """Limits that let the longest row in, where the model's context does."""
    wanted = _rounded(longest)
    context = config.get("max_position_embeddings")
    if context and wanted > int(context):
        return {}
    changes: dict[str, Any] = {"data.max_tokens": wanted}
    if recipe.train.packing and recipe.train.pack_tokens < wanted:
        changes["train.pack_tokens"] = wanted
    return changes


def _rounded(tokens: int) -> int:
    return math.ceil(tokens / _ROUND_TO) * _ROUND_TO


def example_lengths(recipe: Recipe, split: Split) -> list[int]:
    """Tokens of every row of a side, both answers of a pair included, as they are trained on."""
    if isinstance(split, PreferenceSplit):
        share = recipe.train.preference.share_prompts
        return [row_tokens(row, share_prompts=share) for row in split.rows]
    return [len(row.input_ids) for row in split.rows]


def _power(inputs: RunInputs, data: SuiteData) -> Iterator[Finding]:
    """By the answers of the untuned arms, where a run of this recipe has them already."""
    folder = runs_root() / inputs.folder_name / "baseline" / data.suite.name
    untuned: list[Any] = []
    with suppress(UserError):
        arms = data.suite.baseline_arms(inputs.recipe.eval.baselines)
        untuned = [read_records(folder, arm) for arm in arms]
    return check_power(data, untuned)


def _trials(material: Material, say: Say) -> Iterator[Finding]:
    """Short trainings of the recipe's own model and rows, then the invariants in fp32."""
    inputs, rows = material.inputs, material.split.rows
    recipe = _trainable_alone(inputs.recipe)

    def train(
        settled: Recipe, trained: Any, chosen: Sequence[Any], folder: Path, callbacks: Sequence[Any]
    ) -> Any:
        split: Any = material.split
        empty, given = (replace(split, rows=list(part)) for part in ((), chosen))
        return train_by_method(
            settled,
            trained,
            material.tokenizer,
            given,
            empty,
            run_folder=folder,
            owner="doctor",
            say=lambda line: None,
            source=inputs.source,
            callbacks=callbacks,
        )

    say("doctor: the model, one step on the longest batch")
    model = load_to_train(inputs, new_tokens=material.new, rows=plain_rows(material.split))
    trials = Trials(recipe, model, rows, train, material.n_parameters)
    del model  # so that the trials can let it go
    try:
        forecast = material.forecasts.training if material.forecasts is not None else None
        n_trained = forecast.n_trainable if forecast is not None else None
        yield from examine("training", "trained part", lambda: check_trained(recipe, trials.model, n_trained))
        room = read_room()
        yield from examine(
            "training",
            "longest batch",
            lambda: trials.probe(forecast.total_bytes if forecast is not None else None, room),
        )
        say("doctor: a training that is interrupted")
        yield from examine("training", "resume", trials.resume)
        say("doctor: eight examples by heart")
        learnt = list(examine("training", "examples by heart", trials.overfit))
        yield from learnt
        if not faults_in(learnt):
            yield from examine(
                "training", "save and reload", lambda: trials.reload(lambda at: _saved(inputs, at))
            )
    finally:
        trials.model = None
        trials.close()
    release_memory()
    yield from _quick(material, say)


def _trainable_alone(recipe: Recipe) -> Recipe:
    """Distillation without its teacher: the student learns the answers."""
    if recipe.train.method != "distil":
        return recipe
    return recipe.model_copy(update={"train": recipe.train.model_copy(update={"method": "sft"})})


def _saved(inputs: RunInputs, folder: Path) -> Any:
    """What a training wrote into a run folder, as it is loaded for use."""
    if inputs.recipe.adapter.kind != "none":
        return load_adapter(load_base(inputs), folder / "adapter", source=inputs.source)
    return load_base(replace(inputs, source=resolve_model(str(folder / "model"))))


def _quick(material: Material, say: Say) -> Iterator[Finding]:
    """Accumulation and packing, exact in fp32, where the weights fit in it and the method learns answers."""
    inputs, names = material.inputs, ("accumulation", "packing")
    if not isinstance(material.split, TokenisedSplit):
        yield from _left_out(names, f"measured for train.method sft, not for {inputs.recipe.train.method}")
        return
    room = read_room()
    if _FP32_BYTES * material.n_parameters > _FP32_SHARE * room.available_bytes:
        yield from _left_out(names, "the weights in fp32 would take more than half of the memory")
        return
    say("doctor: accumulation and packing, in fp32")
    chosen = choose_rows(material.split.rows, _QUICK_ROWS, max_tokens=_QUICK_TOKENS)
    recipe = _trainable_alone(inputs.recipe)
    model = load_to_train(inputs, new_tokens=material.new, rows=chosen, dtype="fp32", attention="sdpa")
    disturb(model, recipe.seed)
    yield from examine(
        "training", "invariants", lambda: quick_invariants(recipe, model, material.tokenizer, chosen)
    )


def _left_out(names: Sequence[str], reason: str) -> Iterator[Finding]:
    return (replace(one, group="training") for one in not_tried(names, reason))


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
