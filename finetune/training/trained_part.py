"""From a loaded base to what is trained: new tokens get their rows, then an adapter is attached or a part is frozen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from finetune.data.pair_tokens import AnsweredPrompt
from finetune.data.tokenise import TokenisedRow
from finetune.errors import UserError
from finetune.model.adapter_kinds import eva_search
from finetune.model.adapter_targets import check_adapter
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
    rows: Sequence[TokenisedRow | AnsweredPrompt] = (),
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
    batches = None
    if recipe.adapter.init == "eva":
        check_adapter(model, recipe.adapter)
        _, n_tokens = eva_search(model, recipe.adapter)
        batches = start_batches(rows, model, at_least=n_tokens)
    return attach_adapter(
        model, recipe.adapter, seed=recipe.seed, source=source, batches=batches, token_rows=new.ids
    )


def start_batches(
    rows: Sequence[TokenisedRow | AnsweredPrompt], model: Any, *, at_least: int
) -> list[Mapping[str, Tensor]]:
    """Padded batches of the first train rows, in their order, up to a few thousand tokens; of a pair the longer side.

    Every batch has `at_least` so many tokens. Raises UserError when all rows together have fewer.
    """
    batches: list[list[list[int]]] = [[]]
    n_tokens = 0
    for row in rows:
        if n_tokens >= max(_START_TOKENS, at_least):
            break
        if len(batches[-1]) >= _START_BATCH_ROWS and sum(map(len, batches[-1])) >= at_least:
            batches.append([])
        batches[-1].append(row.input_ids)
        n_tokens += len(row.input_ids)
    if sum(map(len, batches[-1])) < at_least and len(batches) > 1:
        rest = batches.pop()
        batches[-1] += rest
    if n_tokens < at_least:
        raise UserError(
            f"init eva needs {at_least} tokens of train rows at these ranks, and there are {n_tokens}",
            where="adapter.init",
            fix="lower adapter.rank, give more rows, or use another init",
        )
    return [_padded(part, next(model.parameters()).device) for part in batches]


def _padded(rows: Sequence[list[int]], device: torch.device) -> Mapping[str, Tensor]:
    ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long, device=device)
    mask = torch.zeros_like(ids)
    for place, tokens in enumerate(rows):
        ids[place, : len(tokens)] = torch.tensor(tokens, device=device)
        mask[place, : len(tokens)] = 1
    return {"input_ids": ids, "attention_mask": mask}
