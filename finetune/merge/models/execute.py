"""Compute the planned tensors chunk by chunk and write them, shard after shard; read back what was written.

A shard that is complete on disk leaves a record with the checksum of each tensor. A merge that was killed goes on after
the last such shard.
"""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from finetune.errors import UserError
from finetune.merge.execute import Begin, no_progress
from finetune.merge.methods.chunk import Chunk
from finetune.merge.methods.registry import METHODS
from finetune.merge.methods.select import COARSE_BINS, NotFiniteError, coarse_histogram, coarse_threshold
from finetune.merge.models.diagnostics import TensorDiagnosis, look_at, look_back
from finetune.merge.models.plan import MergePlan, OutputTensor
from finetune.merge.models.stream import CHUNK_ELEMENTS, FileChunks, Workers
from finetune.merge.shards import (
    TensorFiles,
    as_bytes,
    open_model,
    plan_shards,
    refuse_other_bytes,
    shard_names,
    sync_file,
    write_index,
    write_shard,
)
from finetune.paths import read_json, write_json

SHARD_BYTES = 1_000_000_000
_SURVEY_FILE = ".merge-survey.json"
_READ_BYTES = 1 << 22
Thresholds = dict[str, float]
"""'number of the model:density' -> magnitude."""


@dataclass(slots=True)
class ModelMerger:
    """Carries out a plan. `reused` counts shards of an earlier, killed merge; `differs` says for each model whether any
    compared value of the result is another.
    """

    plan: MergePlan
    workers: Workers
    progress: Begin = no_progress
    diagnostics: bool = False
    chunk_elements: int = CHUNK_ELEMENTS
    reused: int = 0
    differs: list[bool] = field(default_factory=list)
    diagnoses: dict[str, TensorDiagnosis] = field(default_factory=dict)
    _thresholds: Thresholds = field(default_factory=dict)

    def write(self, folder: Path, shard_bytes: int = SHARD_BYTES) -> dict[str, int]:
        """Write the weights that `folder` lacks; returns the CRC-32 of every tensor."""
        self.differs = [False] * len(self.plan.models)
        shards = plan_shards([tensor.planned for tensor in self.plan.tensors], shard_bytes)
        by_name = {tensor.planned.name: tensor for tensor in self.plan.tensors}
        advance = self.progress("merging", len(by_name), "tensors")
        if self.plan.measures_whole_models:
            self._thresholds = self._survey(folder / _SURVEY_FILE)
        checksums: dict[str, int] = {}
        syncs: list[Future[None]] = []

        def values(shard: Iterable[OutputTensor]) -> Iterator[tuple[str, Iterable[torch.Tensor]]]:
            for tensor in shard:
                yield tensor.planned.name, self.chunks(tensor)
                advance(1)

        for shard, name in zip(shards, shard_names(len(shards)), strict=True):
            record = folder / f".{name}.done.json"
            if record.is_file():
                checksums |= read_json(record)
                self.reused += 1
                advance(len(shard))
                continue
            written = write_shard(folder / name, shard, values([by_name[planned.name] for planned in shard]))
            checksums |= written
            syncs.append(self.workers.submit(functools.partial(_settle, folder / name, record, written)))
        for sync in syncs:
            sync.result()
        write_index(folder, shards)
        return checksums

    def chunks(self, tensor: OutputTensor) -> Iterator[torch.Tensor]:
        """The tensor's rows in the written type, chunk after chunk."""
        source = FileChunks(self.plan, tensor, self.workers, self.chunk_elements)
        if tensor.copied:
            yield from self._copies(tensor)
            return
        settings = tensor.settings
        if self._thresholds:
            keys = zip(tensor.inputs, settings.density, strict=True)
            found = tuple(self._thresholds[f"{place.model}:{density}"] for place, density in keys)
            settings = replace(settings, thresholds=found)
        diagnosis = self.diagnoses[tensor.planned.name] = TensorDiagnosis()
        try:
            blend = METHODS[self.plan.method](source, settings)
            first = True
            for rows, part in source.map(lambda chunk: self._blended(tensor, blend, chunk)):
                if part is not None:
                    diagnosis.add(part)
                if first:
                    self._compare(tensor, source, rows)
                    first = False
                yield rows
        except NotFiniteError:
            self._name_not_finite(tensor, source)

    def _blended(
        self, tensor: OutputTensor, blend: Callable[[Chunk], torch.Tensor], chunk: Chunk
    ) -> tuple[torch.Tensor, TensorDiagnosis | None]:
        """One chunk in the written type. Runs on a worker."""
        seen = look_at(chunk) if self.diagnostics else None
        merged = blend(chunk)
        # A sum is not finite when an element is not; NaN passes through every method.
        if not math.isfinite(float(merged.sum())):
            raise NotFiniteError
        if seen is not None:
            look_back(seen[0], seen[1], merged)
        written = merged.to(tensor.planned.dtype)
        if written.dtype == torch.float16 and not math.isfinite(float(written.sum(dtype=torch.float32))):
            raise NotFiniteError
        return written, None if seen is None else seen[0]

    def _copies(self, tensor: OutputTensor) -> Iterator[torch.Tensor]:
        """Tables of whole numbers, which have no mean: they must be equal everywhere."""
        place = tensor.inputs[0]
        values = self.plan.models[place.model].files.read(place.tensor)
        for model in self.plan.models:
            other = model.files.entries.get(place.tensor)
            if other is not None and not torch.equal(model.files.read(place.tensor), values):
                raise UserError(
                    f"{place.tensor} holds whole numbers that differ between {self.plan.models[place.model].id} and {model.id}",
                    where=str(model.folder),
                    why="whole numbers cannot be merged",
                )
        yield values

    def _compare(self, tensor: OutputTensor, source: FileChunks, rows: torch.Tensor) -> None:
        """Note which models the first rows of a tensor differ from; most differ at the first tensor, and are not read again."""
        if tensor.aligned:
            return
        for place in tensor.sources:
            if not self.differs[place.model] and rows.numel():
                entry = self.plan.models[place.model].entries[place.tensor]
                theirs = self.plan.models[place.model].files.read(place.tensor, *source.spans[0])
                same = entry.dtype == rows.dtype and torch.equal(as_bytes(theirs), as_bytes(rows))
                if not same:
                    self.differs[place.model] = not torch.equal(theirs.to(rows.dtype), rows)

    def _name_not_finite(self, tensor: OutputTensor, source: FileChunks) -> None:
        """Raise UserError that names the input tensor with NaN or infinity, or the overflow of the result."""
        for place in tensor.sources:
            model = self.plan.models[place.model]
            for start, stop in source.spans:
                rows = source.rows(place, start, stop)
                if not math.isfinite(float(rows.double().sum())):
                    n_broken = int((~torch.isfinite(rows)).sum())
                    raise UserError(
                        f"the tensor {place.tensor} of {model.id} holds NaN or infinity ({n_broken} values in one chunk)",
                        where=str(model.entries[place.tensor].file),
                        why="the file is damaged, or the training of the model diverged",
                        fix="copy or download the model again, or take an earlier checkpoint",
                    ) from None
        raise UserError(
            f"the merged tensor {tensor.planned.name} overflows {str(tensor.planned.dtype).removeprefix('torch.')}",
            fix="write dtype: bfloat16 or float32, or choose smaller weights",
        ) from None

    def _survey(self, path: Path) -> Thresholds:
        """Magnitudes at which TIES of the paper trims: over all tensors of a model that have one density."""
        if path.is_file():
            found: Thresholds = read_json(path)
            return found
        counts: dict[tuple[int, float], torch.Tensor] = {}
        tensors = [tensor for tensor in self.plan.tensors if not tensor.copied]
        advance = self.progress("measuring", len(tensors), "tensors")
        for tensor in tensors:
            # Longer chunks: each brings home a histogram of a megabyte.
            source = FileChunks(self.plan, tensor, self.workers, 4 * self.chunk_elements)
            for part in source.map(
                lambda chunk: [coarse_histogram(delta.abs_()) for delta in chunk.deltas()]
            ):
                for place, density, count in zip(tensor.inputs, tensor.settings.density, part, strict=True):
                    counts.setdefault(
                        (place.model, density), torch.zeros(COARSE_BINS, dtype=torch.int64)
                    ).add_(count)
            advance(1)
        try:
            thresholds = {
                f"{model}:{density}": coarse_threshold(c, density) for (model, density), c in counts.items()
            }
        except NotFiniteError:
            for tensor in tensors:
                source = FileChunks(self.plan, tensor, self.workers, self.chunk_elements)
                if not all(source.map(_is_finite)):
                    self._name_not_finite(tensor, source)
            raise
        write_json(path, {key: min(value, 3.5e38) for key, value in thresholds.items()})
        return thresholds

    def verify(self, folder: Path, checksums: dict[str, int]) -> None:
        """Read everything back from disk: the planned tensors, with the bytes that were written."""
        plans = {tensor.planned.name: tensor.planned for tensor in self.plan.tensors}
        with open_model(folder) as written:
            found = {name: (entry.dtype, entry.shape) for name, entry in written.entries.items()}
            if found != {name: (planned.dtype, planned.shape) for name, planned in plans.items()}:
                raise RuntimeError(f"{folder} holds other tensors than were planned")
            names = list(plans)
            checks = self.workers.map(
                lambda span: _checksum(written, names[span[0]]), [(i, i) for i in range(len(names))]
            )
            for name, checksum in zip(names, checks, strict=True):
                refuse_other_bytes(written.entries[name], checksum, checksums[name])

    def equals(self, number: int, folder: Path) -> bool:
        """Whether the written model is, value for value, one of its models; read only when the first rows did not tell."""
        if self.differs[number]:
            return False
        model = self.plan.models[number]
        with open_model(folder) as written:
            for name, entry in written.entries.items():
                theirs = model.entries.get(name)
                if theirs is None or theirs.shape != entry.shape:
                    return False
                step = max(1, _READ_BYTES // max(entry.row_bytes, 1))
                for start in range(0, entry.n_rows, step):
                    span = (start, min(start + step, entry.n_rows))
                    if not torch.equal(
                        written.read(name, *span), model.files.read(name, *span).to(entry.dtype)
                    ):
                        return False
        return True


def _is_finite(chunk: Chunk) -> bool:
    values = chunk.tensors if chunk.base is None else [chunk.base, *chunk.tensors]
    return all(math.isfinite(float(tensor.double().sum())) for tensor in values)


def _settle(file: Path, record: Path, checksums: dict[str, int]) -> None:
    sync_file(file)
    write_json(record, checksums)


def _checksum(files: TensorFiles, name: str) -> int:
    entry = files.entries[name]
    checksum = 0
    step = max(1, _READ_BYTES // max(entry.row_bytes, 1))
    for start in range(0, entry.n_rows, step):
        rows = files.read(name, start, min(start + step, entry.n_rows))
        checksum = zlib.crc32(as_bytes(rows).numpy().data, checksum)
    return checksum
