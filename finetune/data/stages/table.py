"""All rows of a build as columns of numbers; their text stays on disk and is fetched line by line.

Legend: a row is its number in the table, 0 … n-1. `codes` of a column are small integers, equal where the values are
equal, -1 where a row has none.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from finetune.data.rows import Row
from finetune.data.stages.parts import KEYS, ROWS, parse_line, read_keys

Ints = npt.NDArray[np.int64]
Codes = npt.NDArray[np.int32]
_MOST_OPEN_FILES = 200


@dataclass(frozen=True)
class Coded:
    """A column as codes, and the value behind each code, in order of first appearance."""

    codes: Codes
    values: pa.Array

    def __len__(self) -> int:
        return len(self.values)


class Lines:
    """Lines of files on disk by file, offset and length, for any number of files and several threads."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = list(files)
        self._open: dict[int, int] = {}
        self._lock = threading.Lock()

    def read(self, file: int, offset: int, length: int) -> bytes:
        with self._lock:
            descriptor = self._open.get(file)
            if descriptor is None:
                if len(self._open) >= _MOST_OPEN_FILES:
                    os.close(self._open.pop(next(iter(self._open))))
                descriptor = self._open[file] = os.open(self._files[file], os.O_RDONLY)
            return os.pread(descriptor, length, offset)

    def close(self) -> None:
        with self._lock:
            for descriptor in self._open.values():
                os.close(descriptor)
            self._open.clear()


@dataclass
class RowTable:
    """keys: the columns of KEYS, in the order of the files. file: which of `lines` a row is in. origin: which source
    of the spec it came from. pinned: rows whose side is fixed as `regressions`."""

    keys: pa.Table
    file: Codes
    origin: Codes
    pinned: npt.NDArray[np.bool_]
    lines: Lines
    _tags: dict[str, Coded] = field(default_factory=dict)

    def __len__(self) -> int:
        return int(self.keys.num_rows)

    @classmethod
    def of_parts(cls, folders: Sequence[Path], origins: Sequence[int], pinned: Sequence[bool]) -> RowTable:
        """The rows of complete parts, one part after the other."""
        tables = [read_keys(folder) for folder in folders]
        files = [folder / ROWS for folder in folders]
        return cls.of_keys(tables, files, origins, pinned)

    @classmethod
    def of_keys(
        cls,
        tables: Sequence[pa.Table],
        files: Sequence[Path],
        origins: Sequence[int],
        pinned: Sequence[bool],
    ) -> RowTable:
        """The rows of `tables`, where the lines of tables[k] are in files[k]."""
        counts = [table.num_rows for table in tables]
        keys = pa.concat_tables(tables) if tables else KEYS.empty_table()
        return cls(
            keys=keys.combine_chunks(),
            file=np.repeat(np.arange(len(tables), dtype=np.int32), counts),
            origin=np.repeat(np.array(origins, np.int32), counts),
            pinned=np.repeat(np.array(pinned, bool), counts),
            lines=Lines(files),
        )

    def column(self, name: str) -> pa.Array:
        """One column of KEYS as a single array."""
        column = self.keys.column(name)
        return column.chunk(0) if column.num_chunks else pa.array([], KEYS.field(name).type)

    @cached_property
    def content(self) -> Coded:
        """Equal for exact duplicates."""
        return _coded(self.column("content"))

    @cached_property
    def prompt(self) -> Coded:
        """Equal for rows with the same folded prompt."""
        return _coded(self.column("prompt"))

    @cached_property
    def answer(self) -> Coded:
        """Equal for rows with the same folded answer; running text has none."""
        return _coded(self.column("answer"))

    @cached_property
    def group(self) -> Coded:
        return _coded(self.column("group"))

    def tag(self, name: str) -> Coded:
        """The values of one tag."""
        if name not in self._tags:
            by_set = _coded(self.column("tags"))  # rows with the same tags share one text of them
            values = pa.array([_tag_of(tags, name) for tags in by_set.values.to_pylist()], pa.large_string())
            coded = _coded(values.take(pa.array(by_set.codes)))
            self._tags[name] = coded
        return self._tags[name]

    def tag_names(self) -> set[str]:
        """The names of all tags."""
        texts = _coded(self.column("tags")).values.to_pylist()
        return {name for text in texts if text for name in orjson.loads(text)}

    @cached_property
    def words(self) -> Ints:
        return np.asarray(self.column("words"), np.int64)

    @cached_property
    def place(self) -> Ints:
        """Row -> its place in an order that does not depend on where rows stood: by group, id and tags."""
        by = pa.table({name: self.column(name) for name in ("group", "id", "tags")})
        order = pc.sort_indices(by, sort_keys=[(name, "ascending") for name in by.column_names])
        place = np.empty(len(self), np.int64)
        place[np.asarray(order)] = np.arange(len(self))
        return place

    @cached_property
    def _offsets(self) -> Ints:
        return np.asarray(self.column("offset"), np.int64)

    @cached_property
    def _lengths(self) -> Ints:
        return np.asarray(self.column("length"), np.int64)

    def sample(self, rows: Ints, most: int) -> Ints:
        """At most so many of `rows`, drawn by what they say: the same ones wherever they stood."""
        if len(rows) <= most:
            return rows[np.argsort(self.place[rows])]
        contents = self.column("content").take(pa.array(rows)).to_pylist()
        heads = np.frombuffer(b"".join(contents), "<u8")[::2]  # digests are as good as random
        drawn: Ints = rows[np.argpartition(heads, most)[:most]]
        return drawn[np.argsort(self.place[drawn])]

    def line(self, row: int) -> bytes:
        """The row as JSON, without a line end."""
        return self.lines.read(int(self.file[row]), int(self._offsets[row]), int(self._lengths[row]))

    def row(self, row: int) -> Row:
        return Row.from_dict(parse_line(self.line(row)))

    def text(self, name: str, row: int) -> str:
        """One value of a text column."""
        return str(self.column(name)[row])

    def texts(self, rows: Ints, text_of: Callable[[Row], str]) -> RowTexts:
        """A text of each of some rows, fetched when asked for."""
        return RowTexts(self, rows, text_of)


@dataclass(frozen=True)
class RowTexts:
    """`text_of` each of some rows of a table, as a sequence that holds none of it in memory."""

    table: RowTable
    rows: Ints
    text_of: Callable[[Row], str]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int, /) -> str:
        return self.text_of(self.table.row(int(self.rows[index])))


def _coded(column: pa.Array) -> Coded:
    encoded = column.dictionary_encode()
    return Coded(np.asarray(encoded.indices.fill_null(-1), np.int32), encoded.dictionary)


def _tag_of(tags: str, name: str) -> str | None:
    value = orjson.loads(tags).get(name) if tags else None
    return None if value is None else str(value)
