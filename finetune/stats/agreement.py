"""How far two raters agree, and how far beyond chance: agreement and Cohen's kappa, both with interval."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from finetune.stats.distributions import FloatArray
from finetune.stats.means import mean_interval
from finetune.stats.resample import Indices, resampled_interval

Pair = tuple[Hashable, Hashable]


@dataclass(frozen=True, slots=True)
class Agreement:
    """n pairs of which `agreed` are equal; shares and kappas with the ends of their intervals, None where not defined."""

    n: int
    agreed: int
    agreement: float | None
    low: float | None
    high: float | None
    kappa: float | None
    kappa_low: float | None
    kappa_high: float | None
    confidence: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def cohens_kappa(pairs: Sequence[Pair]) -> float | None:
    """Agreement of two raters beyond chance (Cohen 1960); None without pairs or when chance alone would always agree."""
    return _kappa(_table(pairs)) if pairs else None


def agreement(
    pairs: Sequence[Pair],
    *,
    clusters: Sequence[Hashable] | None = None,
    confidence: float = 0.95,
    seed: int = 0,
) -> Agreement:
    """Compare two raters on the same things, `pairs` of (one's label, the other's).

    clusters: what pairs share, e.g. the item whose two answers were rated. The share of agreement gets the interval of
    a mean of right and wrong; kappa a bootstrap interval. Where every pair agrees no resample can show a disagreement,
    so there kappa's low end is what the low end of the agreement leaves of it at the same chance.
    """
    n = len(pairs)
    equal = [float(one == other) for one, other in pairs]
    if not n:
        return Agreement(0, 0, None, None, None, None, None, None, confidence)
    share = mean_interval(equal, clusters=clusters, confidence=confidence)

    cells, labels = _cells(pairs)

    def kappa_of(items: Indices) -> float | None:
        drawn = np.bincount(cells[items], minlength=labels**2)
        return _kappa(drawn.reshape(labels, labels).astype(np.float64))

    kappa = resampled_interval(kappa_of, n, clusters=clusters, confidence=confidence, seed=seed)
    low, high = kappa.low, kappa.high
    if kappa.value is not None and low == high:
        chance = _chance(_table(pairs))
        low, high = ((end - chance) / (1.0 - chance) for end in (share.low, share.high))
    return Agreement(
        n, int(sum(equal)), share.mean, share.low, share.high, kappa.value, low, high, confidence
    )


def _cells(pairs: Sequence[Pair]) -> tuple[Indices, int]:
    """For each pair its cell in the table of the two raters' labels, row by row, and the number of labels."""
    codes = {
        label: code for code, label in enumerate(dict.fromkeys(label for pair in pairs for label in pair))
    }
    return np.array([codes[one] * len(codes) + codes[other] for one, other in pairs]), len(codes)


def _table(pairs: Sequence[Pair]) -> FloatArray:
    """Counts of every combination of labels, shape [labels, labels]."""
    cells, labels = _cells(pairs)
    return np.bincount(cells, minlength=labels**2).reshape(labels, labels).astype(np.float64)


def _chance(table: FloatArray) -> float:
    """How often the raters would agree if each kept to the shares of labels and drew blindly."""
    return float(table.sum(axis=0) @ table.sum(axis=1)) / float(table.sum()) ** 2


def _kappa(table: FloatArray) -> float | None:
    chance = _chance(table)
    return None if chance >= 1.0 else (float(np.trace(table)) / float(table.sum()) - chance) / (1.0 - chance)
