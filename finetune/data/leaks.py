"""The proof that no evaluation row was seen in training, found anew from the files of a build and not from its manifest."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa

from finetune.data.rows import SIDES, Progress, Side
from finetune.data.spec_split import GuardSection
from finetune.data.stages.digests import SideHasher
from finetune.data.stages.guard import Pairs, near_pairs, quotes
from finetune.data.stages.parts import KEYS, ROWS_A_BATCH, KeyColumns, iter_stored
from finetune.data.stages.sides import SideCodes
from finetune.data.stages.table import Codes, RowTable
from finetune.data.stages.write import side_file
from finetune.data.wording import NO_WORDING, SharedWording
from finetune.errors import UserError


@dataclass(frozen=True, slots=True)
class Leak:
    """Two rows on different sides that share what must be on one side only.

    `kind` is exact (the same prompt), group, near (questions that are near duplicates), ngram (a row that holds what
    another asks) or the name of a tag.
    """

    kind: str
    key: str
    first_side: Side
    first_id: str
    second_side: Side
    second_id: str

    def to_dict(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "key": self.key,
            "first": {"side": self.first_side, "id": self.first_id},
            "second": {"side": self.second_side, "id": self.second_id},
        }


@dataclass(frozen=True)
class SideFile:
    """What is in the file of one side: the keys of its rows, and both digests."""

    keys: pa.Table
    rows: int
    digest: str
    sha256: str


def read_side(path: Path) -> SideFile:
    """Read the file of a side once. Raises UserError, naming the line, for what is no row."""
    hasher, state, keys = SideHasher(), hashlib.sha256(), KeyColumns()
    batches: list[pa.RecordBatch] = []
    offset = 0
    for line, row in iter_stored(path):
        state.update(line)
        hasher.add(row)
        keys.add(row, offset, len(line.rstrip(b"\n")))
        offset += len(line)
        if len(keys) == ROWS_A_BATCH:
            batches.append(keys.take())
    table = pa.Table.from_batches([*batches, keys.take()], KEYS)
    return SideFile(table, hasher.n_rows, hasher.hexdigest(), state.hexdigest())


def table_of(folder: Path, files: Mapping[Side, SideFile]) -> tuple[RowTable, SideCodes]:
    """The rows of all sides as one table, and the side of each."""
    table = RowTable.of_keys(
        [files[side].keys for side in SIDES],
        [folder / side_file(side) for side in SIDES],
        [0] * len(SIDES),
        [False] * len(SIDES),
    )
    counts = [files[side].rows for side in SIDES]
    return table, np.repeat(np.arange(len(SIDES), dtype=np.int8), counts)


def find_leaks(
    table: RowTable,
    side: SideCodes,
    tags: Sequence[str] = (),
    guard: GuardSection | None = None,
    wording: SharedWording = NO_WORDING,
    on_progress: Progress = lambda share: None,
) -> dict[str, list[Leak]]:
    """Kind -> leaks: 'exact' (same folded prompt), 'group', each of `tags`, and 'near' and 'ngram' as the guard says.

    One leak is reported for each shared key and pair of sides, with one row of each side as the witness; of near
    duplicates every verified pair that was found; of rows that quote a question one pair for each such row.
    """
    found = {
        "exact": _shared(table, side, "exact", table.prompt.codes, None),
        "group": _shared(table, side, "group", table.group.codes, table.group.values),
    }
    for tag in tags:
        found[tag] = _shared(table, side, tag, table.tag(tag).codes, table.tag(tag).values)
    rows = np.arange(len(table))
    if guard is not None and guard.near_duplicates is not None:
        pairs = near_pairs(
            table, side, rows, guard.near_duplicates, wording, lambda share: on_progress(share / 2)
        )
        found["near"] = _leaks_of(table, side, "near", "Jaccard", pairs.across(side))
    if guard is not None and guard.counts_ngrams:
        pairs = quotes(table, side, rows, guard, wording, lambda share: on_progress(0.5 + share / 2))
        found["ngram"] = _leaks_of(table, side, "ngram", "coverage", pairs)
    return found


def _shared(table: RowTable, side: SideCodes, kind: str, codes: Codes, names: pa.Array | None) -> list[Leak]:
    """Keys on two sides. Without names the key is the row's prompt, read from the file."""
    held = np.flatnonzero(codes >= 0)
    both = codes[held].astype(np.int64) * len(SIDES) + side[held]
    present, at = np.unique(both, return_index=True)
    keys, starts, n_sides = np.unique(present // len(SIDES), return_index=True, return_counts=True)
    leaks: list[Leak] = []
    for place in np.flatnonzero(n_sides > 1).tolist():
        witnesses = held[at[starts[place] : starts[place] + n_sides[place]]].tolist()
        name = str(names[int(keys[place])]) if names is not None else _prompt(table, witnesses[0])
        leaks += [_leak(table, side, kind, name, one, other) for one, other in combinations(witnesses, 2)]
    return leaks


def _leaks_of(table: RowTable, side: SideCodes, kind: str, measure: str, pairs: Pairs) -> list[Leak]:
    listed = zip(pairs.first.tolist(), pairs.second.tolist(), pairs.similarity.tolist(), strict=True)
    return [
        _leak(table, side, kind, f"{measure} {value:.2f}", first, second) for first, second, value in listed
    ]


def _prompt(table: RowTable, row: int) -> str:
    return "\n".join(str(turn.get("content") or "") for turn in table.row(row).prompt)


def _leak(table: RowTable, side: SideCodes, kind: str, key: str, first: int, second: int) -> Leak:
    return Leak(
        kind,
        key,
        SIDES[side[first]],
        table.text("id", first),
        SIDES[side[second]],
        table.text("id", second),
    )


def count_ledger(path: Path) -> tuple[dict[str, int], int]:
    """Reason -> number of rows that the ledger says were dropped, and the number of quarantined rows.

    Raises UserError, naming the line, for what is no entry.
    """
    dropped: Counter[str] = Counter()
    quarantined = 0
    with path.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            try:
                entry = orjson.loads(line)
                kind, reason = entry["kind"], str(entry["reason"])
            except (ValueError, KeyError, TypeError) as error:
                raise UserError(
                    f"not an entry of the ledger: {error}",
                    where=f"{path}:{number}",
                    fix="delete the folder and build it again",
                ) from None
            if kind == "quarantined":
                quarantined += 1
            else:
                dropped[reason] += 1
    return dict(sorted(dropped.items())), quarantined
