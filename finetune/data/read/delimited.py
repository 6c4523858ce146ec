"""CSV and TSV: every cell is text as written, quoted line breaks included, and a stray quote costs one line, not the rest."""

from __future__ import annotations

import csv
import re
from collections import deque
from collections.abc import Iterator
from typing import Literal, NamedTuple

from finetune.data.read.files import SourceFile
from finetune.data.read.lines import BreakOffError, file_lines
from finetune.data.read.record import Record, Reject, reject
from finetune.errors import UserError

MAX_RECORD_CHARACTERS = 1 << 24


class _Line(NamedTuple):
    number: int
    byte: int
    text: str
    valid: bool


def read_delimited(file: SourceFile, *, quoted: bool) -> Iterator[Record | Reject]:
    """One record a row, its keys from the header. An empty cell is an empty text; blank lines are passed over.

    A row that is not well formed (a quote that never ends, text after a closing quote) is rejected with its first line,
    and reading goes on with the next line; a row with more or fewer cells than the header is rejected as a whole.
    Raises UserError for a header that cannot be one.
    """
    csv.field_size_limit(MAX_RECORD_CHARACTERS)  # the library's own limit, 128 KiB, is below a long document
    rows = _Rows(file, quoted=quoted)
    header: list[str] | None = None
    try:
        for lines, cells in rows:
            first = lines[0]
            raw = "".join([line.text for line in lines]).rstrip("\r\n")
            if header is None:
                header = _header(cells, file)
            elif isinstance(cells, str):
                yield reject(file.name, first.number, first.byte, cells, raw)
            elif not all(line.valid for line in lines):
                reason = f"the bytes are not valid {file.nature.encoding}; source.encoding says what they are"
                yield reject(file.name, first.number, first.byte, reason, raw)
            elif len(cells) != len(header):
                reason = f"the row has {len(cells)} cells where the header has {len(header)}"
                yield reject(file.name, first.number, first.byte, reason, raw)
            else:
                yield Record(first.number, first.byte, raw, dict(zip(header, cells, strict=True)))
    except BreakOffError as broken:
        yield reject(file.name, broken.line, broken.byte, broken, "")


def _header(cells: list[str] | str, file: SourceFile) -> list[str]:
    if isinstance(cells, str):
        raise UserError(f"the header of {file.path} is not well formed: {cells}", fix="mend its first line")
    names = [cell.strip() for cell in cells]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UserError(
            f"{file.path} has two columns called '{twice[0]}'", fix="give every column a name of its own"
        )
    return names


class _Rows:
    """The lines and cells of each row; of a row that is not well formed its first line and the reason.

    Rows are cut by the csv module, which pulls as many lines as a row needs. When it fails, the lines after the first
    are read again: they may be good rows that a stray quote had swallowed.
    """

    def __init__(self, file: SourceFile, *, quoted: bool) -> None:
        self._lines = file_lines(file)
        self._delimiter = file.nature.delimiter
        self._quoting: Literal[0, 3] = csv.QUOTE_MINIMAL if quoted else csv.QUOTE_NONE
        self._again: deque[_Line] = deque()
        self._taken: list[_Line] = []
        self._size = 0

    def __iter__(self) -> Iterator[tuple[list[_Line], list[str] | str]]:
        reader = self._reader()
        while True:
            self._taken, self._size = [], 0
            try:
                cells = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                first, *rest = self._taken
                self._again.extendleft(reversed(rest))
                yield [first], f"the row is not well formed: {error}"
                reader = self._reader()
                continue
            if cells and any(not line.text.isspace() for line in self._taken):
                yield self._taken, cells

    def _reader(self) -> Iterator[list[str]]:
        return csv.reader(self._feed(), delimiter=self._delimiter, quoting=self._quoting, strict=True)

    def _feed(self) -> Iterator[str]:
        while True:
            line = self._again.popleft() if self._again else self._next()
            if line is None:
                return
            self._taken.append(line)
            self._size += len(line.text)
            if len(self._taken) > 1 and self._size > MAX_RECORD_CHARACTERS:
                raise csv.Error(f"no closing quote within {MAX_RECORD_CHARACTERS >> 20} MiB")
            yield line.text

    def _next(self) -> _Line | None:
        found = next(self._lines, None)
        if found is None:
            return None
        number, byte, raw = found
        if number == 1 and b"\r" in raw.rstrip(b"\r\n") and not raw.endswith(b"\n"):
            self._again.extend(_lines_of_old(raw, byte))  # the whole file is one line to all others
            return self._again.popleft()
        return _line(number, byte, raw)


def _lines_of_old(raw: bytes, byte: int) -> Iterator[_Line]:
    """The lines of a file whose lines end with a carriage return alone, as some spreadsheets write them."""
    for number, line in enumerate(re.findall(rb"[^\r]*\r|[^\r]+", raw), start=1):
        yield _line(number, byte, line)
        byte += len(line)


def _line(number: int, byte: int, raw: bytes) -> _Line:
    try:
        return _Line(number, byte, raw.decode(), valid=True)
    except UnicodeDecodeError:
        return _Line(number, byte, raw.decode(errors="backslashreplace"), valid=False)
