"""The texts of a row by which rows are compared with one another."""

from __future__ import annotations

from collections.abc import Iterable

from finetune.data.rows import Row, Turn
from finetune.digest import canonical_json

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


def calls_of(row: Row) -> str:
    """The calls of tools in the answer, as JSON, or ''. An answer that calls a tool need have no text, and is not empty for
    that; its form is the tool's, so it is not compared with the forms of texts."""
    turns = row.chosen if row.kind == "preference" else row.messages
    last = next((turn for turn in reversed(turns) if turn["role"] == "assistant"), None)
    return canonical_json(last["tool_calls"]) if last is not None and last.get("tool_calls") else ""


def _contents(turns: Iterable[Turn]) -> str:
    given = [(str(turn["role"]), _said(turn)) for turn in turns]
    said = [content for role, content in given if content and role not in _INSTRUCTING]
    return "\n".join(said or [content for _, content in given if content])


def _said(turn: Turn) -> str:
    content = str(turn.get("content") or "")
    return f"{content}\n{canonical_json(turn['tool_calls'])}" if turn.get("tool_calls") else content
