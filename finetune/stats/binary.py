"""Two arms with right/wrong answers on the same items: McNemar's tests and Tango's score interval.

Vocabulary: `fixed` items are wrong in arm A and right in arm B, `broken` items the reverse; both are *discordant*.
Concordant items carry no information on the direction of a difference and enter only through n.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from finetune.stats.distributions import fair_coin_cdf, normal_cdf, normal_quantile

_BISECTIONS = 60  # halves an interval of width 2 below 2e-18: the last bit of a double


@dataclass(frozen=True, slots=True)
class McNemar:
    """Two-sided p-values of one table of discordant items, and the chi-square statistics (1 degree of freedom).

    `exact` is the sign test on the discordant items; `mid_p` counts half of the observed table's probability and is
    the recommended one (Fagerland, Lydersen & Laake 2013, BMC Medical Research Methodology 13:91). The asymptotic
    pair is kept for comparison with other software. No discordant item: every p is 1 and every statistic 0.
    """

    fixed: int
    broken: int
    exact: float
    mid_p: float
    statistic: float
    asymptotic: float
    corrected_statistic: float
    corrected: float


def mcnemar_exact(fixed: Any, broken: Any) -> Any:
    """Two-sided exact p of McNemar's test; arrays broadcast."""
    fixed, broken = np.asarray(fixed, dtype=np.float64), np.asarray(broken, dtype=np.float64)
    return np.minimum(1.0, 2.0 * fair_coin_cdf(np.minimum(fixed, broken), fixed + broken))[()]


def mcnemar_mid_p(fixed: Any, broken: Any) -> Any:
    """Two-sided mid-p of McNemar's test: 2·P(X < k) + P(X = k) with k the smaller count; arrays broadcast."""
    fixed, broken = np.asarray(fixed, dtype=np.float64), np.asarray(broken, dtype=np.float64)
    smaller, discordant = np.minimum(fixed, broken), fixed + broken
    # P(X <= k-1) + P(X <= k) is the same sum without a cancellation
    p = fair_coin_cdf(smaller - 1.0, discordant) + fair_coin_cdf(smaller, discordant)
    # with equal counts the two tails meet: the sum is 1 up to rounding
    return np.where(fixed == broken, 1.0, np.minimum(1.0, p))[()]


def mcnemar(fixed: int, broken: int) -> McNemar:
    """All forms of McNemar's test for one table. Counts are whole and not negative."""
    if fixed < 0 or broken < 0:
        raise ValueError(f"counts must not be negative: fixed={fixed}, broken={broken}")
    discordant, gap = fixed + broken, abs(fixed - broken)
    plain = gap**2 / discordant if discordant else 0.0
    corrected = max(gap - 1, 0) ** 2 / discordant if discordant else 0.0
    return McNemar(
        fixed=fixed,
        broken=broken,
        exact=float(mcnemar_exact(fixed, broken)),
        mid_p=float(mcnemar_mid_p(fixed, broken)),
        statistic=plain,
        asymptotic=_chi_square_1_tail(plain),
        corrected_statistic=corrected,
        corrected=_chi_square_1_tail(corrected),
    )


def _chi_square_1_tail(statistic: float) -> float:
    return float(2.0 * normal_cdf(-np.sqrt(statistic)))


def score_statistic(fixed: Any, broken: Any, n: Any, difference: Any) -> Any:
    """Tango's score statistic for H0: P(fixed) - P(broken) = difference; falls as `difference` rises.

    The variance uses the share of broken items that is most likely under H0, the larger root of a quadratic
    (Tango 1998, Statistics in Medicine 17:891-908). Counts may be fractional (effective counts of clustered data).
    """
    fixed, broken, n, delta = np.broadcast_arrays(
        *(np.asarray(value, dtype=np.float64) for value in (fixed, broken, n, difference))
    )
    quadratic = 2.0 * n
    linear = (2.0 * n - fixed + broken) * delta - fixed - broken
    constant = -broken * delta * (1.0 - delta)
    root = np.sqrt(np.maximum(linear**2 - 4.0 * quadratic * constant, 0.0))
    share_broken = (root - linear) / (2.0 * quadratic)
    variance = n * np.maximum(2.0 * share_broken + delta * (1.0 - delta), 0.0)
    numerator = fixed - broken - n * delta
    with np.errstate(divide="ignore", invalid="ignore"):
        statistic = numerator / np.sqrt(variance)
    return np.where(numerator == 0.0, 0.0, statistic)[()]


def tango_interval(
    fixed: Any, broken: Any, n: Any, *, confidence: float = 0.95, critical: Any | None = None
) -> tuple[Any, Any]:
    """Score interval for the paired difference P(fixed) - P(broken), within [-1, 1]; arrays broadcast.

    `n` counts all items, concordant ones too. `critical` replaces the normal quantile (a t quantile for clustered
    data). Keeps its coverage where the usual Wald interval collapses: with no discordant item the interval is
    +-z²/(n + z²), not a point.
    """
    z = normal_quantile(0.5 + confidence / 2.0) if critical is None else critical
    fixed, broken, n, z = np.broadcast_arrays(
        *(np.asarray(value, dtype=np.float64) for value in (fixed, broken, n, z))
    )
    estimate = (fixed - broken) / n
    ends = []
    for limit, outer in ((z, -1.0), (-z, 1.0)):
        inside, outside = estimate.copy(), np.full_like(estimate, outer)
        for _ in range(_BISECTIONS):
            middle = 0.5 * (inside + outside)
            accepted = np.abs(score_statistic(fixed, broken, n, middle)) < np.abs(limit)
            inside = np.where(accepted, middle, inside)
            outside = np.where(accepted, outside, middle)
        ends.append(inside)
    return ends[0][()], ends[1][()]
