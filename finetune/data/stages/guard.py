"""What may not be on two sides although no key shows it: questions that are nearly the same.

Evaluation wins: of two rows on different sides that are near duplicates, the one on the side that goes later is dropped.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from finetune.data.curate.near import find_near_duplicates
from finetune.data.rows import Progress
from finetune.data.spec_split import GuardSection
from finetune.data.stages.sides import PRECEDENCE, SideCodes
from finetune.data.stages.table import Ints, RowTable
from finetune.data.texts import question_text

NEAR = "near_duplicate_on_other_side"
_MOST_ROUNDS = 20


@dataclass(frozen=True)
class NearPairs:
    """Pairs of rows; the first of each goes first by side. `jaccard` is exact."""

    first: Ints
    second: Ints
    jaccard: npt.NDArray[np.float64]

    def across(self, side: SideCodes) -> NearPairs:
        """The pairs on two sides."""
        is_leak = side[self.first] != side[self.second]
        return NearPairs(self.first[is_leak], self.second[is_leak], self.jaccard[is_leak])


def near_pairs(
    table: RowTable, side: SideCodes, rows: Ints, threshold: float, on_progress: Progress
) -> NearPairs:
    """Verified near duplicates among the questions of `rows`."""
    rows = rows[np.lexsort((table.place[rows], PRECEDENCE[side[rows]]))]
    near = find_near_duplicates(
        table.texts(rows, question_text), threshold=threshold, on_progress=on_progress
    )
    return NearPairs(rows[near.first], rows[near.second], near.similarity)


def find_losers(
    table: RowTable, side: SideCodes, rows: Ints, section: GuardSection, on_progress: Progress
) -> tuple[Ints, Ints]:
    """The rows of `rows` to drop so that no near duplicates are on two sides, and the row because of which each goes."""
    lost, causes = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    if section.near_duplicates is None:
        return lost[0], causes[0]
    for _ in range(_MOST_ROUNDS):
        if len(np.unique(side[rows])) < 2:
            break
        pairs = near_pairs(table, side, rows, section.near_duplicates, on_progress)
        found, cause = _losers(pairs.across(side), side, table.place)
        lost.append(found)
        causes.append(cause)
        rows = np.setdiff1d(rows, found)
        if not _may_hide_more(pairs, found, side):
            break
    return np.concatenate(lost), np.concatenate(causes)


def _losers(leaks: NearPairs, side: SideCodes, place: Ints) -> tuple[Ints, Ints]:
    """The rows to drop, each with the row because of which; a row that is itself dropped drops no other."""
    order = np.lexsort(
        (place[leaks.first], PRECEDENCE[side[leaks.first]], leaks.second, PRECEDENCE[side[leaks.second]])
    )
    lost: dict[int, int] = {}
    for first, second in zip(leaks.first[order].tolist(), leaks.second[order].tolist(), strict=True):
        if first not in lost:
            lost.setdefault(second, first)
    return np.array(list(lost), np.int64), np.array(list(lost.values()), np.int64)


def _may_hide_more(pairs: NearPairs, lost: Ints, side: SideCodes) -> bool:
    """Whether a dropped row was the link between rows of two sides: such rows are listed with their link only."""
    was_lost = np.isin(np.stack([pairs.first, pairs.second]), lost)
    one_lost = was_lost[0] != was_lost[1]
    link = np.where(was_lost[0], pairs.first, pairs.second)[one_lost]
    kept = np.where(was_lost[0], pairs.second, pairs.first)[one_lost]
    seen = np.unique(np.stack([link, side[kept]], axis=1), axis=0)
    return bool((np.unique(seen[:, 0], return_counts=True)[1] > 1).any())
