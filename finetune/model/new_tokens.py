"""New tokens: added to the tokenizer, given rows that start from the text's former tokens, and trained.

With an adapter only the new rows train (PEFT's trainable token indices); with full tuning all rows do. The base model's own
tokenizer and rows are left as they are on disk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from finetune.errors import Fault, UserError


@dataclass(frozen=True, slots=True)
class NewTokens:
    """What was added: `ids` of the tokens, and for each the ids that its text had before."""

    ids: tuple[int, ...] = ()
    former_ids: tuple[tuple[int, ...], ...] = ()


def add_new_tokens(tokenizer: Any, tokens: Sequence[str]) -> NewTokens:
    """Add `tokens` to `tokenizer` (changed in place). Raises UserError, for all at once, for known, doubled and blank ones."""
    known = tokenizer.get_vocab()
    faults = []
    for place, token in enumerate(tokens):
        if not token.strip():
            faults.append(Fault(f"'{token}' is blank", "model.new_tokens", "", "leave it out"))
        elif token in known:
            what = f"'{token}' is a token of this model already (id {known[token]})"
            faults.append(Fault(what, "model.new_tokens", "its row needs no start", "leave it out"))
        elif token in tokens[:place]:
            faults.append(Fault(f"'{token}' is named twice", "model.new_tokens", "", "name it once"))
    if faults:
        raise UserError(faults)
    former = tuple(tuple(tokenizer(token, add_special_tokens=False)["input_ids"]) for token in tokens)
    tokenizer.add_tokens(list(tokens))
    return NewTokens(tuple(tokenizer.convert_tokens_to_ids(list(tokens))), former)


@torch.no_grad()
def make_room(model: Any, new: NewTokens) -> int:
    """Give the new ids their rows, each the mean of its former tokens' rows, in embedding and head; returns rows added.

    A vocabulary that was padded keeps its size as long as the ids fit. Call before an adapter is attached.
    """
    if not new.ids:
        return 0
    before = int(model.get_input_embeddings().weight.shape[0])
    needed = max(new.ids) + 1
    if needed > before:
        model.resize_token_embeddings(needed, mean_resizing=False)
    tables = [model.get_input_embeddings().weight]
    head = model.get_output_embeddings()
    if head is not None and head.weight is not tables[0]:
        tables.append(head.weight)
    for table in tables:
        for index, former in zip(new.ids, new.former_ids, strict=True):
            rows = table[list(former)].float() if former else table[:before].float()
            table[index] = rows.mean(dim=0).to(table.dtype)
    return max(needed - before, 0)
