"""JSON lines: one record a line, and a faulty line costs itself alone."""

from __future__ import annotations

from collections.abc import Iterator

from finetune.data.read.files import SourceFile
from finetune.data.read.json_line import parse_object
from finetune.data.read.lines import BreakOffError, Range, file_lines
from finetune.data.read.record import Record, Reject, RowError, reject


def read_json_lines(file: SourceFile, within: Range | None = None) -> Iterator[Record | Reject]:
    """One record a line that is not blank; a compressed file that breaks off ends with one Reject.

    A cut last line is a Reject like any other faulty line, and a whole one without line end is a record.
    """
    try:
        for line, byte, raw in file_lines(file, within):
            content = raw.rstrip(b"\r\n")
            try:
                yield Record(line, byte, content, parse_object(content))
            except RowError as fault:
                if content.strip():
                    yield reject(file.name, line, byte, fault, content)
    except BreakOffError as broken:
        yield reject(file.name, broken.line, broken.byte, broken, "")
