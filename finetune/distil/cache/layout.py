"""What a teacher cache consists of and what it belongs to: `manifest.json` and shards, each whole or absent.

    manifest.json            identity, settings, one entry a finished shard with its SHA-256, coverage, reconstruction error
    shard-00000.safetensors  ids, logits, logsumexp (and page_codes), a line each for every target of some whole rows

Rows are those of training, tokenised, in their order; so are the targets in them. The manifest is renewed after every
shard, so what it lists is there, and a process that is killed loses the shard it was at.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from finetune.data.tokenise import IGNORED, TokenisedRow
from finetune.digest import digest_file, digest_json
from finetune.distil.cache.coding import Coding
from finetune.errors import UserError
from finetune.paths import read_json, write_json

FORMAT = 1
MANIFEST = "manifest.json"
# Targets of a shard: a sixteenth of a cache is what a killed process loses at most, and each shard is a step of progress;
# 32,768 targets are 8.5 MB at k = 64.
_SHARDS, _LEAST_SHARD, _GREATEST_SHARD = 16, 1 << 10, 1 << 15


@dataclass(frozen=True, slots=True)
class CacheIdentity:
    """What a cache is of, by digest: the teacher (weights, compute type), the tokenizer of both models, the tokenised rows.

    `teacher_name` is for people and decides nothing.
    """

    teacher: str
    tokenizer: str
    data: str
    teacher_name: str = field(default="", compare=False)

    def differences(self, other: CacheIdentity) -> list[str]:
        """What differs, in words with digests: '<this> here, <other> there'."""
        return [
            f"{name} {mine[:12]} is wanted, the cache is of {theirs[:12]}"
            for name in ("teacher", "tokenizer", "data")
            if (mine := getattr(self, name)) != (theirs := getattr(other, name))
        ]


def shard_size(n_targets: int) -> int:
    """Targets of a shard of a cache of so many: decided by the rows alone, so a command that goes on finds its shards."""
    return min(max(n_targets // _SHARDS, _LEAST_SHARD), _GREATEST_SHARD)


def rows_digest(rows: Sequence[TokenisedRow]) -> str:
    """SHA-256 over the ids and target places of tokenised rows, in their order."""
    state = hashlib.sha256()
    for row in rows:
        ids = np.asarray(row.input_ids, dtype="<i4")
        targets = np.asarray(row.labels, dtype="<i4") != IGNORED
        state.update(len(ids).to_bytes(8, "little") + ids.tobytes() + targets.tobytes())
    return state.hexdigest()


def cache_key(identity: CacheIdentity, coding: Coding) -> str:
    """Digest of all that decides a cache's content: a folder named by it is never taken for another one."""
    content = {name: value for name, value in asdict(identity).items() if name != "teacher_name"}
    return digest_json({"format": FORMAT, **content, "coding": asdict(coding)})


@dataclass(frozen=True, slots=True)
class ShardEntry:
    """A finished shard: rows first_row..last_row (exclusive), `targets` of them, and its file's SHA-256 and bytes.

    sums: what its targets add to the cache's coverage and reconstruction error (see measure.py).
    """

    file: str
    first_row: int
    last_row: int
    targets: int
    bytes: int
    sha256: str
    sums: dict[str, Any]

    def damage(self, folder: Path, *, whole: bool = True) -> str | None:
        """Why the file cannot be trusted, or None. whole: read it and compare its SHA-256, not its size alone."""
        path = folder / self.file
        if not path.is_file():
            return "is missing"
        if (size := path.stat().st_size) != self.bytes:
            return f"has {size} bytes and not {self.bytes}: it is truncated or was written over"
        changed = whole and digest_file(path) != self.sha256
        return "has other bytes than were written" if changed else None


@dataclass(frozen=True, slots=True)
class CacheManifest:
    """`manifest.json`. `shards` are in the order of the rows; `complete` when they cover all `rows`."""

    identity: CacheIdentity
    coding: Coding
    rows: int
    targets: int
    shards: tuple[ShardEntry, ...]
    measured: dict[str, Any] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        return sum(shard.last_row - shard.first_row for shard in self.shards) == self.rows

    @property
    def bytes_on_disk(self) -> int:
        """Of the shards, their headers included."""
        return sum(shard.bytes for shard in self.shards)

    def to_dict(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "key": cache_key(self.identity, self.coding),
            "complete": self.complete,
            "identity": asdict(self.identity),
            "coding": asdict(self.coding),
            "bytes_per_target": self.coding.bytes_per_target,
            "rows": self.rows,
            "targets": self.targets,
            **self.measured,
            "shards": [asdict(shard) for shard in self.shards],
        }

    def write(self, folder: Path) -> None:
        write_json(folder / MANIFEST, self.to_dict())


def read_manifest(folder: Path) -> CacheManifest:
    """The manifest of a cache, finished or not. Raises UserError when there is none, or it is not ours."""
    path = folder / MANIFEST
    if not path.is_file():
        raise UserError(
            f"{folder} holds no teacher cache", fix="make it: finetune distil cache RECIPE", where=MANIFEST
        )
    found = read_json(path)
    try:
        if found["format"] != FORMAT:
            raise ValueError(f"format {found['format']}")
        coding = Coding(**{**found["coding"], "temperatures": tuple(found["coding"]["temperatures"])})
        manifest = CacheManifest(
            CacheIdentity(**found["identity"]),
            coding,
            int(found["rows"]),
            int(found["targets"]),
            tuple(ShardEntry(**shard) for shard in found["shards"]),
            {name: found[name] for name in ("coverage", "reconstruction") if name in found},
        )
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{path} is not the manifest of a teacher cache: {error!r}",
            fix=f"delete the folder {folder} and make it again: finetune distil cache RECIPE",
        ) from None
    return manifest


def refuse_other(found: CacheManifest, identity: CacheIdentity, folder: Path) -> None:
    """Raise UserError, naming the digests, when a cache is of another teacher, tokenizer or data."""
    if differing := identity.differences(found.identity):
        raise UserError(
            f"the teacher cache in {folder} is of another {differing[0].split()[0]}",
            why="; ".join(differing),
            fix="make the cache of this recipe: finetune distil cache RECIPE; the one that is there stays as it is",
        )
