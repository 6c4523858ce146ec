"""What follows from verified pairs: which rows stand for which, and which must stay together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.int64]


def representatives(
    n_rows: int, near: Iterable[tuple[int, int, float]], rank: Sequence[int] | None = None
) -> Rows:
    """Row -> the row that is kept in its place, itself when it is kept: every row left out is near to the one kept.

    Rows are taken in the order of `rank` (lowest first; by default as they stand); a row is kept unless a verified pair
    links it to a row kept before, of which the most similar one stands for it. No chain is followed: where a is near b
    and b near c, but a not near c, then with a kept, b goes and c stays. A transitive closure would leave c out for a.
    """
    order = np.argsort(np.asarray(rank), kind="stable") if rank is not None else np.arange(n_rows)
    place = np.empty(n_rows, np.int64)
    place[order] = np.arange(n_rows)
    earlier: dict[int, list[tuple[float, int, int]]] = defaultdict(
        list
    )  # row -> (-jaccard, place, row) before it
    for one, other, jaccard in near:
        first, second = (one, other) if place[one] < place[other] else (other, one)
        earlier[second].append((-jaccard, int(place[first]), first))
    kept_for = np.arange(n_rows)
    for row in sorted(earlier, key=lambda row: int(place[row])):
        kept = [link for link in earlier[row] if kept_for[link[2]] == link[2]]
        if kept:
            kept_for[row] = min(kept)[2]
    return kept_for


def components(n_rows: int, near: Iterable[tuple[int, int, float]]) -> Rows:
    """Row -> the lowest row it is linked to by verified pairs, also through others: what must fall on one side together.

    For splitting only, where one pair across sides is a leak. For leaving rows out take `representatives`.
    """
    parent = list(range(n_rows))

    def root(row: int) -> int:
        while parent[row] != row:
            parent[row] = parent[parent[row]]
            row = parent[row]
        return row

    for one, other, _ in near:
        low, high = sorted((root(one), root(other)))
        parent[high] = low
    return np.array([root(row) for row in range(n_rows)], np.int64)
