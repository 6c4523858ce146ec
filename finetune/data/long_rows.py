"""Shortening a row that is too long, without ever touching an answer: `data.long_rows: truncate_prompt`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol, TypeVar

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
    head = length_of_head(row.messages)
    system, turns = row.messages[:head], row.messages[head:]
    starts = [index for index, turn in enumerate(turns) if turn["role"] == "user"]
    last_answer = max(index for index, turn in enumerate(turns) if turn["role"] == "assistant")
    for start in [start for start in starts if 0 < start < last_answer]:
        done = tokenise(replace(row, messages=(*system, *turns[start:])))
        if len(done.input_ids) <= max_tokens:
            return done if done.n_targets else None
    remaining = turns[max([start for start in starts if start < last_answer], default=0) :]
    return cut_longest(replace(row, messages=(*system, *remaining)), head, max_tokens, tokenise)


def length_of_head(messages: tuple[dict[str, Any], ...]) -> int:
    """How many system turns a conversation begins with."""
    for index, turn in enumerate(messages):
        if turn["role"] not in ("system", "developer"):
            return index
    return len(messages)


def cut_longest(row: Row, head: int, max_tokens: int, tokenise: Callable[[Row], Result]) -> Result | None:
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
