"""Safetensors by header: read rows of one tensor, write tensors one after the other, never a whole file in memory.

The format (https://github.com/huggingface/safetensors#format): 8 bytes little-endian header length N, N bytes of JSON
`{name: {dtype, shape, data_offsets: [begin, end]}}`, then the bytes of all tensors without gaps. Reading uses `pread`
into fresh memory and not a memory map, so that resident memory is what is asked for and nothing else.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import struct
import sys
import threading
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from finetune.errors import UserError
from finetune.paths import disk_faults, write_json

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_SHARD_BYTES = 5_000_000_000
_MAX_HEADER_BYTES = 100_000_000
_WRITEBACK_BYTES = 1 << 24
_BEGIN_WRITE = 2  # SYNC_FILE_RANGE_WRITE
_sync_file_range = getattr(ctypes.CDLL(None), "sync_file_range", None) if sys.platform == "linux" else None

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where one tensor lies. `offset` is its first byte in the file; `n_bytes` its length."""

    name: str
    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    n_bytes: int

    @property
    def n_rows(self) -> int:
        """Extent of the first dimension; 1 for a scalar."""
        return self.shape[0] if self.shape else 1

    @property
    def row_bytes(self) -> int:
        return self.n_bytes // max(self.n_rows, 1)

    @property
    def n_elements(self) -> int:
        return math.prod(self.shape)


class TensorFiles:
    """All tensors of one model or adapter, by name, in the order in which they lie on disk.

    `entries` maps name -> TensorEntry. Opening reads headers only and refuses damaged files. Use as a context manager.
    """

    def __init__(self, files: Sequence[Path], *, expected: dict[str, str] | None = None) -> None:
        """`expected` is the weight map of an index (tensor -> file name); tensors it names must be there."""
        self.entries: dict[str, TensorEntry] = {}
        self._handles: dict[Path, int] = {}
        self._opening = threading.Lock()  # several threads may read
        for file in files:
            for entry in read_header(file):
                if entry.name in self.entries:
                    raise UserError(
                        f"two files hold a tensor called {entry.name}: {self.entries[entry.name].file.name} and {file.name}",
                        where=str(file.parent),
                        fix="delete the weight files that do not belong to the model",
                    )
                self.entries[entry.name] = entry
        if expected is not None:
            _check_index(self.entries, expected, files)

    def __enter__(self) -> TensorFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        for handle in self._handles.values():
            os.close(handle)
        self._handles.clear()

    @property
    def n_bytes(self) -> int:
        return sum(entry.n_bytes for entry in self.entries.values())

    def read(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Rows [start, stop) of a tensor along its first dimension, as a new tensor in its own dtype."""
        entry = self.entries[name]
        if not entry.shape:
            return self._read_bytes(entry, entry.offset, entry.n_bytes).view(entry.dtype).reshape(())
        stop = entry.n_rows if stop is None else min(stop, entry.n_rows)
        raw = self._read_bytes(
            entry, entry.offset + start * entry.row_bytes, (stop - start) * entry.row_bytes
        )
        return raw.view(entry.dtype).reshape(stop - start, *entry.shape[1:])

    def gather(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        """The rows [n, ...] with the given indices [n] (int64), reading each distinct one once."""
        entry = self.entries[name]
        distinct, inverse = torch.unique(rows, return_inverse=True)
        if len(distinct) and not 0 <= int(distinct[0]) <= int(distinct[-1]) < entry.n_rows:
            raise IndexError(
                f"{name} has {entry.n_rows} rows, asked for {int(distinct[0])} to {int(distinct[-1])}"
            )
        parts = [
            self._read_bytes(entry, entry.offset + int(row) * entry.row_bytes, entry.row_bytes)
            for row in distinct
        ]
        table = torch.cat(parts).view(entry.dtype).reshape(len(parts), *entry.shape[1:])
        return table[inverse]

    def _handle(self, file: Path) -> int:
        with self._opening:
            if file not in self._handles:
                self._handles[file] = os.open(file, os.O_RDONLY)
            return self._handles[file]

    def _read_bytes(self, entry: TensorEntry, offset: int, n_bytes: int) -> torch.Tensor:
        handle = self._handle(entry.file)
        buffer = torch.empty(n_bytes, dtype=torch.uint8)
        view = buffer.numpy().data
        done = 0
        while done < n_bytes:
            n_read = os.preadv(handle, [view[done:]], offset + done)
            if n_read == 0:
                raise _damaged(entry.file, f"it ends inside the tensor {entry.name}")
            done += n_read
        return buffer


def open_model(folder: Path) -> TensorFiles:
    """The weight files that transformers would load from `folder`; refuses two sets of weights side by side."""
    index, single = folder / INDEX_FILE, folder / SINGLE_FILE
    if not index.is_file():
        files = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
        if not files:
            raise UserError(
                f"{folder} holds no *.safetensors file",
                why="pickle files (.bin, .pt) are refused: reading one runs whatever code it contains",
                fix="name a folder whose weights were saved as safetensors",
            )
        return TensorFiles(files)
    try:
        weight_map = {str(k): str(v) for k, v in json.loads(index.read_bytes())["weight_map"].items()}
    except (ValueError, KeyError, AttributeError) as error:
        raise _damaged(index, f"it is not an index of shards ({error})") from None
    if single.is_file() and SINGLE_FILE not in weight_map.values():
        raise UserError(
            f"{folder} holds two sets of weights: {SINGLE_FILE} and the shards of {INDEX_FILE}",
            why="transformers would silently load the single file, which may be the older one",
            fix="delete the set that is not meant",
        )
    files = [folder / name for name in sorted(set(weight_map.values()))]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise UserError(
            f"{folder} lacks {len(missing)} of the {len(files)} weight files its index names: {', '.join(missing[:3])}",
            fix="copy or download the model again",
        )
    return TensorFiles(files, expected=weight_map)


def read_header(file: Path) -> list[TensorEntry]:
    """Every tensor of one file by offset. Raises UserError, naming the file, when it is damaged or cut short."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        n_header = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else -1
        if not 2 <= n_header <= min(_MAX_HEADER_BYTES, size - 8):
            raise _damaged(file, f"{size} bytes cannot hold its header of {max(n_header, 0)} bytes")
        raw = stream.read(n_header)
    try:
        header: dict[str, Any] = json.loads(raw)
        entries = [
            _entry(name, fields, file, 8 + n_header)
            for name, fields in header.items()
            if name != "__metadata__"
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(file, f"its header cannot be read ({error})") from None
    entries.sort(key=lambda entry: (entry.offset, entry.n_bytes))
    position = 8 + n_header
    for entry in entries:
        n_expected = entry.n_elements * entry.dtype.itemsize
        if entry.offset != position or entry.n_bytes != n_expected:
            raise _damaged(file, f"the header places {entry.name} wrongly")
        position += entry.n_bytes
    if position != size:
        raise _damaged(file, f"the header describes {position} bytes, the file has {size}")
    return entries


def _entry(name: str, fields: dict[str, Any], file: Path, data_start: int) -> TensorEntry:
    begin, end = fields["data_offsets"]
    if fields["dtype"] not in DTYPES:
        raise UserError(
            f"the tensor {name} has the type {fields['dtype']}, which is not known here", where=str(file)
        )
    shape = tuple(int(extent) for extent in fields["shape"])
    return TensorEntry(
        name, file, DTYPES[fields["dtype"]], shape, data_start + int(begin), int(end) - int(begin)
    )


def _check_index(entries: dict[str, TensorEntry], expected: dict[str, str], files: Sequence[Path]) -> None:
    absent = sorted(name for name in expected if name not in entries)
    unnamed = sorted(name for name in entries if name not in expected)
    if absent or unnamed:
        raise UserError(
            f"the index and the shards disagree: {len(absent)} tensors named but absent, {len(unnamed)} present but not "
            f"named, e.g. {(absent + unnamed)[0]}",
            where=str(files[0].parent / INDEX_FILE),
            why="shards of different saves lie in one folder, or a copy was interrupted",
            fix="copy or download the model again",
        )


def refuse_other_bytes(entry: TensorEntry, checksum: int, written: int) -> None:
    """Raise UserError when a tensor's CRC-32 as it reads back is not that of what was written."""
    if checksum != written:
        raise UserError(
            f"the tensor {entry.name} reads back other bytes than were written",
            where=str(entry.file),
            why="the disk or its file system is faulty",
            fix="write to another disk",
        )


def _damaged(file: Path, how: str) -> UserError:
    return UserError(
        f"{file.name} is damaged: {how}", where=str(file), fix="copy or download the file again, then repeat"
    )


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """A tensor that will be written: name, dtype and shape are known before its values."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def n_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def plan_shards(
    tensors: Sequence[PlannedTensor], max_shard_bytes: int = MAX_SHARD_BYTES
) -> list[list[PlannedTensor]]:
    """Fill shards in the given order. Inside a shard wide types come first, so that every tensor is aligned."""
    shards: list[list[PlannedTensor]] = [[]]
    filled = 0
    for tensor in tensors:
        if shards[-1] and filled + tensor.n_bytes > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += tensor.n_bytes
    return [sorted(shard, key=lambda tensor: -tensor.dtype.itemsize) for shard in shards if shard]


def write_model(
    folder: Path,
    shards: Sequence[Sequence[PlannedTensor]],
    values: Iterator[tuple[str, Iterable[torch.Tensor]]],
) -> dict[str, int]:
    """Write planned tensors to `model*.safetensors` (and an index for several shards); returns name -> CRC-32.

    `values` yields, in the order of the plan, each tensor's name and its rows in chunks of the planned dtype, so that
    only one chunk is in memory. Every file is fsynced. Raises UserError when the disk is full.
    """
    checksums: dict[str, int] = {}
    for shard, name in zip(shards, shard_names(len(shards)), strict=True):
        checksums |= write_shard(folder / name, shard, values)
        sync_file(folder / name)
    write_index(folder, shards)
    return checksums


def shard_names(n: int) -> list[str]:
    """File names of a model in `n` shards."""
    return [SINGLE_FILE] if n == 1 else [f"model-{i:05d}-of-{n:05d}.safetensors" for i in range(1, n + 1)]


def write_shard(
    file: Path, shard: Sequence[PlannedTensor], values: Iterator[tuple[str, Iterable[torch.Tensor]]]
) -> dict[str, int]:
    """Write one file of a model as `write_model` does, without waiting for the disk; returns name -> CRC-32."""
    checksums: dict[str, int] = {}
    with disk_faults(file), file.open("wb") as stream:
        stream.write(_header(shard))
        for planned in shard:
            given, chunks = next(values)
            assert given == planned.name, (given, planned.name)
            checksums[given] = _write_chunks(stream, planned, chunks)
    return checksums


def write_index(folder: Path, shards: Sequence[Sequence[PlannedTensor]]) -> None:
    """The index of a model in several shards; nothing for a single file."""
    if len(shards) == 1:
        return
    names = shard_names(len(shards))
    weight_map = {tensor.name: name for shard, name in zip(shards, names, strict=True) for tensor in shard}
    total = sum(tensor.n_bytes for shard in shards for tensor in shard)
    write_json(folder / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": weight_map})


def sync_file(file: Path) -> None:
    """Wait until the file's bytes are on disk."""
    with disk_faults(file):
        handle = os.open(file, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _header(shard: Sequence[PlannedTensor]) -> bytes:
    fields: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for tensor in shard:
        fields[tensor.name] = {
            "dtype": _DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [position, position + tensor.n_bytes],
        }
        position += tensor.n_bytes
    raw = json.dumps(fields, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    return struct.pack("<Q", len(raw)) + raw


def _write_chunks(stream: Any, planned: PlannedTensor, chunks: Iterable[torch.Tensor]) -> int:
    checksum = written = 0
    for chunk in chunks:
        assert chunk.dtype == planned.dtype, (planned, chunk.dtype)
        view = as_bytes(chunk).numpy().data
        before = stream.tell()
        stream.write(view)
        _begin_writeback(stream, before, before + len(view))
        checksum = zlib.crc32(view, checksum)
        written += len(view)
    assert written == planned.n_bytes, (planned, written)
    return checksum


def _begin_writeback(stream: Any, before: int, after: int) -> None:
    """Each time a few megabytes are full, let the disk begin with them: the fsync at the end then waits for the last ones only.

    Linux keeps what is written in memory for half a minute; without this the disk is idle while values are computed. It is a
    request, not a promise: what counts is the fsync.
    """
    begun, full = (position // _WRITEBACK_BYTES * _WRITEBACK_BYTES for position in (before, after))
    if full > begun and _sync_file_range is not None:
        stream.flush()
        _sync_file_range(stream.fileno(), ctypes.c_int64(begun), ctypes.c_int64(full - begun), _BEGIN_WRITE)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor as uint8 [n_bytes], without a copy when it is contiguous."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)
