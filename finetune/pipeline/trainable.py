"""The model as the training of a recipe starts from it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from finetune.data.pair_tokens import AnsweredPrompt
from finetune.data.tokenise import TokenisedRow
from finetune.model.adapter_files import load_adapter
from finetune.model.load import load_model
from finetune.model.new_tokens import NewTokens
from finetune.pipeline.inputs import RunInputs
from finetune.pipeline.methods import score_seed
from finetune.training.sharding import sharding_of
from finetune.training.trained_part import add_trained_part


def load_base(inputs: RunInputs, *, dtype: str | None = None, attention: str | None = None) -> Any:
    """The base as the recipe holds it while training; `dtype` and `attention` in place of the recipe's."""
    recipe = inputs.recipe
    section = recipe.model
    return load_model(
        inputs.source,
        dtype=dtype or section.dtype,
        quantize=section.quantize,
        double_quantization=section.double_quantization,
        attention=attention or recipe.attention,
        trust_remote_code=section.trust_remote_code,
        score_seed=score_seed(recipe),
        device=None if sharding_of(os.environ) == "none" else "cpu",  # one GPU need not hold all of it
    )


def load_to_train(
    inputs: RunInputs,
    *,
    new_tokens: NewTokens,
    rows: Sequence[TokenisedRow | AnsweredPrompt],
    dtype: str | None = None,
    attention: str | None = None,
) -> Any:
    """The base with its trained part: a fresh one, or the adapter that training goes on from.

    `rows` are train rows, which some starts of adapters read.
    """
    model = load_base(inputs, dtype=dtype, attention=attention)
    if inputs.start is not None:
        return load_adapter(model, inputs.start.folder, source=inputs.source, trainable=True)
    return add_trained_part(model, inputs.recipe, source=inputs.source, new_tokens=new_tokens, rows=rows)
