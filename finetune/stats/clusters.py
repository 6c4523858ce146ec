"""Means of items that come in clusters (one template, one document): standard errors that do not pretend independence."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from finetune.stats.distributions import FloatArray


@dataclass(frozen=True, slots=True)
class RobustMean:
    """A mean with its cluster-robust standard error. `degrees_of_freedom` is at most clusters - 1."""

    mean: float
    standard_error: float
    degrees_of_freedom: float
    clusters: int


def cluster_codes(clusters: Sequence[Hashable]) -> npt.NDArray[np.int64]:
    """Labels of any hashable type -> 0 … G-1 in order of first appearance; shape [n]."""
    codes: dict[Hashable, int] = {}
    return np.fromiter((codes.setdefault(label, len(codes)) for label in clusters), np.int64, len(clusters))


def cluster_sums(values: FloatArray, codes: npt.NDArray[np.int64]) -> tuple[FloatArray, FloatArray]:
    """(sum, size) of each cluster, sorted by size then sum: the answer cannot depend on the order of items or labels.

    `values` and `codes` have shape [n]; the answers have shape [G].
    """
    order = np.lexsort((values, codes))
    sums = np.bincount(codes[order], weights=values[order]).astype(np.float64)
    sizes = np.bincount(codes).astype(np.float64)
    by_size = np.lexsort((sums, sizes))
    return sums[by_size], sizes[by_size]


def robust_mean(sums: FloatArray, sizes: FloatArray) -> RobustMean:
    """Cluster-robust mean from cluster sums and sizes, shape [G] each (a cluster may be one item).

    CR2 variance of the mean: Σ S_g² / (1 - n_g/n) / n² with S_g the cluster's sum of residuals, and Satterthwaite's
    degrees of freedom for it (Bell & McCaffrey 2002, Survey Methodology 28:169-181). With clusters of equal size that is
    the usual clustered standard error with t(G - 1), and with clusters of one item the ordinary standard error.
    One cluster tells nothing about spread: standard error infinite, 0 degrees of freedom.
    """
    n, groups = float(sizes.sum()), len(sizes)
    mean = float(sums.sum()) / n
    if groups < 2:
        return RobustMean(mean, float("inf"), 0.0, groups)
    weight = 1.0 / (1.0 - sizes / n)
    residual = sums - sizes * mean
    variance = float((weight * residual**2).sum()) / n**2
    cross = weight * sizes**2 / n
    spread = float((sizes**2).sum() + cross.sum() ** 2 - (cross**2).sum())
    return RobustMean(mean, float(np.sqrt(variance)), min(groups - 1.0, n**2 / spread), groups)
