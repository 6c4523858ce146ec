"""One row that is too long as several that fit, all answers learnt and each of them once: `data.long_rows: split`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from finetune.data.long_rows import cut_longest, length_of_head
from finetune.data.row_tokens import IGNORED, TokenisedRow
from finetune.data.rows import Row


def split_row(row: Row, max_tokens: int, tokenise: Callable[[Row], TokenisedRow]) -> list[TokenisedRow]:
    """The row as rows within `max_tokens`, named id#0, id#1, …; together they hold each of its targets once.

    A conversation is parted between exchanges. Each part begins with the system turn and with earlier exchanges as
    context, whose answers are read and not learnt again, in up to half of `max_tokens`. An exchange that does not fit by
    itself has the middle of its longest prompt turn cut; where not even that helps, its answer is in no part. Text and
    tokens are parted every `max_tokens`.
    """
    if row.kind != "chat":
        return _chunks(tokenise(row), max_tokens)
    head = length_of_head(row.messages)
    starts = [index for index, turn in enumerate(row.messages) if index > head and turn["role"] == "user"]
    edges = [head, *starts, len(row.messages)]  # exchange k is messages[edges[k] : edges[k + 1]]

    def part(context: int, first: int, past: int) -> TokenisedRow | None:
        """Exchanges first to past - 1, after those from `context` on as context; None when it holds no answer."""
        before = [_unlearnt(turn) for turn in row.messages[edges[context] : edges[first]]]
        turns = (*row.messages[:head], *before, *row.messages[edges[first] : edges[past]])
        if not any(turn["role"] == "assistant" for turn in turns):
            return None
        return tokenise(replace(row, id=f"{row.id}#{len(parts)}", messages=turns))

    def fits(done: TokenisedRow | None, limit: int) -> bool:
        return done is None or len(done.input_ids) <= limit

    parts: list[TokenisedRow] = []
    first = 0
    while first < len(edges) - 1:
        context = first
        while context > 0 and fits(part(context - 1, first, first), max_tokens // 2):
            context -= 1
        while context < first and not fits(part(context, first, first + 1), max_tokens):
            context += 1
        past = first + 1
        while past < len(edges) - 1 and fits(part(context, first, past + 1), max_tokens):
            past += 1
        done = part(context, first, past)
        if not fits(done, max_tokens):
            alone = (*row.messages[:head], *row.messages[edges[first] : edges[past]])
            done = cut_longest(
                replace(row, id=f"{row.id}#{len(parts)}", messages=alone), head, max_tokens, tokenise
            )
        if done is not None and done.n_targets:
            parts.append(done)
        first = past
    return parts


def _unlearnt(turn: dict[str, Any]) -> dict[str, Any]:
    return {**turn, "train": False} if turn["role"] == "assistant" else turn


def _chunks(whole: TokenisedRow, max_tokens: int) -> list[TokenisedRow]:
    """Running text in stretches; the first token of each is context for the rest, and was a target of the one before.

    So stretches overlap by one token, and none of them loses a target.
    """
    parts: list[TokenisedRow] = []
    step = max(max_tokens - 1, 1)
    for start in range(0, max(len(whole.input_ids) - 1, 1), step):
        ids = whole.input_ids[start : start + max_tokens]
        labels = [IGNORED, *whole.labels[start + 1 : start + max_tokens]]
        n_targets = sum(label != IGNORED for label in labels)
        if n_targets:
            parts.append(
                TokenisedRow(f"{whole.row_id}#{len(parts)}", ids, labels, n_targets, source=whole.source)
            )
    return parts
