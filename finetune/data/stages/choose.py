"""Which rows of a side are used, and in which order: limits, balance between values of a tag, weights of sources.

Legend: rows are numbers in a RowTable; a queue holds the rows that may still be dealt, the next one last.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from finetune.data.rows import SIDES, Side
from finetune.data.spec_split import SelectSection
from finetune.data.stages.settle import Verdicts
from finetune.data.stages.sides import SideCodes, salted_hash, salted_hashes
from finetune.data.stages.table import Ints, RowTable

OVER_LIMIT = "over_limit"
OVER_WEIGHT = "over_weight"


def choose(
    table: RowTable,
    side: SideCodes,
    select: SelectSection,
    seed: int,
    verdicts: Verdicts,
    weights: Sequence[float] | None = None,
    *,
    of: Sequence[Side] = SIDES,
) -> dict[Side, Ints]:
    """The rows of each side in `of` that are used, in seeded order; the others are dropped as over a limit or over a weight.

    When `rows` is binding, rows are dealt one at a time: the value of `balance_by` with the fewest rows, relative to
    its number of groups to the power `balance_power`, is next; within it the groups take turns. weights: of the sources
    of the spec; the train rows are then used in these proportions, as many as the scarcest source allows, or repeated
    up to `max_repeats` times each. A repeated row stands in the result as often as it is used. Pinned rows are always used.
    """
    kept = verdicts.kept
    chosen: dict[Side, Ints] = {}
    for name in of:
        rows = _in_seeded_order(table, kept[side[kept] == SIDES.index(name)], seed)
        if name == "train" and weights is not None:
            used = _mix(table, rows, weights, select, seed, verdicts)
        else:
            used = _within_limits(table, rows, name, select, seed)
            verdicts.drop(OVER_LIMIT, np.setdiff1d(rows, used))
        chosen[name] = used
    return chosen


def _in_seeded_order(table: RowTable, rows: Ints, seed: int) -> Ints:
    """By a hash of the row's id, so that neither files nor groups show in the order."""
    ids = table.column("id").take(pa.array(rows))
    by = pa.table({"hash": salted_hashes(f"select/{seed}", ids), "id": ids, "place": table.place[rows]})
    order = pc.sort_indices(by, sort_keys=[(name, "ascending") for name in by.column_names])
    in_order: Ints = rows[np.asarray(order)]
    return in_order


def _within_limits(table: RowTable, rows: Ints, side: Side, select: SelectSection, seed: int) -> Ints:
    limit, per_group = select.rows.get(side), select.rows_per_group.get(side)
    if per_group is None and (limit is None or limit >= len(rows)):
        return rows
    pinned = table.pinned[rows]
    free = rows[~pinned]
    left = max(0, (len(rows) if limit is None else limit) - int(pinned.sum()))
    dealt = np.fromiter(_deal(table, free, select, seed, per_group, left), np.int64)
    return rows[pinned | np.isin(rows, dealt)]


def _deal(
    table: RowTable, rows: Ints, select: SelectSection, seed: int, per_group: int | None, limit: int
) -> list[int]:
    queues: dict[str, list[int]] = {}
    shares: dict[str, float] = {}
    for value, groups in _by_value_and_group(table, rows, select.balance_by).items():
        queues[value] = _take_turns(groups, per_group, seed)
        shares[value] = 1 / len(groups) ** select.balance_power
    heap = [(shares[value], value) for value, queue in queues.items() if queue]
    heapq.heapify(heap)
    dealt: list[int] = []
    while heap and len(dealt) < limit:
        weight, value = heapq.heappop(heap)
        dealt.append(queues[value].pop())
        if queues[value]:
            heapq.heappush(heap, (weight + shares[value], value))
    return dealt


def _by_value_and_group(table: RowTable, rows: Ints, tag: str | None) -> dict[str, dict[str, list[int]]]:
    """Value of the tag -> name of the group -> its rows, in the order of `rows`."""
    names = table.group.values.take(pa.array(table.group.codes[rows])).to_pylist()
    values: list[Any] = [""] * len(rows)
    if tag is not None:
        coded = table.tag(tag)
        codes = coded.codes[rows]
        found = coded.values.take(pa.array(codes, mask=codes < 0))
        values = [value or "" for value in found.to_pylist()]
    grouped: dict[str, dict[str, list[int]]] = {}
    for row, value, name in zip(rows.tolist(), values, names, strict=True):
        grouped.setdefault(value, {}).setdefault(name, []).append(row)
    return grouped


def _take_turns(groups: Mapping[str, list[int]], per_group: int | None, seed: int) -> list[int]:
    """One row of each group, then a second of each, …; reversed, so that the next row is popped off the end."""
    names = sorted(groups, key=lambda name: (salted_hash(f"turns/{seed}", name), name))
    rounds = itertools.zip_longest(*(groups[name][:per_group] for name in names))
    return [row for turn in rounds for row in turn if row is not None][::-1]


def _mix(
    table: RowTable,
    rows: Ints,
    weights: Sequence[float],
    select: SelectSection,
    seed: int,
    verdicts: Verdicts,
) -> Ints:
    """Train rows in the proportions of `weights`, in seeded order; repeats follow after all rows have been used once.

    As many as can be: no source is used more than `max_repeats` times, the most plentiful one not more than once, and
    `rows.train` is the most.
    """
    queues = []
    for source in range(len(weights)):
        own = rows[table.origin[rows] == source]
        if select.balance_by is not None or select.rows_per_group.get("train") is not None:
            dealt = _deal(table, own, select, seed, select.rows_per_group.get("train"), len(own))
            verdicts.drop(OVER_LIMIT, np.setdiff1d(own, dealt))
            own = np.array(dealt, np.int64)
        queues.append(np.tile(own, select.max_repeats))
    sizes = table.words if select.mix_by == "tokens" else np.ones(len(table), np.int64)
    reached = [np.cumsum(sizes[queue]) for queue in queues]
    mixed = [source for source, queue in enumerate(queues) if len(queue) and weights[source] > 0]
    if not mixed:
        return rows[:0]
    limit = select.rows.get("train", sum(map(len, queues)))
    most = min(
        min(reached[source][-1] / weights[source] for source in mixed),
        max(reached[source][-1] / select.max_repeats / weights[source] for source in mixed),
    )
    taken = _largest_mix(
        [reached[source] for source in mixed], [weights[source] for source in mixed], most, limit
    )
    used = np.concatenate([queues[source][:count] for source, count in zip(mixed, taken, strict=True)])
    verdicts.drop(OVER_WEIGHT, np.setdiff1d(np.concatenate(queues), used))
    times = np.zeros(len(table), np.int64)
    np.add.at(times, used, 1)
    return np.concatenate([rows[times[rows] > turn] for turn in range(select.max_repeats)])


def _largest_mix(reached: Sequence[Ints], weights: Sequence[float], most: float, limit: int) -> list[int]:
    """How many rows of each queue are used: amounts in proportion to `weights`, at most `limit` rows in all.

    reached[k] are the cumulative sizes of queue k; `most` bounds the amount of a source of weight 1.
    """

    def taken(scale: float) -> list[int]:
        return [
            int(np.searchsorted(sizes, scale * weight * (1 + 1e-12), side="right"))
            for sizes, weight in zip(reached, weights, strict=True)
        ]

    if sum(taken(most)) <= limit:
        return taken(most)
    low, high = 0.0, most
    for _ in range(64):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(taken(middle)) <= limit else (low, middle)
    return taken(low)
