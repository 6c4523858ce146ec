"""Means of items that come in clusters (one template, one document): standard errors that do not pretend independence.

Shapes: `units` are clusters, or single items when nothing is clustered. Arrays are [..., units]; leading axes are
independent data sets, so that a calibration computes thousands at once.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from finetune.stats.distributions import FloatArray


@dataclass(frozen=True, slots=True)
class UnitTotals:
    """What the statistics need of each unit: how many items, the sum of their values, the sum of their squares.

    Each array is [..., units] and at least broadcasts to it.
    """

    sums: FloatArray
    sizes: FloatArray
    squares: FloatArray


@dataclass(frozen=True, slots=True)
class RobustMean:
    """A mean with its cluster-robust standard error; every field is a number, or an array over the leading axes."""

    mean: Any
    standard_error: Any
    degrees_of_freedom: Any
    units: int


def cluster_codes(clusters: Sequence[Hashable]) -> npt.NDArray[np.int64]:
    """Labels of any hashable type -> 0 … G-1 in order of first appearance; shape [n]."""
    codes: dict[Hashable, int] = {}
    return np.fromiter((codes.setdefault(label, len(codes)) for label in clusters), np.int64, len(clusters))


def unit_totals(values: FloatArray, clusters: Sequence[Hashable] | None) -> UnitTotals:
    """Totals of each cluster (of each item without clusters) for `values` of shape [n].

    Units come in an order of their own, by size and sums, so that no later step, a seeded one included, can depend on
    the order of the items or on the names of the clusters.
    """
    if clusters is None:
        ordered = np.sort(values)
        return UnitTotals(ordered, np.ones(len(ordered)), ordered**2)
    codes = cluster_codes(clusters)
    order = np.lexsort((values, codes))
    sums = np.bincount(codes[order], weights=values[order]).astype(np.float64)
    squares = np.bincount(codes[order], weights=values[order] ** 2).astype(np.float64)
    sizes = np.bincount(codes).astype(np.float64)
    canonical = np.lexsort((squares, sums, sizes))
    return UnitTotals(sums[canonical], sizes[canonical], squares[canonical])


def robust_mean(totals: UnitTotals) -> RobustMean:
    """Mean over all items with the CR2 standard error and Satterthwaite degrees of freedom.

    Variance of the mean: Σ S_g² / (1 - n_g/n) / n², S_g being the unit's sum of residuals (Bell & McCaffrey 2002, Survey
    Methodology 28:169-181). The degrees of freedom are those of that quadratic form when the items of a cluster
    correlate as much as they are seen to; taking them as uncorrelated, as is usual, covers too seldom with few clusters
    of unequal size. Clusters of one size give the usual clustered standard error with t(G - 1), clusters of one item
    the ordinary standard error with t(n - 1). A single unit tells nothing about spread: the error is infinite.
    """
    sums, sizes = totals.sums, np.broadcast_to(totals.sizes, totals.sums.shape)
    n, units = sizes.sum(axis=-1), sums.shape[-1]
    mean = sums.sum(axis=-1) / n
    if units < 2:
        return RobustMean(mean[()], np.full_like(mean, np.inf)[()], np.zeros_like(mean)[()], units)
    share = sizes / n[..., None]
    weight = 1.0 / (1.0 - share)
    residual = sums - sizes * mean[..., None]
    error = np.sqrt((weight * residual**2).sum(axis=-1)) / n
    variance_of_sum = sizes * (1.0 + (sizes - 1.0) * intra_cluster_correlation(totals)[..., None])
    dof = np.minimum(_satterthwaite(share, weight, variance_of_sum), units - 1.0)
    return RobustMean(mean[()], error[()], dof[()], units)


def _satterthwaite(share: FloatArray, weight: FloatArray, variance: FloatArray) -> FloatArray:
    """tr(M)² / tr(M²) for M = W^½ Cov(S) W^½, where Cov(S)_gh = v_g·[g=h] - p_g v_h - p_h v_g + p_g p_h V.

    p: the unit's share of the items, v: variance of its sum, V: Σ v. The off-diagonal part has rank two, so its squares
    sum without forming a [units, units] matrix.
    """
    total = variance.sum(axis=-1)
    diagonal = weight * (variance * (1.0 - 2.0 * share) + share**2 * total[..., None])
    pp = (weight * share**2).sum(axis=-1)
    vv = (weight * variance**2).sum(axis=-1)
    pv = (weight * share * variance).sum(axis=-1)
    all_pairs = 2.0 * pp * vv + 2.0 * pv**2 + total**2 * pp**2 - 4.0 * total * pp * pv
    own_pairs = ((weight * share * (share * total[..., None] - 2.0 * variance)) ** 2).sum(axis=-1)
    trace_of_square = all_pairs - own_pairs + (diagonal**2).sum(axis=-1)
    return np.asarray(diagonal.sum(axis=-1) ** 2 / trace_of_square)


def design_degrees_of_freedom(sizes: FloatArray, correlation: float) -> float:
    """Degrees of freedom that `robust_mean` will find for clusters of these sizes [units] at this correlation."""
    share = sizes / sizes.sum()
    dof = _satterthwaite(share, 1.0 / (1.0 - share), sizes * (1.0 + (sizes - 1.0) * correlation))
    return min(float(dof), len(sizes) - 1.0)


def intra_cluster_correlation(totals: UnitTotals) -> FloatArray:
    """How alike the items of one cluster are, from one-way analysis of variance, within [0, 1]; shape [...].

    0 when every unit is a single item; 1 when items never differ within a cluster.
    """
    sums, sizes = totals.sums, np.broadcast_to(totals.sizes, totals.sums.shape)
    n, units = sizes.sum(axis=-1), sums.shape[-1]
    mean = sums.sum(axis=-1) / n
    between = (sizes * (sums / sizes - mean[..., None]) ** 2).sum(axis=-1) / max(units - 1, 1)
    within = np.maximum(totals.squares - sums**2 / sizes, 0.0).sum(axis=-1) / np.maximum(n - units, 1.0)
    typical_size = (n - (sizes**2).sum(axis=-1) / n) / max(units - 1, 1)
    spread = between + (typical_size - 1.0) * within
    with np.errstate(divide="ignore", invalid="ignore"):
        correlation = np.where(spread > 0.0, (between - within) / spread, 0.0)
    return np.where(n > units, np.clip(correlation, 0.0, 1.0), 0.0)


def skewness(totals: UnitTotals) -> FloatArray:
    """Moment skewness of the units' sums of residuals, 0 when they do not vary; shape [...]."""
    sums = totals.sums
    mean = sums.sum(axis=-1) / np.broadcast_to(totals.sizes, sums.shape).sum(axis=-1)
    residual = sums - totals.sizes * mean[..., None]
    second, third = (residual**2).mean(axis=-1), (residual**3).mean(axis=-1)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(second > 0.0, third / second**1.5, 0.0)


def effective_items(variance: Any, standard_error: Any, n: Any, units: int) -> Any:
    """How many independent items carry as much information on the mean as the n clustered ones; shape [...].

    variance: of a single item's value. n is divided by the design effect, the squared cluster-robust standard error over
    variance/n (Korn & Graubard 1998). Items that are all alike say nothing about the dependence within clusters: each cluster
    then counts as one item. Clusters that are all alike count in full.
    """
    variance = np.asarray(variance, dtype=np.float64)
    squared = np.asarray(standard_error, dtype=np.float64) ** 2
    estimable = (variance > 1e-15) & (squared > 1e-15)
    ratio = np.where(estimable, variance, 1.0) / np.where(estimable, squared, 1.0)
    return np.where(estimable, ratio, np.where(variance > 1e-15, n, float(units)))[()]
