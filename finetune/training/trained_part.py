"""From a loaded base to what is trained: new tokens get their rows, then an adapter is attached or a part is frozen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from finetune.data.tokenise import TokenisedRow
from finetune.model.adapters import attach_adapter
from finetune.model.freezing import freeze_parts
from finetune.model.new_tokens import NewTokens, make_room
from finetune.model.source import ModelSource
from finetune.recipe.schema import Recipe

# Tokens that init eva reads; its components converge within a few thousand.
_START_TOKENS = 16_384
_START_BATCH_ROWS = 4


def add_trained_part(
    model: Any,
    recipe: Recipe,
    *,
    source: ModelSource | None = None,
    new_tokens: NewTokens | None = None,
    rows: Sequence[TokenisedRow] = (),
) -> Any:
    """The model as training starts from it, for any adapter kind; `model` is changed in place.

    `new_tokens` are those added to the tokenizer. `rows` are train rows, which init eva reads; `source` the base on disk,
    which init loftq reads.
    """
    new = new_tokens or NewTokens()
    make_room(model, new)
    if recipe.adapter.kind == "none":
        freeze_parts(model, recipe.adapter)
        return model
    batches = start_batches(rows, model) if recipe.adapter.init == "eva" else None
    return attach_adapter(
        model, recipe.adapter, seed=recipe.seed, source=source, batches=batches, token_rows=new.ids
    )


def start_batches(rows: Sequence[TokenisedRow], model: Any) -> list[Mapping[str, Tensor]]:
    """Padded batches of the first train rows, in their order, up to a few thousand tokens."""
    chosen, n_tokens = [], 0
    for row in rows:
        if n_tokens >= _START_TOKENS:
            break
        chosen.append(row)
        n_tokens += len(row.input_ids)
    device = next(model.parameters()).device
    batches: list[Mapping[str, Tensor]] = []
    for start in range(0, len(chosen), _START_BATCH_ROWS):
        part = [row.input_ids for row in chosen[start : start + _START_BATCH_ROWS]]
        longest = max(map(len, part))
        ids = torch.zeros(len(part), longest, dtype=torch.long, device=device)
        mask = torch.zeros_like(ids)
        for place, tokens in enumerate(part):
            ids[place, : len(tokens)] = torch.tensor(tokens, device=device)
            mask[place, : len(tokens)] = 1
        batches.append({"input_ids": ids, "attention_mask": mask})
    return batches
