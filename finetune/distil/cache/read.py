"""Reading a teacher cache: checked against what it has to be of, memory-mapped, and handed out row by row."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from finetune.data.tokenise import TokenisedRow
from finetune.distil.cache.coding import TopK, from_tensors
from finetune.distil.cache.layout import CacheIdentity, CacheManifest, read_manifest, refuse_other
from finetune.distil.cache.measure import read_back
from finetune.distil.targets import TeacherTargets
from finetune.errors import UserError


class TeacherCache:
    """What a teacher says of the targets of training rows, by the places of the rows.

    Only the parts of the shards that are asked for are read, from a memory map.
    """

    def __init__(self, folder: Path, manifest: CacheManifest, n_targets: Sequence[int]) -> None:
        self.folder, self.manifest = folder, manifest
        self._offsets = [0, *accumulate(n_targets)]  # of every row's first target, in all rows
        self._first_rows = [shard.first_row for shard in manifest.shards]
        self._files: list[Any] = [safe_open(folder / shard.file, framework="pt") for shard in manifest.shards]

    @staticmethod
    def open(
        folder: Path, rows: Sequence[TokenisedRow], identity: CacheIdentity, *, verify: bool = True
    ) -> TeacherCache:
        """The cache in `folder` for these rows. verify: also compare every shard with its SHA-256, which reads it whole.

        Raises UserError when the cache is of another teacher, tokenizer or data (digests named), when it is not complete,
        and when a shard is missing, truncated or changed.
        """
        manifest = read_manifest(folder)
        refuse_other(manifest, identity, folder)
        fix = "go on with it, which makes only what is missing: finetune distil cache RECIPE"
        if not manifest.complete:
            done = sum(shard.targets for shard in manifest.shards)
            raise UserError(
                f"the teacher cache in {folder} holds {done} of {manifest.targets} targets",
                why="the command that makes it was interrupted",
                fix=fix,
            )
        for shard in manifest.shards:
            if reason := shard.damage(folder, whole=verify):
                raise UserError(
                    f"{shard.file} {reason}", where=str(folder), fix=fix.replace("missing", "damaged")
                )
        try:
            return TeacherCache(folder, manifest, [row.n_targets for row in rows])
        except SafetensorError as error:
            raise UserError(f"a shard cannot be read: {error}", where=str(folder), fix=fix) from None

    def targets(self, rows: Sequence[int], temperature: float) -> TeacherTargets:
        """All targets of the rows at these places, row after row, for a loss at one of the planned temperatures.

        Raises UserError for a temperature that was not planned: its normaliser cannot be made from the top k.
        """
        coding = self.manifest.coding
        if temperature not in coding.temperatures:
            planned = ", ".join(f"{one:g}" for one in coding.temperatures)
            raise UserError(
                f"the teacher cache has no normaliser for temperature {temperature:g}, only for {planned}",
                where="distil.loss.temperature",
                why="the mass outside the top k at another temperature cannot be known from the top k",
                fix=f"add {temperature:g} to distil.cache.temperatures and make the cache again: finetune distil cache RECIPE",
            )
        return read_back(self.top_k(rows), coding, temperature)

    def top_k(self, rows: Sequence[int]) -> TopK:
        """The kept values of all targets of the rows at these places."""
        if not rows:
            k, n_temperatures = self.manifest.coding.k, len(self.manifest.coding.temperatures)
            return TopK(
                torch.zeros(0, k, dtype=torch.long), torch.zeros(0, k), torch.zeros(0, n_temperatures)
            )
        pieces = [self._row(row) for row in rows]
        joined = {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}
        return from_tensors(joined, self.manifest.coding)

    def _row(self, row: int) -> dict[str, Tensor]:
        number = bisect_right(self._first_rows, row) - 1
        shard, file = self.manifest.shards[number], self._files[number]
        base = self._offsets[shard.first_row]
        span = slice(self._offsets[row] - base, self._offsets[row + 1] - base)
        return {name: file.get_slice(name)[span] for name in file.keys()}  # noqa: SIM118 - a file, not a dict


class CachedTeaching:
    """The teacher of a trainer (`finetune.distil.trainer.Teaching`) that is read from a cache."""

    def __init__(self, cache: TeacherCache, temperature: float) -> None:
        self.cache, self.temperature = cache, temperature

    def targets(self, inputs: dict[str, Any]) -> TeacherTargets:
        """What was kept of the rows of a batch, on its device."""
        return self.cache.targets(inputs["rows"], self.temperature).to(inputs["labels"].device)
