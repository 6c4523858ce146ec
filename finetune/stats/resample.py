"""A bootstrap interval for any number that is computed from items: a ratio of quantiles, a kappa, a position bias.

Whole units (items, or clusters of items) are drawn with replacement (Efron & Tibshirani 1993, chapter 13: percentile
interval). For means and differences of means `compare` and `mean_interval` are the better choice: their intervals
are calibrated for small sets, which a percentile interval is not.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from finetune.errors import UserError
from finetune.stats.bootstrap import RESAMPLES
from finetune.stats.clusters import cluster_codes
from finetune.stats.validate import checked_clusters, checked_confidence

Indices = npt.NDArray[np.int64]
_MOST_UNDEFINED = 0.5  # share of resamples without a value beyond which the interval means nothing


@dataclass(frozen=True, slots=True)
class Resampled:
    """A value over all items, and the ends of its interval; `low` and `high` are None where resamples give no value."""

    value: float | None
    low: float | None
    high: float | None


def resampled_interval(
    statistic: Callable[[Indices], float | None],
    n: int,
    *,
    clusters: Sequence[Hashable] | None = None,
    confidence: float = 0.95,
    seed: int = 0,
) -> Resampled:
    """`statistic(items)` over all `n` items, with a two-sided percentile interval from 1,999 seeded resamples.

    statistic: takes places of items, shape [any], some more than once; None where it is not defined. Undefined resamples
    are left out; when they are more than half of all, there is no interval.
    """
    confidence = checked_confidence(confidence)
    if n < 1:
        raise UserError("there are no items to resample", fix="compare at least one item")
    labels = checked_clusters(clusters, n)
    units = _units(labels, n)
    if len(units) < 2:
        return Resampled(statistic(np.arange(n)), None, None)
    generator = np.random.default_rng(seed)
    values = []
    for _ in range(RESAMPLES):
        drawn = generator.integers(0, len(units), len(units))
        value = statistic(np.concatenate([units[unit] for unit in drawn]) if labels is not None else drawn)
        if value is not None and np.isfinite(value):
            values.append(float(value))
    whole = statistic(np.arange(n))
    if whole is None or len(values) < (1.0 - _MOST_UNDEFINED) * RESAMPLES:
        return Resampled(whole, None, None)
    tail = (1.0 - confidence) / 2.0
    low, high = (float(end) for end in np.quantile(values, (tail, 1.0 - tail)))
    return Resampled(whole, low, high)


def _units(labels: Sequence[Hashable] | None, n: int) -> list[Indices]:
    """The places of every unit's items."""
    if labels is None:
        return [np.array([place]) for place in range(n)]
    codes = cluster_codes(labels)
    order = np.argsort(codes, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(codes[order])) + 1)


def quantile_ratio(
    before: Sequence[float],
    after: Sequence[float],
    share: float,
    *,
    clusters: Sequence[Hashable] | None = None,
    confidence: float = 0.95,
    seed: int = 0,
) -> Resampled:
    """after / before of one quantile (`share` 0.95: the 95th percentile), both taken over the same items.

    before, after: positive values of the same items in one order, shape [n].
    """
    first, second = np.asarray(before, dtype=np.float64), np.asarray(after, dtype=np.float64)
    if first.shape != second.shape:
        raise UserError(
            f"{len(first)} values before and {len(second)} after", fix="pair the arms by item first"
        )

    def ratio(items: Indices) -> float | None:
        base = float(np.quantile(first[items], share))
        return float(np.quantile(second[items], share)) / base if base > 0.0 else None

    return resampled_interval(ratio, len(first), clusters=clusters, confidence=confidence, seed=seed)
