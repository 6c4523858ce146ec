"""Feeds the doctor's checks with what a recipe names: its rows, its tokenizer and its model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from finetune.data.build import build_dataset, default_builds_root
from finetune.data.tokenise import tokenise_rows
from finetune.doctor.finding import Finding
from finetune.doctor.invariants import check_invariants, choose_rows, disturb
from finetune.errors import UserError
from finetune.model.load import load_model, load_tokenizer
from finetune.model.new_tokens import add_new_tokens
from finetune.pipeline.inputs import gather_inputs
from finetune.training.trained_part import add_trained_part

# Rows that are tokenised to choose from: the checks need a few of uneven lengths, not the set.
_CANDIDATE_ROWS = 256


def check_recipe_invariants(
    path: str, overrides: Sequence[str], *, n_rows: int, say: Callable[[str], None]
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
    tokenised = tokenise_rows(
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
    model = load_model(
        inputs.source,
        dtype="fp32",
        quantize=recipe.model.quantize,
        double_quantization=recipe.model.double_quantization,
        attention="sdpa",
        trust_remote_code=recipe.model.trust_remote_code,
    )
    model = add_trained_part(model, recipe, source=inputs.source, new_tokens=new, rows=tokenised)
    disturb(model, recipe.seed)
    yield from check_invariants(recipe, model, tokenizer, rows, chosen)
