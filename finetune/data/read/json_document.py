"""JSON documents, streamed: an array of rows, an object with the rows under a key, or objects one after another.

The brackets are followed by a scanner that knows strings and nothing else; what lies between those of a row is parsed by
the same strict rules as a line. So memory holds one row, and a faulty row costs itself: where brackets do not match,
the scanner goes on at the next place where a row can begin.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import IO

from finetune.data.read.files import SourceFile
from finetune.data.read.json_line import parse_object
from finetune.data.read.record import Record, Reject, RowError, reject
from finetune.data.read.salvage import Salvage
from finetune.data.read.sniff import ROW_KEYS
from finetune.data.read.streams import BREAKS, CHUNK_BYTES, UTF8_BOM, open_plain, read_some, text_stream
from finetune.errors import UserError

MAX_ROW_BYTES = 1 << 25
# A string (the group holds its closing quote, absent when a line or the buffer ends first), or a bracket.
_TOKEN = re.compile(rb'"[^"\\\n]*(?:\\.[^"\\\n]*)*("?)|[{}\[\]]', re.DOTALL)
# Lists of rows under these keys, beside those that are read, would be lost without a word.
_OTHER_SIDES = frozenset({"test", "validation", "valid", "val", "dev", "eval", "evaluation"})
_NOWHERE = 1 << 30  # no row can begin: between the keys beside the rows
_CLOSES = {ord("}"): ord("{"), ord("]"): ord("[")}
_BETWEEN = b" \t\r\n,"
_NO_JUNK = _BETWEEN + UTF8_BOM
_NO_JUNK_BEHIND = _NO_JUNK + b"]}"  # what closes the list and the document behind rows that were salvaged
_QUOTE, _OBJECT, _ARRAY = ord('"'), ord("{"), ord("[")


def read_json_document(file: SourceFile) -> Iterator[Record | Reject]:
    """The rows of a document. `byte` is None where the encoding is not UTF-8."""
    scanner = _Scanner()
    salvage = Salvage()
    exact = file.nature.encoding == "utf-8"
    broken: Exception | None = None
    with open_plain(file.path, file.nature.compression) as stream:
        chunks = _chunks(stream, file.nature.encoding)
        while True:
            try:
                chunk = next(chunks, b"")
            except BREAKS as error:
                if not file.nature.compression:
                    raise
                chunk, broken = b"", error
            for line, byte, raw in scanner.feed(chunk):
                yield from _records(file.name, line, byte if exact else None, raw, salvage)
            if scanner.other_side:
                raise UserError(
                    f"{file.name} holds rows under '{scanner.other_side}' beside those that are read",
                    why="they would be left out, and nothing would say so",
                    fix="write each list to a file of its own, and name those that are wanted in source.files",
                )
            if not chunk:
                break
    why = f"the compressed file breaks off: {broken}" if broken else scanner.unfinished()
    if why:
        yield from _faulty(
            file.name, scanner.line, scanner.byte if exact else None, why, scanner.rest(), salvage
        )


def _records(
    name: str, line: int, byte: int | None, raw: bytes, salvage: Salvage
) -> Iterator[Record | Reject]:
    try:
        value = parse_object(raw)
    except RowError as fault:
        yield from _faulty(name, line, byte, fault, raw, salvage)
    else:
        salvage.note(value)
        yield Record(line, byte, raw, value)


def _faulty(
    name: str, line: int, byte: int | None, why: object, raw: bytes, salvage: Salvage
) -> Iterator[Record | Reject]:
    """A faulty row, and the rows that it has swallowed."""
    told = False
    for offset, piece, is_row in salvage.pieces(raw):
        place = None if byte is None else byte + offset
        if is_row:
            yield from _records(name, line, place, piece, salvage)
        elif not told or piece.strip(_NO_JUNK_BEHIND):
            yield reject(name, line, place, why, piece)
            told = True
        line += piece.count(b"\n")


def _chunks(stream: IO[bytes], encoding: str) -> Iterator[bytes]:
    """The document in UTF-8, piece by piece."""
    if encoding == "utf-8":
        while chunk := read_some(stream, CHUNK_BYTES):
            yield chunk
        return
    decoded = text_stream(stream, encoding)
    while text := decoded.read(CHUNK_BYTES):
        yield text.encode("utf-8", errors="surrogatepass")


class _Scanner:
    """Cuts a document into the bytes of its rows, and of what stands between them and is none.

    `_open` holds the brackets that are open; the rows stand inside `_depth` of them. Offsets are those of `_buffer`,
    which begins at byte `_base` of the document.
    """

    def __init__(self) -> None:
        self._buffer = b""
        self._base = 0
        self._open: list[int] = []
        self._depth = 0
        self._at = 0  # where scanning goes on
        self._row: int | None = None  # where the open row starts
        self._free = 0  # end of the last row or bracket: what follows belongs to no row
        self._key: tuple[int, int] | None = None  # the last string of an object at the top
        self._counted = (0, 1)  # an offset and its line
        self._ended = False
        self._beside = ""  # the key of another side whose list is open at the top, or whose rows were seen
        self._beside_rows = False
        self.other_side = ""  # that key, in a document whose rows stand elsewhere

    @property
    def line(self) -> int:
        """Line of the place where scanning stands."""
        return self._line_of(self._row if self._row is not None else self._at)

    @property
    def byte(self) -> int:
        """Byte of the same place."""
        return self._base + (self._row if self._row is not None else self._at)

    def rest(self) -> bytes:
        """What is left over at the end."""
        return self._buffer[self._row if self._row is not None else self._at :]

    def unfinished(self) -> str:
        """Why the document is not complete, or ''."""
        return "the document breaks off: a closing bracket is missing" if self._open else ""

    def feed(self, chunk: bytes) -> Iterator[tuple[int, int, bytes]]:
        """Line, byte and content of all that became complete with this chunk; an empty chunk is the end."""
        self._take(chunk)
        self._ended = not chunk
        yield from self._scan()
        while self._row is not None and (self._ended or len(self._buffer) - self._row > MAX_ROW_BYTES):
            begins = self._next_row_start()
            if begins is None:
                if self._ended:
                    return
                begins = len(self._buffer)
            yield self._cut(self._row, begins)
            self._row, self._at, self._free = None, begins, begins
            del self._open[self._depth :]
            yield from self._scan()
        if self._ended:
            yield from self._junk(len(self._buffer))

    def _take(self, chunk: bytes) -> None:
        if self._depth == _NOWHERE:
            self._free = self._at
        keep = min(self._row if self._row is not None else self._at, self._free, self._at)
        if self._key is not None:
            keep = min(keep, self._key[0])
        self._line_of(keep)
        self._buffer = self._buffer[keep:] + chunk
        self._base += keep
        self._at -= keep
        self._free -= keep
        self._row = None if self._row is None else self._row - keep
        self._key = None if self._key is None else (self._key[0] - keep, self._key[1] - keep)
        self._counted = (self._counted[0] - keep, self._counted[1])

    def _scan(self) -> Iterator[tuple[int, int, bytes]]:
        buffer = self._buffer
        for token in _TOKEN.finditer(buffer, self._at):
            start, end = token.span()
            mark = buffer[start]
            if mark == _QUOTE:
                if not token[1] and not self._ended and buffer[end:] in (b"", b"\\"):
                    self._at = start  # the string goes on in the next chunk
                    return
                if len(self._open) == 1 and self._depth in (0, _NOWHERE):
                    self._key = (start, end)
            elif mark in _CLOSES:
                yield from self._close(_CLOSES[mark], start, end)
            else:
                yield from self._begin(mark, start)
                self._open.append(mark)
        self._at = len(buffer)

    def _begin(self, mark: int, start: int) -> Iterator[tuple[int, int, bytes]]:
        """A bracket opens: that of the rows, of a row, or one inside a row."""
        if (
            self._row is not None
            and mark == _OBJECT
            and self._open[-1] == _OBJECT
            and not self._after_colon(start)
        ):
            # In an object an object follows a colon only: the brace that ends the row is missing.
            yield self._cut(self._row, start)
            del self._open[self._depth :]
            self._row, self._free = None, start
        self._look_beside(mark, start)
        if self._is_row_key(mark, start):
            if self._beside_rows:
                self.other_side = self._beside
            self._row, self._key, self._depth, self._free = None, None, 2, start + 1
        elif len(self._open) == self._depth:
            yield from self._junk(start)
            if mark == _ARRAY and self._depth == 0:
                self._depth, self._free = 1, start + 1
            else:
                self._row = start

    def _is_row_key(self, mark: int, start: int) -> bool:
        """Whether `"data": [` of an object at the top opens here."""
        return self._list_key(mark, start) in ROW_KEYS

    def _list_key(self, mark: int, start: int) -> str:
        """The key of an object at the top whose list opens here, or ''."""
        if mark != _ARRAY or self._key is None or len(self._open) != 1 or self._depth not in (0, _NOWHERE):
            return ""
        first, last = self._key
        name = self._buffer[first + 1 : last - 1].decode("utf-8", errors="replace")
        return name if self._buffer[last:start].strip() == b":" else ""

    def _look_beside(self, mark: int, start: int) -> None:
        """Note rows of another side: an object in a list under its key."""
        if not self._open:
            self._beside, self._beside_rows = "", False
        elif not self._beside_rows:
            if name := self._list_key(mark, start):
                self._beside = name if name in _OTHER_SIDES else ""
            elif self._beside and mark == _OBJECT and self._open[1:] == [_ARRAY]:
                self._beside_rows = True
                if self._depth == _NOWHERE:
                    self.other_side = self._beside

    def _close(self, wanted: int, start: int, end: int) -> Iterator[tuple[int, int, bytes]]:
        if len(self._open) > self._depth:
            if wanted in self._open[self._depth :]:
                while self._open.pop() != wanted:
                    pass
            if len(self._open) == self._depth and self._row is not None:
                yield self._cut(self._row, end)
                self._row, self._free, self._key = None, end, None
        elif self._open and self._open[-1] == wanted:
            yield from self._junk(start)
            self._open.pop()
            self._free = end
            if not self._open:
                self._depth = 0
            elif len(self._open) == 1 and self._depth == 2:
                self._depth = _NOWHERE

    def _junk(self, end: int) -> Iterator[tuple[int, int, bytes]]:
        """What stands between rows and is neither white space nor a comma; the keys beside the rows are no junk."""
        start, self._free = self._free, end
        if self._depth == _NOWHERE:
            return
        between = self._buffer[start:end]
        if content := between.strip(_NO_JUNK):
            at = start + between.index(content)
            yield self._line_of(at), self._base + at, content

    def _cut(self, start: int, end: int) -> tuple[int, int, bytes]:
        return self._line_of(start), self._base + start, self._buffer[start:end].rstrip(_BETWEEN)

    def _after_colon(self, start: int) -> bool:
        return self._buffer[max(0, start - 256) : start].rstrip().endswith(b":")

    def _next_row_start(self) -> int | None:
        """The next brace that stands at a line's beginning as far in as that of the open row."""
        assert self._row is not None
        line_start = self._buffer.rfind(b"\n", 0, self._row) + 1
        margin = self._buffer[line_start : self._row]
        if margin.strip():
            return None
        found = re.compile(rb"\n" + re.escape(margin) + rb"\{").search(self._buffer, self._row + 1)
        return None if found is None else found.end() - 1

    def _line_of(self, offset: int) -> int:
        at, line = self._counted
        if offset > at:
            line += self._buffer.count(b"\n", at, offset)
            self._counted = (offset, line)
        elif offset < at:
            line -= self._buffer.count(b"\n", max(offset, 0), at)
        return line
