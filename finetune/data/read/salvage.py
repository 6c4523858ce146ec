"""Good rows of a JSON document that a faulty one has swallowed.

A quote too many or too few turns strings inside out, and the brackets of the rows behind it can no longer be counted. In
a document of one line nothing else shows where a row begins. So where a row is no JSON, its text is searched for whole
objects that are rows: because rows before it had the same keys, or because their keys make a shape.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from finetune.data.read.record import RowError
from finetune.data.read.shapes import shape_of
from finetune.data.read.sniff import ROW_KEYS

_MOST_KINDS = 64  # different sets of keys that are remembered
_BEGINS = re.compile(r'\{\s*"')
_LOOKED_BACK = 256
_ROWS_BEGIN = re.compile(rf'"({"|".join(sorted(ROW_KEYS))})"\s*:\s*\[$')
# Brackets that never close make every attempt read on and on: beyond this many characters for each of the text it ends.
_MOST_READ, _DEEP = 20, 1000
_decode_one = json.JSONDecoder().raw_decode


class Salvage:
    """Remembers the keys of the rows of one document, and finds such rows in the text of faulty ones."""

    def __init__(self) -> None:
        self._known: set[frozenset[str]] = set()

    def note(self, row: dict[str, Any]) -> None:
        """A good row."""
        if len(self._known) < _MOST_KINDS:
            self._known.add(frozenset(row))

    def pieces(self, raw: bytes) -> Iterator[tuple[int, bytes, bool]]:
        """What the text of a faulty row is made of, in order: (offset, bytes, whether they are a row of their own)."""
        text = raw.decode("utf-8", errors="surrogateescape")
        at, start, offset, read = 1, 0, 0, 0
        while read <= _MOST_READ * len(text) and (found := _BEGINS.search(text, at)) is not None:
            at = found.start() + 1
            if _is_inside(text, found.start()):
                continue
            end, read_now = self._end_of_row(text, found.start())
            read += read_now
            if end is None:
                continue
            before, row = _bytes(text[start : found.start()]), _bytes(text[found.start() : end])
            yield offset, before, False
            yield offset + len(before), row, True
            offset += len(before) + len(row)
            at = start = end
        yield offset, _bytes(text[start:]), False

    def _end_of_row(self, text: str, start: int) -> tuple[int | None, int]:
        """Where the row ends that begins at `start`, None when none does; and how many characters were read for it."""
        try:
            value, end = _decode_one(text, start)
        except json.JSONDecodeError as error:
            return None, error.pos - start
        except RecursionError:
            return None, _DEEP
        is_row = frozenset(value) in self._known or _has_shape(value)
        return (end if is_row else None), end - start


def _has_shape(value: dict[str, Any]) -> bool:
    """Whether the keys make a row. A `text` alone does not: parts of messages have one too."""
    try:
        return shape_of(value) != "text"
    except RowError:
        return False


def _is_inside(text: str, start: int) -> bool:
    """Whether an object is the value of a key or opens a list, unless that is the list of the rows: then it is a part."""
    before = text[max(0, start - _LOOKED_BACK) : start].rstrip()
    return before.endswith(":") or (before.endswith("[") and not _ROWS_BEGIN.search(before))


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", errors="surrogateescape")
