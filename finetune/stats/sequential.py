"""Looking at the results while they come in, without paying for it in false positives: an e-process on discordant items.

Under 'each discordant item is fixed or broken like a fair coin' the mixture likelihood ratio below is a nonnegative
martingale with mean 1, so by Ville's inequality it ever reaches 1/alpha with probability at most alpha, whenever and as
often as one looks. The mixture is the Beta(1/2, 1/2) of Jeffreys.

`sequential_compare` is the same bet for clustered items and for differences other than 0, which gives an interval that
holds at every look: the differences that the bets do not refute (Waudby-Smith & Ramdas 2024, 'Estimating means of bounded
random variables by betting', JRSS B 86:1-27). With independent items its e-value is that of `EProcess`.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from finetune.errors import UserError
from finetune.stats.clusters import cluster_codes
from finetune.stats.distributions import FloatArray
from finetune.stats.validate import checked_confidence, checked_scores, is_bounded

_SCANNED = 100  # differences tried on either side of the estimate; the ends are then bisected
_BISECTIONS = 30
_MOST_NODES = (
    2048  # of the mixture; exact up to twice as many clusters, a mixture of stakes all the same beyond
)


@dataclass(slots=True)
class EProcess:
    """Counts of discordant items so far; `update` after each item or batch, stop when `decision` is not None.

    alpha: bound on the probability of ever deciding when the arms are equally good.
    Items must arrive in an order that does not depend on their results, and must be independent.
    """

    alpha: float = 0.05
    fixed: int = 0
    broken: int = 0

    def __post_init__(self) -> None:
        if not 0.0 < self.alpha < 1.0:
            raise UserError(f"alpha {self.alpha} must lie between 0 and 1", fix="write 5 % as 0.05")

    def update(self, fixed: int, broken: int) -> None:
        """Add newly seen discordant items; concordant items change nothing."""
        if fixed < 0 or broken < 0:
            raise ValueError(f"counts must not be negative: fixed={fixed}, broken={broken}")
        self.fixed += fixed
        self.broken += broken

    @property
    def e_value(self) -> float:
        """Evidence against equal arms so far; at least 1/alpha is enough. 1 before any discordant item."""
        return math.exp(min(float(self.log_e_value(self.fixed, self.broken)), 700.0))

    @property
    def p_value(self) -> float:
        """A p-value that stays valid however often one looks: 1/e, at most 1."""
        return min(1.0, 1.0 / self.e_value)

    @property
    def decision(self) -> str | None:
        """'improved' or 'regressed' once the evidence is enough, else None: keep going."""
        if self.log_e_value(self.fixed, self.broken) < math.log(1.0 / self.alpha):
            return None
        return "improved" if self.fixed > self.broken else "regressed"

    @staticmethod
    def log_e_value(fixed: Any, broken: Any) -> Any:
        """log of B(fixed + 1/2, broken + 1/2) / B(1/2, 1/2) · 2^(fixed + broken), B the beta function; arrays broadcast."""
        from scipy.special import betaln

        fixed, broken = np.asarray(fixed, dtype=np.float64), np.asarray(broken, dtype=np.float64)
        return (betaln(fixed + 0.5, broken + 0.5) - betaln(0.5, 0.5) + (fixed + broken) * math.log(2.0))[()]


@dataclass(frozen=True, slots=True)
class SequentialComparison:
    """What the items seen so far show, valid however often and whenever one looks.

    difference: mean(b) - mean(a) over the items seen; low, high: its confidence sequence. e_value: evidence against equal
    arms, enough at 1/(1 - confidence). p_value: at most 1, valid at every look. units: clusters, or items without clusters.
    """

    n: int
    units: int
    mean_a: float
    mean_b: float
    difference: float
    low: float
    high: float
    confidence: float
    e_value: float
    p_value: float

    @property
    def is_decided(self) -> bool:
        """Whether 'no difference' is refuted: by the e-value, and by the interval, which is never the laxer of the two."""
        return self.e_value * (1.0 - self.confidence) >= 1.0 and not self.low <= 0.0 <= self.high

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def sequential_compare(
    a: Any,
    b: Any,
    *,
    clusters: Sequence[Hashable] | None = None,
    largest_cluster: int | None = None,
    confidence: float = 0.95,
) -> SequentialComparison:
    """Compare arm `b` with arm `a` on the items seen so far, at any look.

    a, b: scores within [0, 1] of the same items in the same order. clusters: one label an item; whole clusters must have
    come in an order that does not depend on their results. largest_cluster: items in the largest cluster there is, seen or
    not (of those seen by default): the bound of what a cluster can add must not depend on when one stops.
    Raises UserError for scores outside [0, 1], an empty set, or lengths that differ.
    """
    confidence = checked_confidence(confidence)
    first, second = checked_scores(a, name="scores of arm A"), checked_scores(b, name="scores of arm B")
    if len(first) != len(second) or not (is_bounded(first) and is_bounded(second)):
        raise UserError(
            "the arms need scores within [0, 1] of the same items",
            why="a bet on unbounded scores could lose more than was staked",
        )
    sums, sizes = _cluster_sums(second - first, clusters)
    bound = max(float(sizes.max()), float(largest_cluster or 1))
    estimate = float(sums.sum() / sizes.sum())
    log_e = float(log_betting_value(sums, sizes, 0.0, bound))
    low, high = (_end(sums, sizes, bound, estimate, side, -math.log1p(-confidence)) for side in (-1.0, 1.0))
    e_value = math.exp(min(log_e, 700.0))
    return SequentialComparison(
        n=len(first),
        units=len(sums),
        mean_a=float(first.mean()),
        mean_b=float(second.mean()),
        difference=estimate,
        low=low,
        high=high,
        confidence=confidence,
        e_value=e_value,
        p_value=min(1.0, 1.0 / e_value) if e_value > 0.0 else 1.0,
    )


def _cluster_sums(
    differences: FloatArray, clusters: Sequence[Hashable] | None
) -> tuple[FloatArray, FloatArray]:
    """Sum of the differences and number of items of each cluster, shape [units]."""
    if clusters is None:
        return differences, np.ones(len(differences))
    codes = cluster_codes(clusters)
    return np.bincount(codes, weights=differences).astype(np.float64), np.bincount(codes).astype(np.float64)


def log_betting_value(sums: FloatArray, sizes: FloatArray, difference: Any, bound: float) -> Any:
    """log of the mixture over λ of Π (1 + λ y) with y = (sum - size · difference) / bound for each cluster.

    If `difference` is the true one, every y has mean 0 and lies within [-1 - difference, 1 - difference], so each factor
    is nonnegative with mean 1 for λ from -1/(1 - difference) to 1/(1 + difference). λ is mixed over that range with
    Beta(1/2, 1/2). The product is a polynomial in λ of as many degrees as there are clusters, which Chebyshev's nodes
    integrate against this mixture without error (up to 4,095 clusters; beyond, the nodes themselves are the mixture).
    sums, sizes: shape [units]; difference: a number within (-1, 1) or an array [...] of them, and so is the answer.
    """
    pairs, counts = np.unique(np.stack([sums, sizes]), axis=1, return_counts=True)
    return _log_mixture(pairs, counts, _nodes(len(sums)), np.asarray(difference, dtype=np.float64), bound)[()]


def _nodes(units: int) -> FloatArray:
    """Chebyshev's nodes on (0, 1), enough to integrate a polynomial of degree `units` against Beta(1/2, 1/2)."""
    n_nodes = min(units // 2 + 1, _MOST_NODES)
    return np.asarray(0.5 + 0.5 * np.cos((2.0 * np.arange(1, n_nodes + 1) - 1.0) * math.pi / (2.0 * n_nodes)))


def _log_mixture(
    pairs: FloatArray, counts: Any, nodes: FloatArray, difference: FloatArray, bound: float
) -> FloatArray:
    """`log_betting_value` from the distinct (sum, size) of clusters, [2, kinds], and how often each occurs."""
    lowest, highest = -1.0 / (1.0 - difference), 1.0 / (1.0 + difference)
    stakes = lowest[..., None] + nodes * (highest - lowest)[..., None]  # [..., nodes]
    logs = np.zeros_like(stakes)
    for value, size, count in zip(*pairs, counts, strict=True):
        y = (value - size * difference) / bound
        logs += count * np.log1p(np.maximum(stakes * y[..., None], -1.0 + 1e-300))
    peak = logs.max(axis=-1)
    return np.asarray(peak + np.log(np.exp(logs - peak[..., None]).mean(axis=-1)))


def _end(
    sums: FloatArray, sizes: FloatArray, bound: float, estimate: float, side: float, enough: float
) -> float:
    """The outermost difference on one side of the estimate that is not refuted; at the estimate itself no bet can win."""
    if estimate == side:
        return side
    pairs, counts = np.unique(np.stack([sums, sizes]), axis=1, return_counts=True)
    nodes = _nodes(len(sums))

    def refuted(difference: Any) -> Any:
        return _log_mixture(pairs, counts, nodes, np.asarray(difference), bound) >= enough

    tried = estimate + (side - estimate) * np.arange(1, _SCANNED) / _SCANNED
    kept = np.flatnonzero(~refuted(tried))
    if kept.size and kept[-1] == len(tried) - 1:
        return side
    inner = float(tried[kept[-1]]) if kept.size else estimate
    outer = float(tried[kept[-1] + 1]) if kept.size else float(tried[0])
    for _ in range(_BISECTIONS):
        middle = 0.5 * (inner + outer)
        inner, outer = (inner, middle) if refuted(middle) else (middle, outer)
    return outer
