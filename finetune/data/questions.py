"""The questions of an evaluation, as texts that train rows are compared with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.data.read import Reject, source_files
from finetune.data.read.source import iter_records
from finetune.data.spec_source import FilesSource
from finetune.digest import digest_file
from finetune.errors import UserError

# Keys under which evaluations keep what they ask, in order of preference; `input` is added to an instruction.
_KEYS = (
    "question",
    "prompt",
    "instruction",
    "query",
    "problem",
    "goal",
    "input",
    "text",
    "sentence",
    "content",
)
_INSTRUCTING = ("system", "developer")


@dataclass(frozen=True)
class Questions:
    """What one evaluation asks. `digest` is of whatever decides the texts; `ids` tell them apart in a ledger."""

    name: str
    digest: str
    ids: Sequence[str]
    texts: Sequence[str]


def read_questions(file: str, folder: Path, where: str = "") -> Questions:
    """The questions in a file of any readable format; `file` is relative to `folder`.

    Of a row with `messages` all turns before the last answer are the question, else the text under the first known key.
    Raises UserError for a missing file, a faulty row, and a row without a question.
    """
    source = FilesSource(kind="files", files=[file], max_reject_rate=0.0)
    found = source_files(source, folder, where=lambda key: where)
    ids: list[str] = []
    texts: list[str] = []
    for one in found:
        for record in iter_records(one, source):
            place = f"{one.name}:{record.line}"
            text = None if isinstance(record, Reject) else _question_in(record.value)
            if text is None:
                reason = record.reason if isinstance(record, Reject) else "the row asks nothing"
                raise UserError(
                    reason,
                    where=place,
                    why=f"it is read as an evaluation's questions for {where}",
                    fix=f"give every row `messages`, or its question under one of: {', '.join(_KEYS)}",
                )
            ids.append(place)
            texts.append(text)
    return Questions(file, " ".join(digest_file(one.path) for one in found), ids, texts)


def messages_question(messages: Sequence[Mapping[str, Any]]) -> str:
    """What a conversation asks: all before its last answer, without system turns."""
    turns = list(messages)
    if turns and turns[-1].get("role") == "assistant":
        turns.pop()
    said = [str(turn.get("content") or "") for turn in turns if turn.get("role") not in _INSTRUCTING]
    return "\n".join(content for content in said if content)


def _question_in(row: Mapping[str, Any]) -> str | None:
    messages = row.get("messages")
    if isinstance(messages, list) and all(isinstance(turn, dict) for turn in messages):
        return messages_question(messages) or None
    for key in _KEYS:
        value = row.get(key)
        if isinstance(value, str) and value.strip():
            more = row.get("input") if key == "instruction" else None
            return f"{value}\n{more}" if isinstance(more, str) and more.strip() else value
        if isinstance(value, list) and value and all(isinstance(turn, dict) for turn in value):
            return messages_question(value) or None
    return None
