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
    broken: BreakOffError | None = None
    try:
        for line in file_lines(file):
            blank = line[2].isspace()
            if unit == "file" or not blank:
                gathered.append(line)
            if unit == "line" or (unit == "paragraph" and blank):
                yield from _row(file, gathered)
                gathered = []
    except BreakOffError as error:
        broken = error
    yield from _row(file, gathered)
    if broken is not None:
        yield reject(file.name, broken.line, broken.byte, broken, "")


def _row(file: SourceFile, lines: list[TextLine]) -> Iterator[Record | Reject]:
    """The row of some lines, or none when there is only white space in them."""
    if not lines:
        return
    number, byte, _ = lines[0]
    raw = b"".join([content for _, _, content in lines])
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        why = f"{error.reason}; source.encoding says what they are"
        yield reject(file.name, number, byte, f"the bytes are not valid {file.nature.encoding}: {why}", raw)
        return
    if text.strip():
        whole = text.removesuffix("\n").removesuffix("\r")
        yield Record(number, byte, whole, {"text": whole})
