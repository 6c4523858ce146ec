"""What a reader decided about single rows: keep, drop or fix. A build that names the file applies it.

A mark belongs to what a row says, by the digest of its content, so that it survives new rows, another order and another
file; and when the row says something else, the mark no longer holds. One line a decision; of several the last counts.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, get_args

from finetune.data.rows import Row, Turn
from finetune.errors import UserError, did_you_mean
from finetune.paths import disk_faults

Decision = Literal["keep", "drop", "fix"]
DECISIONS: tuple[Decision, ...] = get_args(Decision)
MARKED_DROP = "marked_drop"
MARKED_FIX = "marked_fix"  # to be mended, and not mended yet
_LONGEST_NOTE = 4000


@dataclass(frozen=True, slots=True)
class Mark:
    """One decision on the row with this content digest; `id` and `time` are for the reader of the file.

    `answer` is, for fix, the text that the last answer should have had; none: the row waits for somebody to mend it.
    """

    digest: str
    decision: Decision
    id: str = ""
    note: str = ""
    answer: str | None = None
    time: str = ""


class MarkFile:
    """A file of marks, JSON lines; it need not exist yet."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> dict[str, Mark]:
        """Content digest -> the last mark. Raises UserError, with the line, for one that is none."""
        if not self.path.exists():
            return {}
        marks: dict[str, Mark] = {}
        try:
            lines = self.path.read_text(encoding="utf-8").split("\n")  # notes may hold other line breaks
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(
                f"not a file of marks: {error}", where=str(self.path), fix="name one that `data review` wrote"
            ) from None
        for number, line in enumerate(lines, start=1):
            if line.strip():
                mark = _parse(line, f"{self.path}:{number}")
                marks[mark.digest] = mark
        return marks

    def add(self, row: Row, decision: str, note: str = "", answer: str | None = None) -> Mark:
        """Append a decision on `row` and push it to the disk. Raises UserError when it is none, or the note too long."""
        if decision not in DECISIONS:
            raise UserError(f"'{decision}' is no decision", fix=did_you_mean(decision, DECISIONS))
        if len(note) > _LONGEST_NOTE:
            raise UserError(f"the note has {len(note)} characters", fix=f"at most {_LONGEST_NOTE}")
        if answer is not None and decision != "fix":
            raise UserError("only a fix comes with another answer", fix="mark the row as fix")
        time = datetime.now(UTC).isoformat(timespec="seconds")
        mark = Mark(row.content_digest(), decision, row.id, note, answer, time)
        with disk_faults(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(asdict(mark), ensure_ascii=False) + "\n")
                stream.flush()
                os.fsync(stream.fileno())
        return mark


def apply_mark(row: Row, mark: Mark | None) -> tuple[Row | None, str]:
    """The row as the mark wants it, or None with the reason why it goes.

    keep, or no mark: the row itself. drop: `marked_drop`. fix: the row with its last answer replaced, or `marked_fix` when
    the mark says no answer, or the row has none that could be replaced.
    """
    if mark is None or mark.decision == "keep":
        return row, ""
    if mark.decision == "drop":
        return None, MARKED_DROP
    mended = None if mark.answer is None else with_answer(row, mark.answer)
    return (mended, "") if mended is not None else (None, MARKED_FIX)


def with_answer(row: Row, answer: str) -> Row | None:
    """The row with another text of its last answer, of a pair the chosen one; None when it has no such text."""
    if row.kind not in ("chat", "preference", "kto"):
        return None
    turns: list[Turn] = list(row.chosen if row.kind == "preference" else row.messages)
    for index in range(len(turns) - 1, -1, -1):
        if turns[index]["role"] == "assistant":
            turns[index] = {**turns[index], "content": answer}
            changed = tuple(turns)
            return (
                replace(row, chosen=changed) if row.kind == "preference" else replace(row, messages=changed)
            )
    return None


def _parse(line: str, where: str) -> Mark:
    try:
        given: Any = json.loads(line)
        mark = Mark(**given)
        if mark.decision not in DECISIONS or not isinstance(mark.digest, str):
            raise ValueError(f"the decision is {mark.decision!r}")
        if not (mark.answer is None or isinstance(mark.answer, str)):
            raise ValueError("the answer is not text")
    except (ValueError, TypeError) as error:
        raise UserError(
            f"not a mark: {error}", where=where, fix="delete the line, or make the mark again"
        ) from None
    return mark
