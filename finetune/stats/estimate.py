"""The estimate behind a comparison: difference, interval, p-value, with the method that the data call for."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from finetune.stats.binary import mcnemar_mid_p, tango_interval
from finetune.stats.clusters import RobustMean, cluster_codes, cluster_sums, robust_mean
from finetune.stats.distributions import FloatArray, normal_quantile, t_quantile, t_two_sided
from finetune.stats.power import least_detectable_mean, least_detectable_paired
from finetune.stats.signflip import sign_flip_p_value

FEW_UNITS = 30  # fewer items or clusters: the p-value comes from sign flips, not from Student's t
SINGLE_CLUSTER = "one cluster"


@dataclass(frozen=True, slots=True)
class Estimate:
    """Difference of means with two-sided interval, one-sided bounds at the same confidence, and the chosen test."""

    difference: float
    low: float
    high: float
    one_sided_low: float
    one_sided_high: float
    p_value: float
    test: str
    interval: str
    reason: str
    clusters: int | None
    standard_error: float
    least_detectable: float


def estimate_binary(
    first: FloatArray, second: FloatArray, labels: Sequence[Hashable] | None, *, confidence: float
) -> Estimate:
    """Right/wrong scores, shape [n] each."""
    n = len(first)
    fixed, broken = float(np.count_nonzero(first < second)), float(np.count_nonzero(first > second))
    if labels is not None:
        return _clustered(second - first, labels, confidence=confidence, bounded=True, seed=0)
    low, high = tango_interval(fixed, broken, n, confidence=confidence)
    one_sided = tango_interval(fixed, broken, n, confidence=2 * confidence - 1)
    p_value = float(mcnemar_mid_p(fixed, broken))
    difference = (fixed - broken) / n
    low, high = agreeing_with_test(float(low), float(high), p_value, confidence)
    return Estimate(
        difference=difference,
        low=low,
        high=high,
        one_sided_low=float(one_sided[0]),
        one_sided_high=float(one_sided[1]),
        p_value=p_value,
        test="McNemar mid-p",
        interval="Tango score",
        reason="scores are right or wrong and the items are the same and independent: only discordant items count",
        clusters=None,
        standard_error=float(np.sqrt(max(fixed + broken - n * difference**2, 0.0)) / n),
        least_detectable=least_detectable_paired(n, (fixed + broken) / n, alpha=1 - confidence),
    )


def estimate_continuous(
    first: FloatArray,
    second: FloatArray,
    labels: Sequence[Hashable] | None,
    *,
    confidence: float,
    bounded: bool,
    seed: int,
) -> Estimate:
    """Any other scores, shape [n] each; `bounded` when they lie within [0, 1]."""
    return _clustered(second - first, labels, confidence=confidence, bounded=bounded, seed=seed)


def agreeing_with_test(low: float, high: float, p_value: float, confidence: float) -> tuple[float, float]:
    """Stretch the interval to 0 when the test does not reject 0 (a confidence set holds every value not rejected)."""
    return (min(low, 0.0), max(high, 0.0)) if p_value > 1.0 - confidence else (low, high)


def _clustered(
    differences: FloatArray,
    labels: Sequence[Hashable] | None,
    *,
    confidence: float,
    bounded: bool,
    seed: int,
) -> Estimate:
    codes = np.arange(len(differences)) if labels is None else cluster_codes(labels)
    sums, sizes = cluster_sums(differences, codes)
    robust = robust_mean(sums, sizes)
    few = robust.clusters < FEW_UNITS
    unit = "item" if labels is None else "cluster"
    if few:
        p_value, how = sign_flip_p_value(sums, seed=seed)
        test, why = f"sign-flip permutation of {unit}s ({how})", f"fewer than {FEW_UNITS} {unit}s"
    else:
        p_value = _t_p_value(robust)
        test, why = ("paired t" if labels is None else "cluster-robust t"), f"{robust.clusters} {unit}s"
    low, high = _interval(robust, 0.5 + confidence / 2, bounded)
    one_sided = _interval(robust, confidence, bounded)
    low, high = agreeing_with_test(low, high, p_value, confidence)
    return Estimate(
        difference=robust.mean,
        low=low,
        high=high,
        one_sided_low=one_sided[0],
        one_sided_high=one_sided[1],
        p_value=p_value,
        test=test,
        interval="Student t" if labels is None else "cluster-robust t",
        reason=why,
        clusters=None if labels is None else robust.clusters,
        standard_error=robust.standard_error,
        least_detectable=_least_detectable(robust, confidence, bounded),
    )


def _t_p_value(robust: RobustMean) -> float:
    if robust.mean == 0.0 or robust.clusters < 2:
        return 1.0
    if robust.standard_error == 0.0:
        return 0.0
    return float(t_two_sided(robust.mean / robust.standard_error, robust.degrees_of_freedom))


def _interval(robust: RobustMean, level: float, bounded: bool) -> tuple[float, float]:
    """Ends mean ± t·SE with P(T <= t) = level, within [-1, 1] for bounded scores."""
    if robust.clusters < 2:
        return (-1.0, 1.0) if bounded else (-np.inf, np.inf)
    half = float(t_quantile(level, robust.degrees_of_freedom)) * robust.standard_error
    if half == 0.0 and bounded:
        z2 = float(normal_quantile(level)) ** 2
        half = z2 / (robust.clusters + z2)
    low, high = robust.mean - half, robust.mean + half
    return (max(low, -1.0), min(high, 1.0)) if bounded else (low, high)


def _least_detectable(robust: RobustMean, confidence: float, bounded: bool) -> float:
    if robust.clusters < 2:
        return 1.0
    if robust.standard_error == 0.0 and bounded:
        return least_detectable_paired(robust.clusters, 0.0, alpha=1 - confidence)
    size = least_detectable_mean(robust.standard_error, robust.degrees_of_freedom, alpha=1 - confidence)
    return min(size, 1.0) if bounded else size
