"""Plain text: a row for each paragraph, line or file, its characters as written."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from finetune.data.read.files import SourceFile
from finetune.data.read.lines import BreakOffError, file_lines
from finetune.data.read.record import Record, Reject, reject
from finetune.data.read.streams import TextLine

Unit = Literal["paragraph", "line", "file"]


def read_text(file: SourceFile, unit: Unit) -> Iterator[Record | Reject]:
    """Records {"text": …}: paragraphs are parted by blank lines, and a row does not hold the line end after it."""
    gathered: list[TextLine] = []
    try:
        for line in file_lines(file):
            blank = not line[2].strip()
            if unit == "file" or not blank:
                gathered.append(line)
            if gathered and (unit == "line" or (unit == "paragraph" and blank)):
                yield _row(file, gathered)
                gathered = []
    except BreakOffError as broken:
        if gathered:
            yield _row(file, gathered)
        yield reject(file.name, broken.line, broken.byte, broken, "")
        return
    if any(line[2].strip() for line in gathered):
        yield _row(file, gathered)


def _row(file: SourceFile, lines: list[TextLine]) -> Record | Reject:
    number, byte, _ = lines[0]
    raw = b"".join([content for _, _, content in lines])
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        reason = f"the bytes are not valid {file.nature.encoding} ({error.reason}); source.encoding says what they are"
        return reject(file.name, number, byte, reason, raw)
    whole = text.removesuffix("\n").removesuffix("\r")
    return Record(number, byte, whole, {"text": whole})
