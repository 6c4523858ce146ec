"""The estimate behind a comparison: difference, interval, p-value, by the method that the data call for.

Shapes: totals are [..., units]; leading axes are independent data sets (one in a comparison, thousands in a calibration).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from finetune.errors import UserError
from finetune.stats.binary import mcnemar_mid_p, tango_interval
from finetune.stats.bootstrap import bootstrap_p_value, bootstrap_statistics, critical_value
from finetune.stats.clusters import (
    RobustMean,
    UnitTotals,
    effective_items,
    robust_mean,
    skewness,
    unit_totals,
)
from finetune.stats.distributions import FloatArray, normal_quantile, t_quantile, t_two_sided
from finetune.stats.power import least_detectable_mean, least_detectable_paired
from finetune.stats.signflip import sign_flip_p_value

FEW_UNITS = 30  # fewer items or clusters: the p-value comes from sign flips, not from Student's t
FEW_CLUSTERS = 10  # fewer clusters: no mid-p, and a warning
SKEW_RULE = 50.0  # Student's t needs more than this many units times the squared skewness (after Cochran's rule of 25)
MOST_BOOTSTRAP_UNITS = 5_000
_EXACT_BITS = 34  # of a number whose sum over half a million items is still exact
_POWER = 0.80


@dataclass(frozen=True, slots=True)
class Estimate:
    """Difference of means with two-sided interval, one-sided bounds at the same confidence, and the chosen test.

    effective_items, discordance: what the score interval of right/wrong items was computed from; None for other scores.
    critical: the two-sided critical value used.
    """

    difference: float
    low: float
    high: float
    one_sided_low: float
    one_sided_high: float
    p_value: float
    test: str
    interval: str
    reason: str
    notes: tuple[str, ...]
    clusters: int | None
    least_detectable: float
    critical: float
    effective_items: float | None
    discordance: float | None


def estimate_binary(
    first: FloatArray, second: FloatArray, clusters: Sequence[Hashable] | None, *, confidence: float
) -> Estimate:
    """Right/wrong scores, shape [n] each."""
    n = len(first)
    fixed, broken = float(np.count_nonzero(first < second)), float(np.count_nonzero(first > second))
    discordance = (fixed + broken) / n
    if clusters is None:
        items, dof = float(n), np.inf
        p_value, test, interval = float(mcnemar_mid_p(fixed, broken)), "McNemar mid-p", "Tango score"
        reason = "scores are right or wrong on the same independent items: only the discordant items count"
        notes: tuple[str, ...] = ()
        groups = None
    else:
        totals = unit_totals(second - first, clusters)
        robust = robust_mean(totals)
        groups = robust.units
        spread = max(discordance - float(robust.mean) ** 2, 0.0)
        items = float(effective_items(spread, robust.standard_error, n, groups))
        dof = float(robust.degrees_of_freedom)
        p_value, _ = sign_flip_p_value(totals.sums, mid=groups >= FEW_CLUSTERS)
        test = "whole-cluster McNemar mid-p" if groups >= FEW_CLUSTERS else "whole-cluster exact McNemar"
        interval = "Tango score on effective items"
        reason = (
            f"scores are right or wrong and {n} items share {groups} clusters: whole clusters are exchanged"
        )
        notes = _cluster_notes(groups)
    if groups == 1:
        return _one_unit(float(second.mean() - first.mean()), test, reason, notes)
    low, high = score_bounds(fixed / n, broken / n, items, dof, 0.5 + confidence / 2)
    one_sided = score_bounds(fixed / n, broken / n, items, dof, confidence)
    critical = float(t_quantile(0.5 + confidence / 2, dof))
    stretch = (critical + float(t_quantile(_POWER, dof))) / (_z(0.5 + confidence / 2) + _z(_POWER))
    return Estimate(
        difference=(fixed - broken) / n,
        low=float(low),
        high=float(high),
        one_sided_low=float(one_sided[0]),
        one_sided_high=float(one_sided[1]),
        p_value=p_value,
        test=test,
        interval=interval,
        reason=reason,
        notes=notes,
        clusters=groups,
        least_detectable=min(
            1.0, stretch * least_detectable_paired(items, discordance, alpha=1 - confidence)
        ),
        critical=critical,
        effective_items=items,
        discordance=discordance,
    )


def score_bounds(fixed_share: Any, broken_share: Any, items: Any, dof: Any, level: float) -> tuple[Any, Any]:
    """Tango's bounds on `items` effective items, each with probability `level` on its own; shape [...]."""
    critical = t_quantile(level, dof)
    return tango_interval(
        np.asarray(fixed_share) * items, np.asarray(broken_share) * items, items, critical=critical
    )


def _differences(first: FloatArray, second: FloatArray) -> FloatArray:
    """second - first, without what is rounding: it has no spread to test against, and would pass for certainty.

    Differences below a few last digits of the scores are 0, and those that are all alike up to these digits are exactly
    alike, with so few digits that their sums are exact.
    """
    differences = second - first
    largest = max(float(np.abs(first).max()), float(np.abs(second).max()))
    rounding = 16 * float(np.finfo(np.float64).eps) * largest
    differences[np.abs(differences) <= rounding] = 0.0
    if np.ptp(differences) <= rounding:
        mantissa, exponent = np.frexp(differences[0])
        differences[:] = np.ldexp(np.round(np.ldexp(mantissa, _EXACT_BITS)), exponent - _EXACT_BITS)
    return differences


def estimate_continuous(
    first: FloatArray,
    second: FloatArray,
    clusters: Sequence[Hashable] | None,
    *,
    confidence: float,
    bounded: bool,
    seed: int,
) -> Estimate:
    """Any other scores, shape [n] each; `bounded` when they lie within [0, 1]."""
    totals = unit_totals(_differences(first, second), clusters)
    robust = robust_mean(totals)
    unit, groups = ("item", None) if clusters is None else ("cluster", robust.units)
    notes = () if groups is None else _cluster_notes(groups)
    if robust.units < 2:
        if not bounded:
            raise _one_is_too_few(unit)
        return _one_unit(float(robust.mean), "none", f"one {unit} gives no margin of error", notes)
    skew = float(skewness(totals))
    two_sided, one_sided, p_value, test, interval, reason = _student(totals, robust, confidence, unit)
    if use_bootstrap(robust.units, skew):
        statistics = bootstrap_statistics(totals, seed=seed)
        two_sided, one_sided = (
            float(critical_value(statistics, c)) for c in (confidence, 2 * confidence - 1)
        )
        if robust.standard_error > 0.0:
            p_value = float(bootstrap_p_value(statistics, robust.mean / robust.standard_error))
        test, interval = f"symmetric bootstrap-t of {unit}s (seed {seed})", "symmetric bootstrap-t"
        reason = f"scores are graded and their differences skewed ({skew:+.1f}) for {robust.units} {unit}s"
    elif robust.units < FEW_UNITS:
        p_value, how = sign_flip_p_value(totals.sums, seed=seed)
        test = f"sign-flip permutation of {unit}s ({how})"
        reason = f"scores are graded and there are fewer than {FEW_UNITS} {unit}s"
    if robust.standard_error == 0.0 and not bounded:
        notes += (
            f"every {unit} has the same difference, so the interval has no width: nothing is known of others",
        )
    low, high = _around(robust, two_sided, bounded)
    bound_low, bound_high = _around(robust, one_sided, bounded)
    return Estimate(
        difference=float(robust.mean),
        low=low,
        high=high,
        one_sided_low=bound_low,
        one_sided_high=bound_high,
        p_value=p_value,
        test=test,
        interval=interval,
        reason=reason,
        notes=notes,
        clusters=groups,
        least_detectable=_least_detectable(robust, confidence, bounded),
        critical=two_sided,
        effective_items=None,
        discordance=None,
    )


def _one_is_too_few(unit: str) -> UserError:
    return UserError(
        f"one {unit} gives no margin of error",
        why="its scores are not confined to [0, 1], so nothing limits the true difference",
        fix="compare more items" if unit == "item" else "leave the clusters out or use a finer cluster key",
    )


def use_bootstrap(units: int, skew: float) -> bool:
    """Whether the differences are too skewed for Student's t; below 30 units no resampling can learn the skew either."""
    return FEW_UNITS <= units <= MOST_BOOTSTRAP_UNITS and units < SKEW_RULE * skew**2


def student_p_value(robust: RobustMean) -> Any:
    """Two-sided p of the mean against 0; 1 when all differences are 0, 0 when they all have the same other value."""
    error = np.asarray(robust.standard_error, dtype=np.float64)
    mean = np.asarray(robust.mean, dtype=np.float64)
    statistic = np.divide(mean, error, out=np.where(mean == 0.0, 0.0, np.inf), where=error > 0.0)
    return t_two_sided(statistic, robust.degrees_of_freedom)


def _student(
    totals: UnitTotals, robust: RobustMean, confidence: float, unit: str
) -> tuple[float, float, float, str, str, str]:
    two_sided = float(t_quantile(0.5 + confidence / 2, robust.degrees_of_freedom))
    one_sided = float(t_quantile(confidence, robust.degrees_of_freedom))
    name = "paired t" if unit == "item" else "cluster-robust t"
    reason = f"scores are graded and there are {robust.units} {unit}s, enough for the normal approximation"
    return two_sided, one_sided, float(student_p_value(robust)), name, f"{name} interval", reason


def _around(robust: RobustMean, critical: float, bounded: bool) -> tuple[float, float]:
    """mean ± critical·SE, within [-1, 1] for bounded scores; without any spread the width of a score interval."""
    half = critical * float(robust.standard_error) if robust.standard_error > 0.0 else 0.0
    if half == 0.0 and bounded:
        half = critical**2 / (robust.units + critical**2)
    low, high = float(robust.mean) - half, float(robust.mean) + half
    return (max(low, -1.0), min(high, 1.0)) if bounded else (low, high)


def _least_detectable(robust: RobustMean, confidence: float, bounded: bool) -> float:
    if robust.standard_error == 0.0:
        return least_detectable_paired(robust.units, 0.0, alpha=1 - confidence) if bounded else 0.0
    size = least_detectable_mean(
        float(robust.standard_error), float(robust.degrees_of_freedom), alpha=1 - confidence, power=_POWER
    )
    return min(size, 1.0) if bounded else size


def _one_unit(difference: float, test: str, reason: str, notes: tuple[str, ...]) -> Estimate:
    """A single cluster: the difference is known, its margin is not, and the interval is all that is possible."""
    return Estimate(
        difference=difference,
        low=-1.0,
        high=1.0,
        one_sided_low=-1.0,
        one_sided_high=1.0,
        p_value=1.0,
        test=test,
        interval="none",
        reason=reason,
        notes=notes,
        clusters=1,
        least_detectable=1.0,
        critical=float("inf"),
        effective_items=None,
        discordance=None,
    )


def _cluster_notes(groups: int) -> tuple[str, ...]:
    if groups >= FEW_CLUSTERS:
        return ()
    return (
        f"only {groups} clusters: the interval is approximate below {FEW_CLUSTERS} clusters, "
        "and below 6 no test can reject at 5 %",
    )


def _z(level: float) -> float:
    return float(normal_quantile(level))
