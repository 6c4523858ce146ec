"""The texts of a row by which rows are compared with one another."""

from __future__ import annotations

from collections.abc import Iterable

from finetune.data.rows import Row, Turn

_INSTRUCTING = frozenset({"system", "developer"})


def question_text(row: Row) -> str:
    """What is asked: all before the answer, without system turns, which many rows share, unless there is nothing else."""
    return _contents(row.prompt)


def whole_text(row: Row) -> str:
    """What is asked and all that is answered, without system turns."""
    if row.kind in ("text", "tokens"):
        return question_text(row)
    parts = [_contents([*row.messages, *row.chosen, *row.rejected])]
    parts += [str(step.get("text", "")) for step in row.steps]
    return "\n".join(part for part in parts if part)


def _contents(turns: Iterable[Turn]) -> str:
    given = [(str(turn["role"]), str(turn.get("content") or "")) for turn in turns]
    said = [content for role, content in given if content and role not in _INSTRUCTING]
    return "\n".join(said or [content for _, content in given if content])
