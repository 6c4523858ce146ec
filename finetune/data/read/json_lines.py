"""JSON lines, and how a big file of them is read in ranges of bytes by several processes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO

from finetune.data.read.files import SourceFile
from finetune.data.read.json_line import parse_object
from finetune.data.read.record import Record, Reject, RowError, reject
from finetune.data.read.streams import BREAKS, CHUNK_BYTES, TextLine, open_file, open_plain, text_lines


@dataclass(frozen=True, slots=True)
class Range:
    """A part of a file that is read by itself: bytes [start, stop) of lines, or row groups of a table.

    `first` is the number of the line or row with which it begins, from 1.
    """

    start: int
    stop: int
    first: int


def read_json_lines(file: SourceFile, within: Range | None = None) -> Iterator[Record | Reject]:
    """One record a line that is not blank; a compressed file that breaks off ends with one Reject.

    A cut last line is a Reject like any other faulty line, and a whole one without line end is a record.
    """
    name = file.name
    for line, byte, raw in file_lines(file, within):
        if isinstance(raw, str):
            yield reject(name, line, byte, raw, "")
            continue
        content = raw.rstrip(b"\r\n")
        try:
            yield Record(line, byte, content, parse_object(content))
        except RowError as fault:
            if content.strip():
                yield reject(name, line, byte, fault, content)


def file_lines(file: SourceFile, within: Range | None = None) -> Iterator[tuple[int, int, bytes | str]]:
    """Number, byte and content of the lines of a text file; where it breaks off, a last line with the reason as `str`."""
    if within is not None:
        with open_file(file.path) as stream:
            yield from _lines_within(stream, within)
        return
    nature = file.nature
    number = byte = 0
    with open_plain(file.path, nature.compression) as stream:
        try:
            for line in text_lines(stream, nature.encoding):
                number, byte, _ = line
                yield line
        except BREAKS as error:
            if not nature.compression:
                raise
            yield number + 1, byte, f"the compressed file breaks off after line {number}: {error}"


def _lines_within(stream: IO[bytes], within: Range) -> Iterator[TextLine]:
    stream.seek(within.start)
    for line in text_lines(stream, "utf-8", within.first, within.start):
        if line[1] >= within.stop:
            return
        yield line


def split_lines(file: SourceFile, n_bytes: int) -> list[Range]:
    """Ranges of whole lines of about `n_bytes`, each with the number of its first line: one quick pass over the file."""
    ranges: list[Range] = []
    start = position = 0
    first = number = 1
    with open_file(file.path) as stream:
        while chunk := stream.read(CHUNK_BYTES):
            at = 0
            while (cut := chunk.find(b"\n", max(at, start + n_bytes - position - 1))) >= 0:
                number += chunk.count(b"\n", at, cut + 1)
                at = cut + 1
                ranges.append(Range(start, position + at, first))
                start, first = position + at, number
            number += chunk.count(b"\n", at)
            position += len(chunk)
    return [*ranges, Range(start, position, first)] if position > start else ranges
