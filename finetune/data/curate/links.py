"""What follows from verified pairs: which rows stand for which, and which must stay together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.int64]
Link = tuple[int, int, float]  # lower row, higher row, their similarity


def representatives(n_rows: int, near: Iterable[Link]) -> Rows:
    """Row -> the row that is kept in its place, itself when it is kept: every row left out is near to the one kept.

    Rows are taken as they stand; a row is kept unless a verified pair links it to a row kept before it, of which the most
    similar one stands for it. No chain is followed: where a is near b and b near c, but a not near c, then b goes for a
    and c stays. A transitive closure would leave c out for a, and in the end nearly all rows for a few.
    """
    before: dict[int, list[tuple[float, int]]] = defaultdict(
        list
    )  # row -> (-similarity, row that stands before it)
    for low, high, similarity in near:
        before[high].append((-similarity, low))
    kept_for = list(range(n_rows))
    for row in sorted(before):
        kept = [link for link in before[row] if kept_for[link[1]] == link[1]]
        if kept:
            kept_for[row] = min(kept)[1]
    return np.array(kept_for, np.int64)


def components(n_rows: int, near: Iterable[Link]) -> Rows:
    """Row -> the lowest row it is linked to by verified pairs, also through others: what must fall on one side together.

    For splitting only, where one pair across sides is a leak. For leaving rows out take `representatives`.
    """
    pairs = np.array([(low, high) for low, high, _ in near], np.int64).reshape(-1, 2)
    return connected(n_rows, pairs[:, 0], pairs[:, 1])


def connected(n_rows: int, one: Rows, other: Rows) -> Rows:
    """Row -> the lowest row that is reached from it along the pairs (one[k], other[k])."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    if not n_rows:
        return np.empty(0, np.int64)
    graph = coo_array((np.ones(len(one), np.int8), (one, other)), shape=(n_rows, n_rows))
    _, labels = connected_components(graph, directed=False)
    _, lowest = np.unique(labels, return_index=True)  # the first row of each label is the lowest
    return np.asarray(lowest[labels], np.int64)


def links(pairs: npt.NDArray[np.uint64], similarity: npt.NDArray[np.float64]) -> Iterator[Link]:
    """Packed pairs (lower row in the upper half of the number) one by one."""
    low, high = pairs >> np.uint64(32), pairs & np.uint64(0xFFFFFFFF)
    return zip(low.tolist(), high.tolist(), similarity.tolist(), strict=True)
