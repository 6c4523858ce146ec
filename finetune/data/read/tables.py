"""Parquet and Arrow: the values of a table as they are, without a guess at what text means.

A table cannot tell 'absent' from 'null', and fills keys that other rows have with null: null is therefore left out, at
the top and inside, so that a turn has the keys it was given. Columns of the JSON type hold text and are parsed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet

from finetune.data.read.files import SourceFile
from finetune.data.read.json_line import parse_value
from finetune.data.read.lines import Range
from finetune.data.read.record import Record, Reject, RowError, reject
from finetune.errors import UserError

BATCH_ROWS = 1000
Convert = Callable[[Any], Any]
# What pyarrow raises for damaged files and for values that Python cannot hold.
_DAMAGE = (pa.ArrowException, OSError, ValueError, OverflowError)


def read_parquet(file: SourceFile, within: Range | None = None) -> Iterator[Record | Reject]:
    """The rows of a Parquet file, or of some of its row groups; a damaged row group ends with one Reject."""
    try:
        table = pa.parquet.ParquetFile(file.path, memory_map=True)
    except _DAMAGE as error:
        raise _unreadable(file, error) from None
    with table:
        chosen = within or Range(0, table.num_row_groups, 1)
        number = chosen.first
        for group in range(chosen.start, chosen.stop):
            after = number + table.metadata.row_group(group).num_rows
            batches = table.iter_batches(BATCH_ROWS, row_groups=[group])
            yield from _read_batches(file, table.schema_arrow, batches, number)
            number = after


def split_parquet(file: SourceFile, n_bytes: int) -> list[Range]:
    """Ranges of row groups of about `n_bytes` together."""
    try:
        metadata = pa.parquet.read_metadata(file.path)
    except _DAMAGE as error:
        raise _unreadable(file, error) from None
    ranges: list[Range] = []
    start, first, number, size = 0, 1, 1, 0
    for group in range(metadata.num_row_groups):
        row_group = metadata.row_group(group)
        number += row_group.num_rows
        size += row_group.total_byte_size
        if size >= n_bytes or group == metadata.num_row_groups - 1:
            ranges.append(Range(start, group + 1, first))
            start, first, size = group + 1, number, 0
    return ranges


def read_arrow(file: SourceFile) -> Iterator[Record | Reject]:
    """The rows of an Arrow file or stream."""
    with pa.memory_map(str(file.path)) as source:
        try:
            is_file = source.read(6) == b"ARROW1"
            source.seek(0)
            reader = pa.ipc.open_file(source) if is_file else pa.ipc.open_stream(source)
        except _DAMAGE as error:
            raise _unreadable(file, error) from None
        if is_file:
            batches = (reader.get_batch(index) for index in range(reader.num_record_batches))
        else:
            batches = iter(reader)
        yield from _read_batches(file, reader.schema, batches, 1)


def _read_batches(
    file: SourceFile, schema: Any, batches: Iterator[Any], number: int
) -> Iterator[Record | Reject]:
    """Records of batches that begin with row `number`; what cannot be read becomes one Reject with the rows' place."""
    converters = _converters(schema, file)
    while True:
        try:
            batch = next(batches, None)
            if batch is not None:
                batch.validate(full=True)  # a damaged offset would be followed out of the buffer
        except _DAMAGE as error:
            yield reject(file.name, number, None, f"the file is damaged from row {number} on: {error}", "")
            return
        if batch is None:
            return
        for start in range(0, batch.num_rows, BATCH_ROWS):
            part = batch.slice(start, BATCH_ROWS)
            for line, given in enumerate(_values(part), start=number):
                yield _record(file.name, line, given, converters)
            number += part.num_rows


def _converters(schema: Any, file: SourceFile) -> dict[str, Convert | None]:
    """Column -> how its values are changed. Raises UserError for names that are damaged or not unique."""
    try:
        made = {field.name: converter(field.type) for field in schema}
    except _DAMAGE as error:
        raise _unreadable(file, error) from None
    if len(made) != len(schema):
        raise UserError(
            f"two columns of {file.path} have one name", fix="give every column a name of its own"
        )
    return made


def _values(batch: Any) -> list[Any]:
    """The rows of a batch; where one cannot become Python values, its fault stands in its place."""
    try:
        rows: list[Any] = batch.to_pylist()
    except _DAMAGE:
        rows = []
        for index in range(batch.num_rows):
            try:
                rows += batch.slice(index, 1).to_pylist()
            except _DAMAGE as error:
                rows.append(error)
    return rows


def _record(name: str, line: int, given: Any, converters: dict[str, Convert | None]) -> Record | Reject:
    if isinstance(given, Exception):
        return reject(name, line, None, f"the row cannot be read: {given}", "")
    value: dict[str, Any] = {}
    for key, item in given.items():
        if item is None:
            continue
        convert = converters[key]
        try:
            value[key] = item if convert is None else convert(item)
        except RowError as fault:
            return reject(name, line, None, f"the column '{key}' {fault}", given)
    return Record(line, None, given, value)


def converter(kind: Any) -> Convert | None:
    """How a value of an Arrow type becomes what JSON would have given; None: it already is.

    Dates, times and decimals are left as they are at the top, where a tag can use them and text cannot; inside other
    values they raise RowError, as do NaN and bytes that are not UTF-8.
    """
    if isinstance(kind, pa.BaseExtensionType):
        if kind.extension_name == "arrow.json":
            return lambda value: parse_value(value.encode("utf-8", errors="surrogatepass"))
        return converter(kind.storage_type)
    if pa.types.is_dictionary(kind):
        return converter(kind.value_type)
    if pa.types.is_struct(kind):
        return _struct([kind.field(index) for index in range(kind.num_fields)])
    if pa.types.is_map(kind):
        return _map(_inside(kind.item_type))
    if hasattr(kind, "value_type"):
        inside = _inside(kind.value_type)
        return inside and (lambda items: [None if item is None else inside(item) for item in items])
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind):
        return _decoded
    return None


def _inside(kind: Any) -> Convert | None:
    """The converter of a type that stands inside another."""
    if pa.types.is_floating(kind):
        return _finite
    plain = pa.types.is_temporal(kind) or pa.types.is_decimal(kind)
    return _refused if plain else converter(kind)


def _struct(fields: list[Any]) -> Convert:
    inner = [(field.name, _inside(field.type)) for field in fields]

    def convert(value: dict[str, Any]) -> dict[str, Any]:
        made = {}
        for name, change in inner:
            item = value[name]
            if item is not None:
                made[name] = item if change is None else change(item)
        return made

    return convert


def _map(change: Convert | None) -> Convert:
    def convert(pairs: list[tuple[Any, Any]]) -> dict[str, Any]:
        made = {str(key): item if change is None or item is None else change(item) for key, item in pairs}
        if len(made) != len(pairs):
            raise RowError("has a key twice in one map")
        return made

    return convert


def _decoded(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise RowError("holds bytes that are not text in UTF-8") from None


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise RowError(f"holds {value}, which JSON does not have")
    return value


def _refused(value: Any) -> Any:
    raise RowError(f"holds a {type(value).__name__}, which JSON does not have")


def _unreadable(file: SourceFile, error: Exception) -> UserError:
    return UserError(
        f"{file.path} cannot be read as {file.format}: {' '.join(str(error).split())}",
        why="the file is damaged or was cut",
        fix="fetch or write it again",
    )
