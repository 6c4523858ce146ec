"""Exact order statistics of a tensor that is never whole in memory, by counting bit patterns.

The bit patterns of non-negative fp32 numbers, read as integers, have the order of the numbers. One pass counts the upper
sixteen bits, which finds the bin of a rank; a second pass counts the lower sixteen bits inside that bin. Counts are
integers, so the result does not depend on the order or size of the chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from finetune.merge.methods.chunk import Chunk, Chunks

_HIGH_BINS = 1 << 15
_LOW_BINS = 1 << 16
_NOT_FINITE = 0x7F80
_COARSE_SHIFT = 14
COARSE_BINS = 1 << (31 - _COARSE_SHIFT)

Values = Callable[[Chunk], list[torch.Tensor]]
"""Non-negative fp32 tensors of a chunk, one for each quantity that is ranked."""


class NotFiniteError(ValueError):
    """NaN or infinity met while measuring a tensor."""


def n_kept(density: float, n: int) -> int:
    """How many of `n` elements a density keeps: at least one where it is above zero."""
    return min(n, max(1, int(density * n))) if density > 0 else 0


def order_statistics(chunks: Chunks, values: Values, ranks: Sequence[Sequence[int]]) -> list[list[float]]:
    """For each quantity the values at its ascending 0-based `ranks`; two passes over the chunks."""
    high = _sum(chunks.map(lambda chunk: [_count_high(value) for value in values(chunk)]), len(ranks))
    found: list[list[tuple[int, int]]] = []  # (bin, rank inside the bin)
    for counts, wanted in zip(high, ranks, strict=True):
        if int(counts[_NOT_FINITE:].sum()):
            raise NotFiniteError
        below = counts.cumsum(0)
        places = []
        for rank in wanted:
            place = int(torch.searchsorted(below, rank, right=True))
            places.append((place, rank - int(below[place] - counts[place])))
        found.append(places)

    def count_low(chunk: Chunk) -> list[torch.Tensor]:
        return [
            _count_low(value, place)
            for value, places in zip(values(chunk), found, strict=True)
            for place, _ in places
        ]

    flat = [place for places in found for place in places]
    low = _sum(chunks.map(count_low), len(flat))
    answers = iter(
        _number((place << 16) | int(torch.searchsorted(counts.cumsum(0), rank, right=True)))
        for counts, (place, rank) in zip(low, flat, strict=True)
    )
    return [[next(answers) for _ in places] for places in found]


def coarse_histogram(values: torch.Tensor) -> torch.Tensor:
    """Counts [COARSE_BINS] of magnitudes by their upper 17 bits: bins of 0.2 % relative width."""
    return torch.bincount(values.reshape(-1).view(torch.int32) >> _COARSE_SHIFT, minlength=COARSE_BINS)


def coarse_threshold(counts: torch.Tensor, density: float) -> float:
    """The lower edge of the bin in which the `density` share of the largest magnitudes ends."""
    if int(counts[_NOT_FINITE << (16 - _COARSE_SHIFT) :].sum()):
        raise NotFiniteError
    total = int(counts.sum())
    if density >= 1 or not total:
        return 0.0
    kept = n_kept(density, total)
    if kept == 0:
        return float("inf")
    rank = total - kept
    return _number(int(torch.searchsorted(counts.cumsum(0), rank, right=True)) << _COARSE_SHIFT)


def _count_high(value: torch.Tensor) -> torch.Tensor:
    return torch.bincount(value.reshape(-1).view(torch.int32) >> 16, minlength=_HIGH_BINS)


def _count_low(value: torch.Tensor, place: int) -> torch.Tensor:
    bits = value.reshape(-1).view(torch.int32)
    inside = bits[(bits >> 16) == place] & 0xFFFF
    return torch.bincount(inside, minlength=_LOW_BINS)


def _sum(parts: object, n: int) -> list[torch.Tensor]:
    totals: list[torch.Tensor] = []
    for counts in parts:  # type: ignore[attr-defined]
        if not totals:
            totals = counts
        else:
            for total, count in zip(totals, counts, strict=True):
                total += count
    return totals or [torch.zeros(_HIGH_BINS, dtype=torch.int64) for _ in range(n)]


def _number(bits: int) -> float:
    return float(torch.tensor(bits, dtype=torch.int32).view(torch.float32))
