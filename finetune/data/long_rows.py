"""Rows that are too long, made to fit without ever touching an answer.

`data.long_rows: truncate_prompt` leaves out the oldest turns; `split` makes several rows of one, so that all answers are
learnt, each of them once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from finetune.data.row_tokens import IGNORED, TokenisedRow
from finetune.data.rows import Row


class Tokenised(Protocol):
    """What has a length and targets: a tokenised row, or a prompt with its answers."""

    @property
    def input_ids(self) -> list[int]: ...

    @property
    def n_targets(self) -> int: ...


Result = TypeVar("Result", bound=Tokenised)

GAP = "\n…\n"  # stands for what was cut, so that two halves never read as one sentence


def shorten(row: Row, max_tokens: int, tokenise: Callable[[Row], Result]) -> Result | None:
    """The row within `max_tokens`, or None when its answer leaves no room for any of its prompt.

    Oldest exchanges go first, each from one user turn to the next, so that a conversation still begins with a user.
    When one exchange is left, the middle of its longest turn that is no answer is cut. The system turn stays.
    """
    if row.kind != "chat":
        return None  # text has no prompt that could be cut
    head = _length_of_head(row.messages)
    system, turns = row.messages[:head], row.messages[head:]
    starts = [index for index, turn in enumerate(turns) if turn["role"] == "user"]
    last_answer = max(index for index, turn in enumerate(turns) if turn["role"] == "assistant")
    for start in [start for start in starts if 0 < start < last_answer]:
        done = tokenise(replace(row, messages=(*system, *turns[start:])))
        if len(done.input_ids) <= max_tokens:
            return done if done.n_targets else None
    remaining = turns[max([start for start in starts if start < last_answer], default=0) :]
    return _cut_longest(replace(row, messages=(*system, *remaining)), head, max_tokens, tokenise)


def split(row: Row, max_tokens: int, tokenise: Callable[[Row], TokenisedRow]) -> list[TokenisedRow]:
    """The row as rows within `max_tokens`, named id#0, id#1, …; together they hold each of its targets once.

    A conversation is parted between exchanges. Each part begins with the system turn and with earlier exchanges as
    context, whose answers are read and not learnt again, in up to half of `max_tokens`. An exchange that does not fit by
    itself has the middle of its longest prompt turn cut; where not even that helps, its answer is in no part. Text and
    tokens are parted every `max_tokens`.
    """
    if row.kind != "chat":
        return _chunks(tokenise(row), max_tokens)
    head = _length_of_head(row.messages)
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
            done = _cut_longest(
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
            parts.append(TokenisedRow(f"{whole.row_id}#{len(parts)}", ids, labels, n_targets))
    return parts


def _length_of_head(messages: tuple[dict[str, Any], ...]) -> int:
    for index, turn in enumerate(messages):
        if turn["role"] not in ("system", "developer"):
            return index
    return len(messages)


def _cut_longest(row: Row, head: int, max_tokens: int, tokenise: Callable[[Row], Result]) -> Result | None:
    """Cut the middle out of the longest turn that is neither system nor answer; the most that fits is kept."""
    candidates = [
        index
        for index, turn in enumerate(row.messages)
        if index >= head and turn["role"] != "assistant" and isinstance(turn.get("content"), str)
    ]
    if not candidates:
        return None
    longest = max(candidates, key=lambda index: len(row.messages[index]["content"]))
    text: str = row.messages[longest]["content"]
    best: Result | None = None
    low, high = 1, len(text) - 1
    while low <= high:  # more characters, more tokens: the largest number that fits
        n_kept = (low + high) // 2
        done = tokenise(_with_content(row, longest, _without_middle(text, n_kept)))
        if len(done.input_ids) <= max_tokens:
            best, low = done, n_kept + 1
        else:
            high = n_kept - 1
    return best if best is not None and best.n_targets else None


def _without_middle(text: str, n_kept: int) -> str:
    front = (n_kept + 1) // 2
    back = n_kept - front
    return text[:front] + GAP + (text[len(text) - back :] if back else "")


def _with_content(row: Row, index: int, content: str) -> Row:
    turns = list(row.messages)
    turns[index] = {**turns[index], "content": content}
    return replace(row, messages=tuple(turns))
