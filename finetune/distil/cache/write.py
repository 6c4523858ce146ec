"""Running a teacher over the training rows once, and keeping what it says: shard by shard, killed and resumed at will.

Shapes: n target tokens of a chunk · V vocabulary.
"""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import save
from torch import Tensor

from finetune.data.tokenise import IGNORED, TokenisedRow
from finetune.digest import digest_bytes
from finetune.distil.cache.coding import DTYPES, Coding, TopK, keep_top_k, temperatures_of, to_tensors
from finetune.distil.cache.layout import (
    MANIFEST,
    CacheIdentity,
    CacheManifest,
    ShardEntry,
    read_manifest,
    refuse_other,
    shard_size,
)
from finetune.distil.cache.measure import coverage_sums, merge_sums, reconstruction_sums, summarise
from finetune.distil.head import live_targets, teacher_not_finite
from finetune.errors import UserError
from finetune.paths import disk_faults, write_atomic

Say = Callable[[str], None]
_LOCK = ".lock"
_SHARD = "shard-"
_TOKENS_PER_BATCH = 4096
_CHUNK_LOGITS = 1 << 22
_ROWS_SHOWN = 5
# Targets whose full distribution is compared with what is kept, spread over the rows.
SAMPLED_TARGETS = 512


class Saying(Protocol):
    """A teacher that says its top k at every target of some rows: the targets in order, and sums for `measure.py`."""

    def top_k(
        self, rows: Sequence[TokenisedRow], coding: Coding, sample_every: int
    ) -> tuple[TopK, dict[str, Any]]: ...


class ModelSaying:
    """A local model, quantized or not, with or without an adapter. Rows of like length are run together, padded on the
    right; logits exist for one chunk of targets at a time."""

    def __init__(self, model: Any, *, tokens_per_batch: int = _TOKENS_PER_BATCH) -> None:
        self.model, self.tokens_per_batch = model, tokens_per_batch

    def top_k(
        self, rows: Sequence[TokenisedRow], coding: Coding, sample_every: int
    ) -> tuple[TopK, dict[str, Any]]:
        """See `Saying`."""
        found: list[TopK | None] = [None] * len(rows)
        sums: list[dict[str, Any]] = []
        self.model.eval()
        for members in self._batches(rows):
            batch, sampled = self._batch([rows[index] for index in members], coding, sample_every)
            sums += sampled
            start = 0
            for index in members:
                stop = start + rows[index].n_targets
                found[index] = _slice(batch, start, stop)
                start = stop
        return _join([one for one in found if one is not None]), merge_sums(sums)

    def _batches(self, rows: Sequence[TokenisedRow]) -> Iterator[list[int]]:
        order = sorted(range(len(rows)), key=lambda index: (-len(rows[index].input_ids), index))
        batch: list[int] = []
        for index in order:
            longest = len(rows[(batch or [index])[0]].input_ids)
            if batch and longest * (len(batch) + 1) > self.tokens_per_batch:
                yield batch
                batch = []
            batch.append(index)
        if batch:
            yield batch

    @torch.no_grad()
    def _batch(
        self, rows: Sequence[TokenisedRow], coding: Coding, sample_every: int
    ) -> tuple[TopK, list[dict[str, Any]]]:
        device = next(self.model.parameters()).device
        inputs = {name: tensor.to(device) for name, tensor in padded(rows).items()}
        targets = live_targets(self.model, inputs, coding.vocabulary)
        step = max(8, _CHUNK_LOGITS // coding.vocabulary)
        kept, sums = [], []
        for start in range(0, len(targets), step):
            logits = targets.part(start, min(start + step, len(targets))).logits
            assert logits is not None
            top = keep_top_k(logits, coding)
            kept.append(TopK(*(part.cpu() for part in (top.ids, top.gaps, top.logsumexp))))
            sampled = slice(-start % sample_every, None, sample_every)
            if len(full := logits[sampled].cpu()):
                own = TopK(*(part[sampled] for part in (kept[-1].ids, kept[-1].gaps, kept[-1].logsumexp)))
                sums.append({"reconstruction": reconstruction_sums(full, own, coding)})
        return _join(kept), sums


def padded(rows: Sequence[TokenisedRow]) -> dict[str, Tensor]:
    """Rows as one batch [B, T], padded on the right with id 0 behind the mask."""
    longest = max(len(row.input_ids) for row in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    labels = torch.full_like(ids, IGNORED)
    mask = torch.zeros_like(ids)
    for place, row in enumerate(rows):
        n = len(row.input_ids)
        ids[place, :n] = torch.tensor(row.input_ids)
        labels[place, :n] = torch.tensor(row.labels)
        mask[place, :n] = 1
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def _slice(top: TopK, start: int, stop: int) -> TopK:
    return TopK(top.ids[start:stop], top.gaps[start:stop], top.logsumexp[start:stop])


def _join(parts: Sequence[TopK]) -> TopK:
    return TopK(
        torch.cat([part.ids for part in parts]),
        torch.cat([part.gaps for part in parts]),
        torch.cat([part.logsumexp for part in parts]),
    )


def coding_of(
    *, k: int, vocabulary: int, dtype: str = "fp16", temperatures: Sequence[float] = (1.0,)
) -> Coding:
    """How a cache is to be coded. Raises UserError for a k that the vocabulary does not have."""
    if not 1 <= k <= vocabulary:
        raise UserError(
            f"k = {k}, but teacher and student share a vocabulary of {vocabulary} tokens",
            where="distil.cache.k",
            fix=f"set distil.cache.k to at most {vocabulary}; there the loss is that of the full distribution",
        )
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype}: {', '.join(DTYPES)}")
    if not temperatures or min(temperatures) <= 0:
        raise ValueError(f"temperatures {list(temperatures)}: one or more, each above 0")
    return Coding(k, vocabulary, dtype, temperatures_of(temperatures))


def cache_teacher(
    saying: Saying,
    rows: Sequence[TokenisedRow],
    folder: Path,
    *,
    identity: CacheIdentity,
    coding: Coding,
    least_coverage: float | None = None,
    shard_targets: int | None = None,
    say: Say = lambda text: None,
    progress: Callable[[int], None] = lambda done: None,
) -> CacheManifest:
    """Put what the teacher says of every target of `rows` into `folder`; a cache that is there, in part too, is gone on from.

    shard_targets: the least targets of a shard (None: `shard_size`).
    least_coverage: the mean mass that the top k must have at every temperature, known after the first shard. progress:
    called with the number of targets that were added. Damaged shards are made again, and `say` tells which. Raises
    UserError when the folder holds a cache of something else (the digests are named), for rows without a target and for
    too little coverage; whatever is computed stays.
    """
    _refuse_empty(rows)
    with disk_faults(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with _only_process(folder, say):
        manifest = _begin(folder, rows, identity, coding, say)
        if manifest.complete:
            progress(manifest.targets)
            _require_coverage(manifest, least_coverage, folder)
            return manifest
        spans = list(enumerate(shard_rows(rows, shard_targets or shard_size(manifest.targets))))
        wanted = {(_shard_name(number), *span) for number, span in spans}  # another size has other ones
        done = {s.first_row: s for s in manifest.shards if (s.file, s.first_row, s.last_row) in wanted}
        sample_every = max(1, manifest.targets // SAMPLED_TARGETS)
        for number, (first, last) in spans:
            if first in done:
                progress(done[first].targets)
                continue
            top, sums = saying.top_k(rows[first:last], coding, sample_every)
            _refuse_not_finite(top, rows[first:last])
            entry = _write_shard(folder, number, (first, last), top, coding, sums)
            done[first] = entry
            manifest = _measured(replace(manifest, shards=tuple(done[at] for at in sorted(done))))
            manifest.write(folder)
            progress(entry.targets)
            _require_coverage(manifest, least_coverage, folder)
        _require_coverage(manifest, least_coverage, folder)
        return manifest


def _refuse_not_finite(top: TopK, rows: Sequence[TokenisedRow]) -> None:
    """Raise UserError, naming the row, for a target whose probabilities are no numbers."""
    broken = ~(top.gaps.isfinite().all(dim=1) & top.logsumexp.isfinite().all(dim=1))
    if not broken.any():
        return
    owners = torch.repeat_interleave(torch.tensor([row.n_targets for row in rows]))
    row = rows[int(owners[broken][0])]
    raise teacher_not_finite(f"row {row.row_id}", "; finished shards are kept")


def shard_rows(rows: Sequence[TokenisedRow], shard_targets: int) -> Iterator[tuple[int, int]]:
    """Ranges of whole rows with at least `shard_targets` targets each, but for the last."""
    first = targets = 0
    for index, row in enumerate(rows):
        targets += row.n_targets
        if targets >= shard_targets or index == len(rows) - 1:
            yield first, index + 1
            first, targets = index + 1, 0


def _refuse_empty(rows: Sequence[TokenisedRow]) -> None:
    empty = [row.row_id for row in rows if row.n_targets == 0]
    if rows and not empty:
        return
    shown = ", ".join(empty[:_ROWS_SHOWN]) + (", …" if len(empty) > _ROWS_SHOWN else "")
    raise UserError(
        f"{len(empty)} rows have an empty answer: {shown}" if rows else "there are no rows",
        why="a teacher says nothing where there is no target token",
        fix="leave these rows out of the dataset (they have no answer to learn), or answer them",
    )


def _begin(
    folder: Path, rows: Sequence[TokenisedRow], identity: CacheIdentity, coding: Coding, say: Say
) -> CacheManifest:
    """The manifest to go on from: an empty one, or that of the folder with the shards that are whole."""
    fresh = CacheManifest(identity, coding, len(rows), sum(row.n_targets for row in rows), ())
    for name in (_SHARD, MANIFEST):
        for left in folder.glob(f".{name}*"):  # of processes that were killed while they wrote
            with suppress(OSError):
                left.unlink()
    if not (folder / MANIFEST).is_file():
        fresh.write(folder)
        return fresh
    found = read_manifest(folder)
    refuse_other(found, identity, folder)
    if found.coding != coding:
        raise UserError(
            f"the cache in {folder} keeps other things than are wanted",
            why=f"it has {_told(found.coding)}; wanted is {_told(coding)}",
            fix="name another folder, or delete this one",
        )
    whole = []
    for shard in found.shards:
        if reason := shard.damage(folder):
            say(f"{folder / shard.file} {reason}; it is made again")
        else:
            whole.append(shard)
    return replace(found, shards=tuple(whole))


def _told(coding: Coding) -> str:
    temperatures = ", ".join(f"{temperature:g}" for temperature in coding.temperatures)
    return f"k {coding.k}, {coding.dtype}, temperatures {temperatures}, a vocabulary of {coding.vocabulary}"


def _shard_name(number: int) -> str:
    return f"{_SHARD}{number:05d}.safetensors"


def _write_shard(
    folder: Path, number: int, span: tuple[int, int], top: TopK, coding: Coding, sums: dict[str, Any]
) -> ShardEntry:
    tensors = to_tensors(top, coding)
    n_targets = len(top.ids)
    n_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    assert n_bytes == n_targets * coding.bytes_per_target, "the formula is what is written"
    data = save(tensors)
    name = _shard_name(number)
    write_atomic(folder / name, data)
    all_sums = {"coverage": coverage_sums(top, coding), **sums}
    return ShardEntry(name, *span, n_targets, len(data), digest_bytes(data), all_sums)


def _measured(manifest: CacheManifest) -> CacheManifest:
    n_targets = sum(shard.targets for shard in manifest.shards)
    return replace(
        manifest, measured=summarise(merge_sums([shard.sums for shard in manifest.shards]), n_targets)
    )


def _require_coverage(manifest: CacheManifest, least: float | None, folder: Path) -> None:
    """Raise UserError when the top k holds too little of the teacher's mass at some temperature."""
    if least is None:
        return
    for temperature, coverage in manifest.measured["coverage"].items():
        if coverage["mean"] < least:
            raise UserError(
                f"the top {manifest.coding.k} hold {coverage['mean']:.1%} of the teacher's mass at temperature {temperature}, "
                f"less than distil.cache.coverage = {least:g}",
                where="distil.cache.k",
                why=f"{sum(shard.targets for shard in manifest.shards)} of {manifest.targets} targets are measured",
                fix="raise distil.cache.k, lower the temperature, or lower distil.cache.coverage; what is computed stays in "
                f"{folder}",
            )


@contextmanager
def _only_process(folder: Path, say: Say) -> Iterator[None]:
    """Hold the folder's lock, after whoever holds it now; a process that dies lets go of it. A finished cache that may not be
    written to is only read, and needs none."""
    try:
        with disk_faults(folder / _LOCK):
            stream = (folder / _LOCK).open("w")
    except UserError:
        if not ((folder / MANIFEST).is_file() and read_manifest(folder).complete):
            raise
        yield  # a finished cache on a disk that is only read: nothing will be written
        return
    with stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another process fills this teacher cache; waiting for it")
            fcntl.flock(stream, fcntl.LOCK_EX)
        yield
