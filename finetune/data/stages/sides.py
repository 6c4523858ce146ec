"""Which side a group falls on: by the salted hash of its name, by exact quotas, or as an earlier build wrote down.

Legend: a unit is what is dealt as a whole, one group or several that are united. Arrays have one entry a group or a
unit; a side is its place in SIDES, -1 where none is fixed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from finetune.data.rows import SIDES, SIDES_BY_PRECEDENCE, Side
from finetune.data.spec_split import SplitSection
from finetune.digest import digest_bytes
from finetune.errors import UserError
from finetune.paths import read_json, write_json

SideCodes = npt.NDArray[np.int8]
PRECEDENCE = np.array([SIDES_BY_PRECEDENCE.index(side) for side in SIDES], np.int8)
"""Side code -> its rank: of two sides that claim the same content, the lower rank keeps it."""
_ASSIGNMENT_FORMAT = 1


def salted_hash(salt: str, key: str) -> int:
    """A 64-bit hash of `key` that is the same on every machine and in every process."""
    return int(digest_bytes(f"{salt}\x00{key}".encode())[:16], 16)


def salted_hashes(salt: str, keys: pa.Array) -> npt.NDArray[np.uint64]:
    """`salted_hash` of every key of a column."""
    start = hashlib.sha256(f"{salt}\x00".encode())
    hashes = np.empty(len(keys), np.uint64)
    for first in range(0, len(keys), 1 << 16):
        digests = bytearray()
        for key in keys[first : first + (1 << 16)].to_pylist():
            state = start.copy()
            state.update(key.encode())
            digests += state.digest()[:8]
        hashes[first : first + len(digests) // 8] = np.frombuffer(digests, ">u8")
    return hashes


def assign_sides(
    names: pa.Array,
    split: SplitSection,
    *,
    strata: npt.NDArray[Any] | None = None,
    unit_of: npt.NDArray[np.int64] | None = None,
    frozen: Mapping[str, Side] | None = None,
) -> SideCodes:
    """Side of each group.

    names: of the groups, each once. strata: code of each group's stratum, for exact quotas. unit_of: number of the unit
    of each group, from 0; none: each group is its own. frozen: sides that are given, by digest of the name.

    Without strata a unit's side depends on the salted hash of one name alone, so more rows never move a row. With them
    the shares are exact within each stratum (largest remainder), units taken in hash order; a stratum of two units or
    more always reaches both train and an evaluation side, when the split has one. A frozen group keeps its side; a new
    group that is united with it gets that side; where a unit holds groups of two sides, each of them keeps its own, and
    new groups join the evaluation side.
    """
    hashes = salted_hashes(split.salt, names)
    given = _frozen_codes(names, frozen)
    order = np.asarray(
        pc.sort_indices(
            pa.table({"h": hashes, "n": names}), sort_keys=[("h", "ascending"), ("n", "ascending")]
        )
    )
    units = np.arange(len(names)) if unit_of is None else unit_of
    n_units = int(units.max(initial=-1)) + 1
    # Of each unit: the first of its groups in hash order, the side of precedence among frozen ones, the first stratum.
    first_group = np.zeros(n_units, np.int64)
    first_group[units[order][::-1]] = order[::-1]
    fixed = _fixed_sides(units, given, n_units)
    unit_order = units[order][_first_of_each(units[order])]
    if strata is None:
        sides = _sides_by_hash(hashes[first_group], split)
        sides = np.where(fixed >= 0, fixed, sides).astype(np.int8)
    else:
        stratum = np.full(n_units, np.iinfo(np.int64).max)
        np.minimum.at(stratum, units, strata.astype(np.int64))
        sides = _sides_by_quota(unit_order, stratum, fixed, split)
    return np.where(given >= 0, given, sides[units]).astype(np.int8)


def _fixed_sides(units: npt.NDArray[np.int64], given: SideCodes, n_units: int) -> SideCodes:
    ranks = np.full(n_units, len(SIDES), np.int8)
    held = given >= 0
    np.minimum.at(ranks, units[held], PRECEDENCE[given[held]])
    by_rank = np.array([*(SIDES.index(side) for side in SIDES_BY_PRECEDENCE), -1], np.int8)
    return by_rank[ranks]


def _first_of_each(values: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return np.sort(np.unique(values, return_index=True)[1])


def _sides_by_hash(hashes: npt.NDArray[np.uint64], split: SplitSection) -> SideCodes:
    edges = np.cumsum([split.shares.get(side, 0.0) for side in SIDES])
    sides = np.searchsorted(edges, hashes.astype(np.float64) / 2.0**64, side="right")
    return np.where(sides < len(SIDES), sides, SIDES.index("train")).astype(np.int8)


def _sides_by_quota(
    unit_order: npt.NDArray[np.int64],
    stratum: npt.NDArray[np.int64],
    fixed: SideCodes,
    split: SplitSection,
) -> SideCodes:
    sides = fixed.copy()
    by_stratum = unit_order[np.argsort(stratum[unit_order], kind="stable")]
    cuts = np.flatnonzero(np.diff(stratum[by_stratum])) + 1
    for members in np.split(by_stratum, cuts):
        free = members[fixed[members] < 0]
        held = np.bincount(fixed[members][fixed[members] >= 0], minlength=len(SIDES))
        dealt = _open_places(quota(len(members), split), held.tolist(), len(free))
        sides[free] = np.repeat(np.arange(len(SIDES)), dealt)
    return sides


def quota(n_units: int, split: SplitSection) -> list[int]:
    """How many of a stratum's units each side gets: largest remainder, then train and evaluation at least one each."""
    shares = [split.shares.get(side, 0.0) for side in SIDES]
    exact = [share * n_units for share in shares]
    counts = [int(value) for value in exact]
    by_remainder = sorted(range(len(SIDES)), key=lambda side: counts[side] - exact[side])
    for side in by_remainder[: n_units - sum(counts)]:
        counts[side] += 1
    train = SIDES.index("train")
    evaluation = sorted(
        (side for side in range(len(SIDES)) if side != train and shares[side]), key=lambda side: -shares[side]
    )
    if n_units and counts[train] == 0:
        counts[max(evaluation, key=lambda side: counts[side])] -= 1
        counts[train] = 1
    if n_units > 1 and evaluation and counts[train] == n_units:
        counts[train] -= 1
        counts[evaluation[0]] += 1
    return counts


def _open_places(wanted: Sequence[int], held: Sequence[int], n_free: int) -> list[int]:
    """How many free units each side gets so that, with those it holds already, the quotas are met as well as can be."""
    places = [max(0, want - have) for want, have in zip(wanted, held, strict=True)]
    while sum(places) > n_free:  # some sides hold more than their quota: the others share what is left
        places[max(range(len(places)), key=lambda side: (places[side], -side))] -= 1
    return places


def group_digest(name: str) -> str:
    """A group's name as it is written down: the name may be a user's e-mail address."""
    return digest_bytes(name.encode())[:16]


def write_assignment(path: Path, names: pa.Array, sides: SideCodes, split: SplitSection) -> None:
    """Write the sides of all groups, for `split.frozen_from` of a later build."""
    by_side: dict[str, list[str]] = {side: [] for side in SIDES}
    for name, side in zip(names.to_pylist(), sides.tolist(), strict=True):
        by_side[SIDES[side]].append(group_digest(name))
    groups = {side: sorted(members) for side, members in by_side.items()}
    write_json(path, {"format": _ASSIGNMENT_FORMAT, "salt": split.salt, "groups": groups})


def read_assignment(path: Path) -> dict[str, Side]:
    """Digest of a group's name -> its side. Raises UserError when the file is no assignment."""
    try:
        held = read_json(path)
    except UserError:  # its remedy would be to delete the file
        held = None
    groups = held.get("groups") if isinstance(held, dict) else None
    if not isinstance(groups, dict) or held.get("format") != _ASSIGNMENT_FORMAT:
        raise UserError(
            f"{path} is not the assignment.json of a dataset build",
            where="split.frozen_from",
            fix="copy assignment.json out of the folder of the earlier build, and name the copy",
        )
    return {digest: side for side in SIDES for digest in groups.get(side, [])}


def _frozen_codes(names: pa.Array, frozen: Mapping[str, Side] | None) -> SideCodes:
    if not frozen:
        return np.full(len(names), -1, np.int8)
    codes = {side: code for code, side in enumerate(SIDES)}
    sides = (frozen.get(group_digest(name)) for name in names.to_pylist())
    return np.array([-1 if side is None else codes[side] for side in sides], np.int8)
