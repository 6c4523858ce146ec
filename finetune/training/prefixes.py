"""Packs whose rows begin alike, with that beginning computed once: the collator, and whether a model can take them.

A pack [prompt a | prompt b | prompt c] becomes [prompt a | b | c]: b and c take positions behind the prompt and see the
prompt and themselves (`model/documents.py`). Their first token is no target, so what predicts each target is where it was.

Shapes: T tokens of the row, S segments (rows of the packs).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from finetune.data.pair_tokens import Answer, AnsweredPrompt
from finetune.data.prefixes import shared_beginnings
from finetune.data.tokenise import TokenisedRow
from finetune.model.adapters import without_adapters
from finetune.model.attention import ATTENTION_NAME
from finetune.recipe.schema import Recipe
from finetune.training.memory_saving import drops_out
from finetune.training.sharing import prompts_can_be_shared

_PROMPT_TOKENS = _ANSWER_TOKENS = 32
_OF_TOKENS = ("input_ids", "labels", "weights")
# What tells other attentions where rows begin; the places say it wrong once rows go on from one another.
_OF_WHOLE_ROWS = ("cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")


def prefixes_can_be_shared(model: Any, recipe: Recipe, rows: Sequence[TokenisedRow]) -> bool:
    """Whether the recipe asks for it, and the model, tried on made-up rows of the ids of `rows`, keeps them apart."""
    attention = without_adapters(model).config._attn_implementation
    if not recipe.shares_prefixes or attention != ATTENTION_NAME or not rows or drops_out(model):
        return False
    known = list(itertools.chain.from_iterable(row.input_ids for row in rows[:8]))
    wanted = _PROMPT_TOKENS + 2 * _ANSWER_TOKENS
    ids = list(itertools.islice(itertools.cycle(known), wanted))
    prompt, first, second = (
        ids[:_PROMPT_TOKENS],
        ids[_PROMPT_TOKENS:-_ANSWER_TOKENS],
        ids[-_ANSWER_TOKENS:][::-1],
    )
    answers = tuple(Answer(list(answer), list(answer)) for answer in (first, second))
    return prompts_can_be_shared(model, [AnsweredPrompt("trial", prompt, answers)])


class PrefixCollator:
    """A collator of packs whose batches hold common beginnings once.

    Batches in which rows begin alike also have `branches` [S, 4] (`find_segments`) and `repeated_tokens`, how many tokens
    were left out; `cu_seq_lens_q` are then the lengths of what is left of each row.
    """

    def __init__(self, collate: Callable[[list[dict[str, Any]]], dict[str, Any]]) -> None:
        self._collate = collate

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        shared = [_shared(example) for example in examples]
        repeated = sum(length for pack in shared for _, length in pack)
        if not repeated:
            return self._collate(examples)
        batch = self._collate(
            [_without_repeats(example, pack) for example, pack in zip(examples, shared, strict=True)]
        )
        for name in _OF_WHOLE_ROWS:
            batch.pop(name, None)
        ends: list[int] = batch["cu_seq_lens_q"].tolist()
        branches, positions, first = [], [], 0
        for pack in shared:
            for place, (other, length) in enumerate(pack, start=first):
                start, stop = ends[place], ends[place + 1]
                prefix = ends[first + other] if length else start
                branches.append((start, stop, prefix, prefix + length))
                positions.append(torch.arange(length, length + stop - start))
            first += len(pack)
        batch["position_ids"] = torch.cat(positions)[None]
        batch["branches"] = torch.tensor(branches)
        batch["repeated_tokens"] = repeated
        return batch


def _shared(example: dict[str, Any]) -> list[tuple[int, int]]:
    bounds = list(itertools.pairwise(itertools.accumulate(example["seq_lengths"], initial=0)))
    rows = [(example["input_ids"][start:stop], example["labels"][start:stop]) for start, stop in bounds]
    return shared_beginnings(rows)


def _without_repeats(example: dict[str, Any], shared: Sequence[tuple[int, int]]) -> dict[str, Any]:
    lengths = example["seq_lengths"]
    starts = itertools.accumulate(lengths, initial=0)
    kept = [
        (start + left_out, start + length)
        for start, length, (_, left_out) in zip(starts, lengths, shared, strict=False)
    ]
    trimmed = {
        name: [value for start, stop in kept for value in example[name][start:stop]]
        for name in _OF_TOKENS
        if name in example
    }
    return {**example, **trimmed, "seq_lengths": [stop - start for start, stop in kept]}
