"""JSON lines: one record a line, and a faulty line costs itself alone."""

from __future__ import annotations

import json
from collections.abc import Iterator

from finetune.data.read.files import SourceFile
from finetune.data.read.json_line import parse_object
from finetune.data.read.lines import BreakOffError, Range, file_lines
from finetune.data.read.record import Record, Reject, RowError, reject
from finetune.data.read.streams import UTF8_BOM

_BETWEEN = b" \t\r"
_decode_one = json.JSONDecoder().raw_decode


def read_json_lines(file: SourceFile, within: Range | None = None) -> Iterator[Record | Reject]:
    """One record a line that is not blank; a compressed file that breaks off ends with one Reject.

    A cut last line is a Reject like any other faulty line, and a whole one without line end is a record. Where files
    were joined, a line may begin with a byte order mark, or hold several objects, of which each is a record.
    """
    try:
        for line, byte, raw in file_lines(file, within):
            content = raw.rstrip(b"\r\n")
            try:
                yield Record(line, byte, content, parse_object(content))
            except RowError as fault:
                if content.strip():
                    yield from _joined(file.name, line, byte, content, fault)
    except BreakOffError as broken:
        yield reject(file.name, broken.line, broken.byte, broken, "")


def _joined(name: str, line: int, byte: int, content: bytes, fault: RowError) -> Iterator[Record | Reject]:
    """The objects that a line holds one after another, and what is left of it; the line as a whole when it begins with
    none."""
    at = 0
    while at < len(content):
        if content.startswith(UTF8_BOM, at):
            at += len(UTF8_BOM)
        if not content[at:].strip():
            return
        start, at = at, _end_of_object(content, at)
        if at == start:
            rest = content[start:] if start else content
            yield reject(name, line, byte + (len(content) - len(rest)), fault, rest)
            return
        found = content[start:at].strip(_BETWEEN)
        start += content[start:at].index(found)
        try:
            yield Record(line, byte + start, found, parse_object(found))
        except RowError as own:
            yield reject(name, line, byte + start, own, found)


def _end_of_object(content: bytes, start: int) -> int:
    """Where the JSON object ends that begins at `start`, with the white space after it; `start` when there is none."""
    rest = content[start:].decode("utf-8", errors="surrogateescape")
    text = rest.lstrip(" \t\r")
    if not text.startswith("{"):
        return start
    try:
        _, end = _decode_one(text)
    except (ValueError, RecursionError):
        return start
    end += len(rest) - len(text)
    end += len(rest[end:]) - len(rest[end:].lstrip(" \t\r"))
    return start + len(rest[:end].encode("utf-8", errors="surrogateescape"))
