"""Before the run: what n items can tell, and how many items a wished effect needs. Paired and unpaired side by side.

Shares and effects are fractions (0.02 is two points). `discordance` is the share of items on which the arms differ,
P(fixed) + P(broken), as a pilot shows it; the paired design gains exactly because most items are concordant.
Formulas are the usual normal approximations, so that published tables are reproduced; `power_paired` is exact.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from finetune.errors import UserError
from finetune.stats.clusters import design_degrees_of_freedom
from finetune.stats.distributions import normal_cdf, normal_quantile, t_quantile

_EXACT_ITEMS = (
    20_000  # up to here the exact power is summed, above it the normal approximation is exact enough
)


@dataclass(frozen=True, slots=True)
class ClusterDesign:
    """What clusters do to a plan: the variance times `design_effect`, and Student's t with `degrees_of_freedom`."""

    design_effect: float
    degrees_of_freedom: float
    clusters: int


def cluster_design(sizes: Sequence[int], intra_cluster_correlation: float) -> ClusterDesign:
    """Plan for clusters of these sizes whose items correlate like this in the difference of the arms (0 to 1).

    Design effect 1 + (Σ n_g² / n - 1)·ICC: unequal sizes cost more than equal ones (Kish 1965).
    """
    _check_share("intra-cluster correlation", intra_cluster_correlation)
    if len(sizes) < 2 or min(sizes) < 1:
        raise UserError("a plan needs at least 2 clusters of at least 1 item")
    items = np.asarray(sizes, dtype=np.float64)
    typical = float((items**2).sum() / items.sum())
    return ClusterDesign(
        design_effect=1.0 + (typical - 1.0) * intra_cluster_correlation,
        degrees_of_freedom=design_degrees_of_freedom(items, intra_cluster_correlation),
        clusters=len(sizes),
    )


def _z_pair(alpha: float, power: float, *, two_sided: bool = True) -> tuple[float, float]:
    if not 0.0 < alpha < 1.0 or not 0.0 < power < 1.0:
        raise UserError(f"alpha {alpha} and power {power} must lie between 0 and 1", fix="write 5 % as 0.05")
    z_alpha = float(normal_quantile(1.0 - alpha / (2.0 if two_sided else 1.0)))
    if not math.isfinite(z_alpha):
        raise UserError(f"alpha {alpha} is too small to compute with", fix="write 5 % as 0.05")
    return z_alpha, float(normal_quantile(power))


def _check_share(name: str, value: float) -> None:
    if not 0.0 <= value <= 1.0:
        raise UserError(f"{name} {value} must lie between 0 and 1", fix="write two points as 0.02")


def _whole(n: float) -> int:
    return math.ceil(n - 1e-9)


def items_needed_paired(
    effect: float, discordance: float, *, alpha: float = 0.05, power: float = 0.80, design_effect: float = 1.0
) -> int:
    """Items for a two-sided McNemar test to find `effect` (Connor 1987, Biometrics 43:207-211).

    n = (z_a √D + z_b √(D - d²))² / d². Raises UserError when the effect is 0 or greater than the discordance.
    """
    _check_share("discordance", discordance)
    size = abs(effect)
    if size == 0.0:
        raise UserError(
            "no number of items finds an effect of 0", fix="give the smallest effect that would matter"
        )
    if size > discordance:
        raise UserError(
            f"an effect of {size:g} needs at least that share of discordant items, {discordance:g} was given",
            fix="raise the discordance: every point gained is a discordant item",
        )
    z_alpha, z_beta = _z_pair(alpha, power)
    root = z_alpha * math.sqrt(discordance) + z_beta * math.sqrt(discordance - size**2)
    return _whole(design_effect * root**2 / size**2)


def items_needed_unpaired(
    share_a: float, share_b: float, *, alpha: float = 0.05, power: float = 0.80, pooled: bool = True
) -> int:
    """Items in each arm when the arms answer different items: two-proportion z test, pooled variance under H0 or not."""
    _check_share("share_a", share_a)
    _check_share("share_b", share_b)
    if share_a == share_b:
        raise UserError(
            "no number of items finds an effect of 0", fix="give the smallest effect that would matter"
        )
    z_alpha, z_beta = _z_pair(alpha, power)
    own = share_a * (1 - share_a) + share_b * (1 - share_b)
    middle = (share_a + share_b) / 2
    null = 2 * middle * (1 - middle) if pooled else own
    return _whole((z_alpha * math.sqrt(null) + z_beta * math.sqrt(own)) ** 2 / (share_a - share_b) ** 2)


def least_detectable_paired(
    n: float, discordance: float, *, alpha: float = 0.05, power: float = 0.80, design_effect: float = 1.0
) -> float:
    """Smallest effect that n items find with the wished power at this discordance.

    An effect beyond the discordance makes its own discordant items, so the answer exists for a pilot without any;
    1.0 when even that cannot be found.
    """
    _check_share("discordance", discordance)

    def enough(effect: float) -> bool:
        share = max(discordance, effect)
        return items_needed_paired(effect, share, alpha=alpha, power=power, design_effect=design_effect) <= n

    return _smallest(enough)


def least_detectable_unpaired(n: float, share: float, *, alpha: float = 0.05, power: float = 0.80) -> float:
    """Smallest gain over `share` that n items in each arm find with the wished power (unpooled); at most 1 - share."""
    _check_share("share", share)
    room = 1.0 - share
    return (
        room
        * _smallest(
            lambda part: (
                items_needed_unpaired(share, share + part * room, alpha=alpha, power=power, pooled=False) <= n
            )
        )
        if room
        else 1.0
    )


def least_detectable_mean(
    standard_error: float, degrees_of_freedom: float, *, alpha: float = 0.05, power: float = 0.80
) -> float:
    """Smallest mean difference found with the wished power at this standard error: (t_a + t_b)·SE."""
    _z_pair(alpha, power)
    dof = max(degrees_of_freedom, 1.0)
    return float((t_quantile(1 - alpha / 2, dof) + t_quantile(power, dof)) * standard_error)


def items_needed_noninferiority(
    margin: float,
    discordance: float,
    *,
    true_difference: float = 0.0,
    alpha: float = 0.05,
    power: float = 0.80,
    design_effect: float = 1.0,
) -> int:
    """Items for a one-sided test to exclude a loss of `margin` when the true difference is `true_difference`."""
    _check_share("discordance", discordance)
    room = true_difference + margin
    if margin <= 0.0 or room <= 0.0:
        raise UserError(
            f"a margin of {margin:g} cannot be shown when the true difference is {true_difference:g}",
            fix="give a positive margin, greater than the true loss",
        )
    z_alpha, z_beta = _z_pair(alpha, power, two_sided=False)
    return _whole(design_effect * (z_alpha + z_beta) ** 2 * (discordance - true_difference**2) / room**2)


def items_needed_mean(
    effect: float,
    question_variance: float,
    *,
    sampling_variance_a: float = 0.0,
    sampling_variance_b: float = 0.0,
    samples: int = 1,
    alpha: float = 0.05,
    power: float = 0.80,
    design_effect: float = 1.0,
) -> int:
    """Items for a paired difference of means: n = (z_a + z_b)²(ω² + σ_A²/K + σ_B²/K)/δ² (Miller 2024, arXiv 2411.00640).

    question_variance: ω², the variance over items of the difference of the arms' expected scores.
    sampling_variance_*: mean variance of one arm's score when the same item is sampled again; samples: K per item.
    """
    if effect == 0.0:
        raise UserError(
            "no number of items finds an effect of 0", fix="give the smallest effect that would matter"
        )
    if samples < 1 or min(question_variance, sampling_variance_a, sampling_variance_b) < 0.0:
        raise UserError("variances must not be negative and samples must be at least 1")
    z_alpha, z_beta = _z_pair(alpha, power)
    variance = question_variance + (sampling_variance_a + sampling_variance_b) / samples
    return _whole(design_effect * (z_alpha + z_beta) ** 2 * variance / effect**2)


def power_paired(
    n: int,
    effect: float,
    discordance: float,
    *,
    alpha: float = 0.05,
    design: ClusterDesign | None = None,
) -> float:
    """Probability that `compare` finds a difference of `effect` on n right/wrong items.

    Independent items: that McNemar's mid-p falls to alpha or below, exact up to 20,000 items. Clustered items: the noncentral
    t of the design, against a limit that the score interval moves out by √(D / (D - d²)).
    """
    _check_share("discordance", discordance)
    if abs(effect) > discordance:
        raise UserError(
            f"an effect of {effect:g} needs at least that share of discordant items, {discordance:g} was given"
        )
    if discordance == 0.0:
        return 0.0
    if design is not None:
        variance = max(discordance - effect**2, 1e-300)
        return _power_t(
            n, effect, math.sqrt(variance), alpha, design, limit=math.sqrt(discordance / variance)
        )
    if n > _EXACT_ITEMS:
        z_alpha, _ = _z_pair(alpha, 0.5)
        spread = math.sqrt(max(discordance - effect**2, 1e-300))
        shift, edge = effect * math.sqrt(n) / spread, z_alpha * math.sqrt(discordance) / spread
        return float(normal_cdf(shift - edge) + normal_cdf(-shift - edge))
    return _exact_power(n, effect, discordance, alpha)


def _exact_power(n: int, effect: float, discordance: float, alpha: float) -> float:
    """Σ over the number of discordant items m of P(m) · P(reject | m)."""
    from scipy.special import bdtr

    from finetune.stats.binary import mcnemar_mid_p

    centre, spread = n * discordance, math.sqrt(n * discordance * (1 - discordance))
    first, last = max(0, int(centre - 9 * spread) - 1), min(n, int(centre + 9 * spread) + 1)
    discordant = np.arange(first, last + 1)
    weight = np.diff(bdtr(np.arange(first - 1, last + 1).clip(min=0), n, discordance), prepend=0.0)[1:]
    if first == 0:
        weight[0] = bdtr(0, n, discordance)
    edge = _largest_rejecting(discordant, alpha, mcnemar_mid_p)
    up = (discordance + effect) / (2 * discordance)
    low = np.where(edge >= 0, bdtr(edge.clip(min=0), discordant, 1 - up), 0.0)
    high = np.where(edge >= 0, bdtr(edge.clip(min=0), discordant, up), 0.0)
    return float((weight * (low + high)).sum())


def _largest_rejecting(discordant: np.ndarray, alpha: float, p_value: Any) -> np.ndarray:
    """For each number of discordant items the largest smaller count that is still significant, -1 for none."""
    low, high = np.full(len(discordant), -1), discordant // 2
    while np.any(high - low > 1):
        middle = (low + high) // 2
        rejects = (middle >= 0) & (p_value(discordant - middle, middle) <= alpha)
        low, high = np.where(rejects, middle, low), np.where(rejects, high, middle)
    return low


def power_unpaired(n: int, share_a: float, share_b: float, *, alpha: float = 0.05) -> float:
    """Power of the two-proportion z test (pooled under H0) with n items in each arm; normal approximation."""
    z_alpha, _ = _z_pair(alpha, 0.5)
    own = math.sqrt(share_a * (1 - share_a) + share_b * (1 - share_b)) or 1e-150
    middle = (share_a + share_b) / 2
    null = math.sqrt(2 * middle * (1 - middle))
    shift, edge = (share_b - share_a) * math.sqrt(n) / own, z_alpha * null / own
    return float(normal_cdf(shift - edge) + normal_cdf(-shift - edge))


def power_mean(
    n: int,
    effect: float,
    standard_deviation: float,
    *,
    alpha: float = 0.05,
    design: ClusterDesign | None = None,
) -> float:
    """Power of the two-sided t test for paired differences with this standard deviation (noncentral t)."""
    if n < 2 or standard_deviation <= 0.0:
        raise UserError("a t test needs at least 2 items and a positive standard deviation")
    return _power_t(n, effect, standard_deviation, alpha, design)


def _power_t(
    n: int, effect: float, deviation: float, alpha: float, design: ClusterDesign | None, *, limit: float = 1.0
) -> float:
    """P(|T| > limit·t) for a noncentral T; `limit` = 1 for the t test itself."""
    from scipy.special import nctdtr

    dof, inflation = (n - 1.0, 1.0) if design is None else (design.degrees_of_freedom, design.design_effect)
    if dof < 1.0:
        return 0.0
    edge = limit * float(t_quantile(1 - alpha / 2, dof))
    shift = abs(effect) * math.sqrt(n / inflation) / deviation
    if shift > 30.0:
        return 1.0
    return float(1.0 - nctdtr(dof, shift, edge) + nctdtr(dof, shift, -edge))


def _smallest(enough: Any) -> float:
    """Bisection for the smallest share in (0, 1] that is enough; 1.0 when none is."""
    if not enough(1.0):
        return 1.0
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = 0.5 * (low + high)
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high
