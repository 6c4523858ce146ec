"""Which rows share a pack. No row is split, cut or lost, and the packs are as alike in tokens as they can be."""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Sequence

from finetune.errors import UserError


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Indices of the rows in each pack; every index appears once and no pack holds more than `capacity` tokens.

    The number of packs is that of best-fit decreasing (at most 11/9 of the optimum + 1; Johnson 1974). Over so many
    packs the rows are dealt as evenly as they go, so that every forward pass, and every optimizer step, sees about the
    same number of tokens. The result depends on `lengths` and `capacity` alone.
    Raises UserError when a row is longer than a pack.
    """
    longest = max(lengths, default=0)
    if longest > capacity:
        raise UserError(
            f"a row of {longest} tokens does not fit into a pack of {capacity}",
            where="train.pack_tokens",
            fix=f"set train.pack_tokens to {longest} or more, or lower data.max_tokens",
        )
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    packs = _best_fit(lengths, order, capacity)
    if packs:
        packs = _deal_evenly(lengths, order, capacity, len(packs)) or _multifit(
            lengths, order, capacity, packs
        )
    return sorted(sorted(members) for members in packs)


def _best_fit(lengths: Sequence[int], order: list[int], capacity: int) -> list[list[int]]:
    """Each row goes into the fullest pack that still has room for it."""
    packs: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (free tokens, pack), ascending
    for index in order:
        at = bisect.bisect_left(room, (lengths[index], -1))
        if at < len(room):
            free, chosen = room.pop(at)
        else:
            free, chosen = capacity, len(packs)
            packs.append([])
        packs[chosen].append(index)
        bisect.insort(room, (free - lengths[index], chosen))
    return packs


def _deal_evenly(
    lengths: Sequence[int], order: list[int], capacity: int, n_packs: int
) -> list[list[int]] | None:
    """Each row goes into the pack with the fewest tokens; None when that overflows a pack."""
    packs: list[list[int]] = [[] for _ in range(n_packs)]
    loads = [(0, number) for number in range(n_packs)]
    for index in order:
        load, chosen = heapq.heappop(loads)
        if load + lengths[index] > capacity:
            return None
        packs[chosen].append(index)
        heapq.heappush(loads, (load + lengths[index], chosen))
    return packs


def _multifit(
    lengths: Sequence[int], order: list[int], capacity: int, packs: list[list[int]]
) -> list[list[int]]:
    """Best fit with the smallest capacity that needs no more packs, by bisection (Coffman, Garey and Johnson 1978)."""
    low = max(lengths[order[0]], -(-sum(lengths) // len(packs)))
    high = capacity
    best = packs
    while low < high:
        middle = (low + high) // 2
        tried = _best_fit(lengths, order, middle)
        if len(tried) <= len(packs):
            best, high = tried, middle
        else:
            low = middle + 1
    return best
