"""Compute the merged tensors chunk by chunk, write them, and read them back from disk.

Everything is added in fp32 and cast once. While writing, two things are measured for each changed tensor: whether it
changed at all in the written type, and how much of the change the cast took away.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from finetune.errors import UserError
from finetune.merge.adapter_file import AdapterFile
from finetune.merge.adapter_plan import MergePlan, TensorPlan
from finetune.merge.base_weights import StoredWeights
from finetune.merge.deltas import column_norms, merged_rows
from finetune.merge.layout import chunk_rows, row_chunks
from finetune.merge.shards import (
    MAX_SHARD_BYTES,
    as_bytes,
    open_model,
    plan_shards,
    refuse_other_bytes,
    write_model,
)

Begin = Callable[[str, int, str], Callable[[int], None]]
"""(label, total, unit) -> a function that is told how many more units are done."""


def no_progress(label: str, total: int, unit: str) -> Callable[[int], None]:
    """Reports nothing."""
    return lambda n: None


_UP = ("lora_B.weight", "lora_embedding_B", "vera_lambda_b")


@dataclass(slots=True)
class Change:
    """How one tensor changed. Sums run over its elements; Δ is the change in fp32, Δ' what is left of it when written."""

    n_elements: int = 0
    n_moved: int = 0
    n_moved_written: int = 0
    delta_squares: float = 0.0
    error_squares: float = 0.0

    def add(self, base: torch.Tensor, merged: torch.Tensor, written: torch.Tensor) -> None:
        """One chunk: base and merged in fp32, written in the output type."""
        delta = merged - base
        n_moved = int(torch.count_nonzero(delta))
        self.n_elements += delta.numel()
        self.n_moved += n_moved
        self.delta_squares += float(torch.linalg.vector_norm(delta)) ** 2
        if written.dtype == merged.dtype:
            self.n_moved_written += n_moved
            return
        left = written.float() - base.to(written.dtype).float()
        self.n_moved_written += int(torch.count_nonzero(left))
        self.error_squares += float(torch.dist(left, delta)) ** 2


@dataclass(slots=True)
class Changes:
    """All changed tensors of a merge."""

    by_tensor: dict[str, Change] = field(default_factory=dict)

    @property
    def n_changed(self) -> int:
        return sum(change.n_moved_written > 0 for change in self.by_tensor.values())

    @property
    def delta_lost(self) -> float:
        """‖Δ' − Δ‖ / ‖Δ‖ over all tensors: the share of the tuning that the written type rounds away."""
        total = sum(change.delta_squares for change in self.by_tensor.values())
        lost = sum(change.error_squares for change in self.by_tensor.values())
        return math.sqrt(lost / total) if total else 0.0

    @property
    def unmoved_share(self) -> float:
        """Share of the elements with Δ ≠ 0 that the written type leaves at the base's value."""
        moved = sum(change.n_moved for change in self.by_tensor.values())
        written = sum(change.n_moved_written for change in self.by_tensor.values())
        return 1.0 - written / moved if moved else 0.0


class Merger:
    """Produces the values of a plan. `base` are the weights the adapter is added to; `progress` counts tensors."""

    def __init__(
        self, plan: MergePlan, base: StoredWeights, adapter: AdapterFile, progress: Begin = no_progress
    ) -> None:
        self.plan, self.base, self.adapter, self.progress = plan, base, adapter, progress
        self.changes = Changes()

    def write(self, folder: Path, max_shard_bytes: int = MAX_SHARD_BYTES) -> dict[str, int]:
        """Write the merged weights into `folder`; returns the CRC-32 of every tensor."""
        by_name = {tensor.planned.name: tensor for tensor in self.plan.tensors}
        shards = plan_shards([tensor.planned for tensor in self.plan.tensors], max_shard_bytes)
        advance = self.progress("writing", len(by_name), "tensors")

        def values() -> Iterator[tuple[str, Iterable[torch.Tensor]]]:
            for planned in (planned for shard in shards for planned in shard):
                yield planned.name, self.chunks(by_name[planned.name])
                advance(1)

        return write_model(folder, shards, values())

    def chunks(self, tensor: TensorPlan) -> Iterator[torch.Tensor]:
        """The tensor's rows in the written type, chunk after chunk."""
        planned, edit = tensor.planned, tensor.edit
        if not edit.changes:
            for _, rows in self._base_chunks(tensor):
                yield rows.to(planned.dtype)
            return
        change = self.changes.by_tensor[planned.name] = Change()
        for start, base, merged in self._edited_chunks(tensor):
            _refuse_not_finite(merged, f"the merged tensor {planned.name}")
            written = merged.to(planned.dtype)
            change.add(self._untuned(tensor, start, base), merged, written)
            yield written

    def _base_chunks(self, tensor: TensorPlan) -> Iterator[tuple[int, torch.Tensor]]:
        """(start, rows) of the base's value, in the type it lies in."""
        shape = tensor.planned.shape
        if not shape:
            yield 0, self._base_rows(tensor, 0, 1)
            return
        for start, stop in row_chunks(shape[0], math.prod(shape[1:])):
            rows = self._base_rows(tensor, start, stop)
            if rows.is_floating_point():
                _refuse_not_finite(rows, f"the base tensor {tensor.planned.name}")
            yield start, rows

    def _base_rows(self, tensor: TensorPlan, start: int, stop: int) -> torch.Tensor:
        if tensor.edit.own:
            return self.adapter.files.read(tensor.edit.own, start, stop)
        if tensor.parameter is None:
            return self.base.files.read(tensor.planned.name, start, stop)
        return self.base.rows(tensor.parameter, start, stop)

    def _untuned(self, tensor: TensorPlan, start: int, rows: torch.Tensor) -> torch.Tensor:
        """What these rows were before training, in fp32; rows that the base does not have count from zero."""
        if not tensor.edit.trained:
            return rows
        assert tensor.parameter is not None
        before = torch.zeros_like(rows)
        n_base = self.base.shape(tensor.parameter)[0]
        if start < n_base:
            known = self.base.rows(tensor.parameter, start, min(start + len(rows), n_base)).float()
            before[: len(known)] = known
        return before

    def _edited_chunks(self, tensor: TensorPlan) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """(start, starting value, merged) rows in fp32, with low-rank update, bias and token rows applied."""
        edit = tensor.edit
        update = norms = None
        if edit.update:
            update = self.adapter.update(edit.update, transposed=tensor.transposed)
            if update.magnitude is not None and tensor.transposed:
                n_rows, n_columns = tensor.planned.shape
                norms = column_norms(
                    update,
                    lambda start, stop: self._base_rows(tensor, start, stop).float(),
                    n_rows,
                    chunk_rows(n_columns),
                )
        bias = self._bias(edit.bias) if edit.bias else None
        for start, stored in self._base_chunks(tensor):
            base = stored.float()
            merged = base.clone() if update is None else merged_rows(base, update, start, norms)
            if bias is not None:
                merged += bias[start : start + len(merged)]
            if edit.rows:
                self._replace_rows(merged, edit.rows, start)
            if edit.scale:
                merged = self._scaled(merged, edit.scale, start, tensor.transposed)
            yield start, base, merged

    def _bias(self, module: str) -> torch.Tensor:
        parts = self.adapter.low_rank[module]
        rank = self.adapter.files.entries[parts["lora_A.weight"]].shape[0]
        return self.adapter.value(parts["lora_B.bias"]) * self.adapter.scaling(module, rank)

    def _scaled(self, rows: torch.Tensor, module: str, start: int, transposed: bool) -> torch.Tensor:
        """IA3: rows of a weight [n, columns], or of a bias [n], times the scale of the module's output or input."""
        scale = self.adapter.value(self.adapter.scales[module])
        if rows.dim() == 1:
            return rows * scale.flatten()[start : start + len(rows)]
        scale = scale.T if transposed else scale
        return rows * (scale if scale.shape[0] == 1 else scale[start : start + len(rows)])

    def _replace_rows(self, merged: torch.Tensor, module: str, start: int) -> None:
        """Put the trained token rows that fall into this chunk (rows from `start` on) in place."""
        values = self.adapter.value(self.adapter.token_rows[module])
        for position, row in enumerate(self.adapter.token_indices(module)):
            if start <= row < start + len(merged):
                merged[row - start] = values[position]

    def verify(self, folder: Path, checksums: dict[str, int]) -> None:
        """Read everything back: bytes as written, and every tensor that is no target equal to the base, cast."""
        plans = {tensor.planned.name: tensor for tensor in self.plan.tensors}
        advance = self.progress("reading back", len(plans), "tensors")
        with open_model(folder) as written:
            if set(written.entries) != set(plans):
                raise RuntimeError(f"{folder} holds other tensors than were planned")
            for name, tensor in plans.items():
                expected = None if tensor.edit.changes else self.chunks(tensor)
                checksum = 0
                shape = tensor.planned.shape
                spans = list(row_chunks(shape[0], math.prod(shape[1:]))) if shape else [(0, 1)]
                for start, stop in spans:
                    raw = as_bytes(written.read(name, start, stop))
                    checksum = zlib.crc32(raw.numpy().data, checksum)
                    if expected is not None and not torch.equal(raw, as_bytes(next(expected))):
                        raise RuntimeError(
                            f"the tensor {name} changed although the adapter does not touch it"
                        )
                advance(1)
                refuse_other_bytes(written.entries[name], checksum, checksums[name])


def refuse_broken_adapter(adapter: AdapterFile) -> None:
    """Every tensor of the adapter must be finite (those that are not are named), and some of it not as it started."""
    broken = []
    for name in adapter.files.entries:
        values = adapter.files.read(name)
        if values.is_floating_point() and not math.isfinite(float(values.sum(dtype=torch.float32))):
            broken.append(name)
    if broken:
        raise UserError(
            f"{len(broken)} of {len(adapter.files.entries)} adapter tensors hold NaN or infinity: {', '.join(broken[:3])}",
            where=str(adapter.folder),
            why="the training diverged",
            fix="take an earlier checkpoint, or train again with a lower learning rate",
        )
    ups = [part for parts in adapter.low_rank.values() for name, part in parts.items() if name in _UP]
    biases = [name for name in adapter.base_values if name.endswith(".bias")]
    elsewhere = bool(adapter.replaced or adapter.token_rows or adapter.scales or biases)
    if ups and not (elsewhere or any(adapter.value(up).any() for up in ups)):
        raise UserError(
            f"this adapter was never trained: the matrices B of all {len(ups)} layers are zero",
            where=str(adapter.folder),
            why="the merged model would equal its base",
            fix="name the trained adapter",
        )


def _refuse_not_finite(rows: torch.Tensor, what: str) -> None:
    # A sum is not finite when an element is not: one pass, and no mask of the tensor's size.
    if not math.isfinite(float(rows.sum(dtype=torch.float32))):
        n_broken = int((~torch.isfinite(rows)).sum())
        raise UserError(
            f"{what} holds NaN or infinity ({n_broken} values in one chunk)",
            why="the file is damaged, or the model it came from had diverged",
            fix="copy or download the model again",
        )
