"""The lines of text files with their numbers and bytes, and how a big file is divided into ranges of whole lines."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from finetune.data.read.files import SourceFile
from finetune.data.read.streams import BREAKS, CHUNK_BYTES, TextLine, open_file, open_plain, text_lines

_LINE_FEED = ord("\n")


@dataclass(frozen=True, slots=True)
class Range:
    """A part of a file that is read by itself: bytes [start, stop) of lines, or row groups [start, stop) of a table.

    `first` is the number of the line or row with which it begins, from 1.
    """

    start: int
    stop: int
    first: int


class BreakOffError(Exception):
    """The compressed file ends too early or is damaged; `line` and `byte` are those of the line that is missing."""

    def __init__(self, line: int, byte: int, why: object) -> None:
        super().__init__(f"the compressed file breaks off after line {line - 1}: {why}")
        self.line = line
        self.byte = byte


def file_lines(file: SourceFile, within: Range | None = None) -> Iterator[TextLine]:
    """The lines of a text file, blank ones too. Raises BreakOffError where a compressed file breaks off."""
    nature = file.nature
    last = (0, 0, b"")
    with open_file(file.path) if within else open_plain(file.path, nature.compression) as stream:
        if within is not None:
            stream.seek(within.start)
            yield from text_lines(stream, "utf-8", within.first, within.start, within.stop)
        elif not nature.compression:
            yield from text_lines(stream, nature.encoding)
        else:
            try:
                for last in text_lines(stream, nature.encoding):
                    yield last
            except BREAKS as error:
                raise BreakOffError(last[0] + 1, last[1] + len(last[2]), error) from None


def split_lines(file: SourceFile, n_bytes: int) -> list[Range]:
    """Ranges of whole lines of about `n_bytes`, each with the number of its first line: one quick pass over the file."""
    import numpy  # only for files that are divided: it takes longer to import than most files to read

    def line_feeds(part: bytes) -> int:  # ten times as fast as bytes.count
        return int(numpy.count_nonzero(numpy.frombuffer(part, numpy.uint8) == _LINE_FEED))

    ranges: list[Range] = []
    start = position = 0
    first = number = 1
    with open_file(file.path) as stream:
        while chunk := stream.read(CHUNK_BYTES):
            at = 0
            while (cut := chunk.find(b"\n", max(at, start + n_bytes - position - 1))) >= 0:
                number += line_feeds(chunk[at : cut + 1])
                at = cut + 1
                ranges.append(Range(start, position + at, first))
                start, first = position + at, number
            number += line_feeds(chunk[at:])
            position += len(chunk)
    return [*ranges, Range(start, position, first)] if position > start else ranges
