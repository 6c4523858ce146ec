"""What can be known of a run from its recipe, the model's configuration and its tokenizer: all of it before rows are read,
answers are generated or a weight is loaded, and every fault at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from finetune.data.pair_tokens import PreferenceSplit
from finetune.errors import Fault, UserError
from finetune.model.adapter_files import check_base, check_fits
from finetune.model.adapter_targets import check_adapter
from finetune.model.load import (
    check_attention,
    check_causal_lm,
    check_context,
    default_device,
    load_tokenizer,
    model_skeleton,
)
from finetune.model.new_tokens import add_new_tokens
from finetune.model.quantization import check_row_lengths, check_stored_whole
from finetune.model.source import ModelSource, read_config
from finetune.pipeline.methods import Split
from finetune.pipeline.starts import AdapterStart
from finetune.recipe.adapter_section import VIRTUAL_TOKENS
from finetune.recipe.schema import Recipe
from finetune.training.apart import refuse_state
from finetune.training.mismatched import trained_tokens
from finetune.training.preflight import check_training
from finetune.training.turn_weights import row_weights


def preflight(recipe: Recipe, source: ModelSource, start: AdapterStart | None = None) -> None:
    """Raise UserError with all that stops `recipe` on this machine and this model. Only shapes are built, no weights.

    The machine (precision, optimizer and its options), names in the adapter section, row lengths of quantized layers, the
    model's context, its vocabulary, new tokens, and whether `start` was trained on this base.
    """
    faults: list[Fault] = []

    def attempt(check: Callable[[], Any]) -> Any:
        try:
            return check()
        except UserError as error:
            faults.extend(error.faults)
            return None

    trust = recipe.model.trust_remote_code
    attempt(lambda: check_training(recipe))
    n_of_machine = len(faults)
    attempt(lambda: check_causal_lm(source, read_config(source), trust))
    attempt(lambda: check_stored_whole(source))
    if len(faults) > n_of_machine:
        raise UserError(faults)  # what follows needs a configuration that can be read
    in_front = recipe.adapter.virtual_tokens if recipe.adapter.kind in VIRTUAL_TOKENS else 0
    attempt(lambda: check_context(source, recipe.data.max_tokens, in_front=in_front))
    attempt(lambda: check_attention(source, recipe.model.attention))
    tokenizer = attempt(lambda: load_tokenizer(source, trust_remote_code=trust))
    if tokenizer is not None:
        attempt(lambda: add_new_tokens(tokenizer, recipe.model.new_tokens))
    skeleton = attempt(lambda: model_skeleton(source, trust))
    if skeleton is not None:
        quantized = recipe.model.quantize != "none"
        attempt(lambda: refuse_state(skeleton, recipe))
        attempt(lambda: check_row_lengths(skeleton, recipe.model.quantize, device=default_device()))
        if start is None:
            attempt(lambda: check_adapter(skeleton, recipe.adapter, quantized=quantized))
        else:
            attempt(lambda: check_fits(skeleton, start.folder, source))
    elif start is not None:
        attempt(lambda: check_base(start.folder, source))
    if faults:
        raise UserError(faults)


def check_packs(recipe: Recipe, split: Split) -> None:
    """Raise UserError when a row of `split` is longer than a pack, or none of its answers weighs anything: told before the
    base is evaluated, not after.
    """
    weights = recipe.train.loss.turn_weights
    if (
        weights
        and split.rows
        and not isinstance(split, PreferenceSplit)
        and not any(any(row_weights(row, weights)) for row in split.rows)
    ):
        raise UserError(
            "no answer of the training rows weighs anything, so nothing is learnt",
            where="train.loss.turn_weights",
            why="the last weight is that of a row's last answer, and these rows have no answer before it",
            fix="give the last answer a weight, e.g. [0.2, 1]",
        )
    if not recipe.train.packing or not split.rows:
        return
    if isinstance(split, PreferenceSplit):
        lengths = trained_tokens(split.rows, recipe.train)
    else:
        lengths = [len(row.input_ids) for row in split.rows]
    if max(lengths) > recipe.train.pack_tokens:
        raise UserError(
            f"a row of {max(lengths)} tokens does not fit a pack of {recipe.train.pack_tokens}",
            where="train.pack_tokens",
            fix=f"set train.pack_tokens to {max(lengths)} or more, or lower data.max_tokens",
        )
