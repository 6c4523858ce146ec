"""What passes from the readers of formats to the makers of rows: a record, or a reject with its place and reason."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

MAX_RAW_CHARACTERS = 1 << 20


class RowError(ValueError):
    """A record that is no row; the message is the reason given in the ledger."""


@dataclass(slots=True)  # not frozen: one is made for every row, and a frozen one takes three times as long
class Record:
    """One row as its file has it.

    `line` counts from 1: the line where the record starts, or in a table without lines the number of the row. `byte` is
    the offset of its first byte in the decompressed file, None where the format has no such thing. `raw` is what was
    read, and `value` what it says.
    """

    line: int
    byte: int | None
    raw: Any
    value: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Reject:
    """A row that cannot be used. `source` is the file as the user knows it; `raw` is the text of the row, cut at 1 MiB."""

    source: str
    line: int
    byte: int | None
    reason: str
    raw: str = ""

    def to_dict(self) -> dict[str, Any]:
        """As written to the ledger."""
        return {
            "source": self.source,
            "line": self.line,
            "byte": self.byte,
            "reason": self.reason,
            "raw": self.raw,
        }


def reject(source: str, line: int, byte: int | None, reason: object, raw: Any) -> Reject:
    """A Reject whose raw text can always be written: bytes that are not UTF-8 are shown as escapes."""
    return Reject(source, line, byte, printable(str(reason)), raw_text(raw))


def raw_text(raw: Any) -> str:
    """The text of a record for the ledger, cut at 1 MiB."""
    if isinstance(raw, bytes):
        return raw[: 4 * MAX_RAW_CHARACTERS].decode("utf-8", errors="backslashreplace")[:MAX_RAW_CHARACTERS]
    text = raw if isinstance(raw, str) else json.dumps(raw, ensure_ascii=False, default=str)
    return printable(text[:MAX_RAW_CHARACTERS])


def printable(text: str) -> str:
    """Text with lone surrogates, which no file of UTF-8 can hold, as escapes."""
    return text.encode("utf-8", errors="backslashreplace").decode("utf-8")
