"""The mean of one arm's scores with its margin of error; the method is chosen from the data and named in the answer."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from finetune.errors import UserError
from finetune.stats.clusters import effective_items, robust_mean, unit_totals
from finetune.stats.distributions import FloatArray, normal_cdf, normal_quantile, t_quantile
from finetune.stats.validate import (
    checked_clusters,
    checked_confidence,
    checked_scores,
    is_binary,
    is_bounded,
)

LARGE_SAMPLE_ITEMS = 300  # below, the normal approximation of a mean is not trusted
_RARE_OUTCOMES = 30  # nor with fewer right, or fewer wrong, answers than this
_RESAMPLES = 9_999


@dataclass(frozen=True, slots=True)
class MeanInterval:
    """A mean, the ends of its confidence interval, the number of items, and the name of the method."""

    mean: float
    low: float
    high: float
    n: int
    method: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def mean_interval(
    values: Any,
    *,
    clusters: Sequence[Hashable] | None = None,
    confidence: float = 0.95,
    seed: int = 0,
) -> MeanInterval:
    """Mean of `values` with a two-sided interval.

    values: scores, shape [n], or [n, samples] when every item was sampled several times (averaged per item first).
    Method: `wilson` for right/wrong scores with fewer than 300 items or fewer than 30 of either outcome; `clt` (Student's t)
    from 300 items; `bca` (bootstrap, seeded) for other scores below 300 items; `identical` when there is nothing to resample; with `clusters`,
    `clustered` (cluster-robust standard error, t with at most clusters - 1 degrees of freedom), or `clustered wilson` on
    the effective number of items where fewer than 30 of either outcome remain. Scores within [0, 1] keep their interval there.
    Raises UserError for an empty set, NaN, or lengths that differ.
    """
    confidence = checked_confidence(confidence)
    scores = np.sort(checked_scores(values, name="values")) if clusters is None else checked_scores(values)
    n, mean = len(scores), float(np.mean(scores))
    labels = checked_clusters(clusters, n)
    if labels is not None:
        low, high, method = _clustered(scores, labels, confidence)
    elif is_binary(scores):
        rare = min(scores.sum(), n - scores.sum())
        if n < LARGE_SAMPLE_ITEMS or rare < _RARE_OUTCOMES:
            low, high = wilson_interval(float(scores.sum()), n, confidence=confidence)
            return MeanInterval(mean, low, high, n, "wilson")
        low, high, method = _student(scores, confidence)
    elif n == 1 or scores[0] == scores[-1]:
        low, high, method = _identical(scores, confidence)
    elif n < LARGE_SAMPLE_ITEMS:
        low, high, method = (*bca_interval(scores, confidence=confidence, seed=seed), "bca")
    else:
        low, high, method = _student(scores, confidence)
    if is_bounded(scores):
        low, high = max(low, 0.0), min(high, 1.0)
    return MeanInterval(mean, low, high, n, method)


def wilson_interval(
    successes: float, n: float, *, confidence: float = 0.95, critical: float | None = None
) -> tuple[float, float]:
    """Wilson's score interval of a proportion; no continuity correction (Wilson 1927; Newcombe 1998, method 3)."""
    z = float(normal_quantile(0.5 + confidence / 2.0)) if critical is None else critical
    share, z2 = successes / n, z * z
    centre = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = z / (1 + z2 / n) * np.sqrt(share * (1 - share) / n + z2 / (4 * n * n))
    low = 0.0 if successes == 0 else max(0.0, centre - half)
    high = 1.0 if successes == n else min(1.0, centre + half)
    return float(low), float(high)


def bca_interval(scores: FloatArray, *, confidence: float = 0.95, seed: int = 0) -> tuple[float, float]:
    """Bias-corrected and accelerated bootstrap interval of a mean (Efron 1987), 9,999 seeded resamples.

    The levels are widened as Student's t would be, because a bootstrap of few items is too narrow by √(1 - 1/n) and knows
    nothing of the estimated spread (Hesterberg 2015, The American Statistician 69:371-386).
    `scores` has shape [n] with at least two distinct values (identical values have no bootstrap distribution).
    """
    scores = np.sort(scores)
    n = len(scores)
    generator = np.random.default_rng(seed)
    means = np.concatenate(
        [scores[generator.integers(0, n, (rows, n))].mean(axis=1) for rows in _blocks(_RESAMPLES, n)]
    )
    centred = scores - scores.mean()
    acceleration = float((centred**3).sum() / (6.0 * (centred**2).sum() ** 1.5))
    below = np.mean(means < scores.mean()) + 0.5 * np.mean(means == scores.mean())
    bias = float(normal_quantile(np.clip(below, 1 / (_RESAMPLES + 1), 1 - 1 / (_RESAMPLES + 1))))
    z = float(t_quantile(0.5 + confidence / 2.0, n - 1)) * np.sqrt(n / (n - 1.0))
    levels = [float(normal_cdf(bias + (bias + q) / (1 - acceleration * (bias + q)))) for q in (-z, z)]
    low, high = np.quantile(means, levels)
    return float(low), float(high)


def _blocks(total: int, width: int, cells: int = 2_000_000) -> list[int]:
    rows = max(1, cells // width)
    return [min(rows, total - start) for start in range(0, total, rows)]


def _student(scores: FloatArray, confidence: float) -> tuple[float, float, str]:
    n = len(scores)
    half = float(t_quantile(0.5 + confidence / 2.0, n - 1) * scores.std(ddof=1) / np.sqrt(n))
    mean = float(scores.mean())
    return mean - half, mean + half, "clt"


def _identical(scores: FloatArray, confidence: float) -> tuple[float, float, str]:
    """All scores equal: what n equal draws leave possible on a [0, 1] scale, instead of an interval of width 0."""
    value = float(scores[0])
    if not is_bounded(scores):
        return value, value, "identical"
    elsewhere = wilson_interval(0.0, len(scores), confidence=confidence)[1]
    return value * (1 - elsewhere), value * (1 - elsewhere) + elsewhere, "identical"


def _clustered(
    scores: FloatArray, clusters: Sequence[Hashable], confidence: float
) -> tuple[float, float, str]:
    """Student's t on the cluster-robust error; Wilson's interval on effective items where one outcome is rare."""
    robust = robust_mean(unit_totals(scores, clusters))
    mean, error = float(robust.mean), float(robust.standard_error)
    if robust.units < 2:
        if not is_bounded(scores):
            raise UserError(
                "one cluster gives no margin of error", fix="leave the clusters out or use a finer key"
            )
        return 0.0, 1.0, "one cluster"
    critical = float(t_quantile(0.5 + confidence / 2.0, robust.degrees_of_freedom))
    if is_binary(scores):
        items = float(effective_items(mean * (1.0 - mean), error, len(scores), robust.units))
        if items * min(mean, 1.0 - mean) < _RARE_OUTCOMES:
            low, high = wilson_interval(mean * items, items, critical=critical)
            return low, high, "clustered wilson"
    elif error == 0.0:
        return _identical(np.full(robust.units, mean), confidence)
    return mean - critical * error, mean + critical * error, "clustered"
