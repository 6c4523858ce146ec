"""Two arms on the same items: one difference, its interval, the test the data call for, and a verdict.

Which test: right/wrong scores -> McNemar's mid-p with Tango's score interval; other scores -> paired t, or a permutation
test for few items; clustered items -> whole clusters are flipped or a cluster-robust error is used.

Verdict, from the two-sided interval of mean(b) - mean(a):
  improved       the interval lies entirely above 0
  regressed      the interval lies entirely below 0
  no-evidence    neither, and its lower end is above -margin: a loss beyond the margin is excluded, a gain is not shown
                 (without a margin: whenever no difference is shown)
  inconclusive   neither, and it reaches -margin: neither a gain is shown nor a loss beyond the margin excluded
With a handful of discordant items the interval and the test may disagree about 0 (4 fixed, none broken: the interval lies
above 0, p = 0.06). The more cautious of the two decides then: a difference counts only when the test agrees.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from finetune.errors import ExitCode, UserError
from finetune.stats.distributions import FloatArray
from finetune.stats.estimate import estimate_binary, estimate_continuous
from finetune.stats.noninferiority import Outcome, noninferiority
from finetune.stats.settle import items_to_settle
from finetune.stats.validate import (
    checked_clusters,
    checked_confidence,
    checked_margin,
    checked_scores,
    checked_seed,
    is_binary,
    is_bounded,
)

Verdict = Literal["improved", "no-evidence", "regressed", "inconclusive"]
Scale = Literal["share", "score"]

EXIT_CODES: dict[str, ExitCode] = {
    "improved": ExitCode.DONE,
    "no-evidence": ExitCode.NO_EVIDENCE,
    "regressed": ExitCode.REGRESSED,
    "inconclusive": ExitCode.INCONCLUSIVE,
}


@dataclass(frozen=True, slots=True)
class Comparison:
    """Everything a gate, a page or a reader needs to know about two arms on the same items.

    difference: mean(b) - mean(a), with the ends `low` and `high` of its two-sided interval at `confidence`.
    fixed, broken, both_right, both_wrong: item counts, None unless all scores are 0 or 1.
    clusters: how many, None when the items are independent.
    scale: 'share' when all scores lie within [0, 1] and a difference can be read in percentage points, else 'score'.
    noninferiority: pass, regressed or inconclusive at the margin, None without one; `one_sided_low` is its bound.
    notes: what a reader must know before trusting the numbers, e.g. that there are too few clusters.
    least_detectable: smallest true difference that this many items would have found with 80 % power.
    items_to_settle: how many more items would settle an inconclusive verdict with 80 % power if the true difference is the
    one observed; None for the other verdicts, and when no number would.
    """

    n: int
    mean_a: float
    mean_b: float
    difference: float
    low: float
    high: float
    confidence: float
    p_value: float
    test: str
    interval: str
    reason: str
    notes: tuple[str, ...]
    fixed: int | None
    broken: int | None
    both_right: int | None
    both_wrong: int | None
    clusters: int | None
    scale: Scale
    margin: float | None
    verdict: Verdict
    noninferiority: Outcome | None
    one_sided_low: float
    least_detectable: float
    items_to_settle: int | None

    @property
    def exit_code(self) -> ExitCode:
        """What a command that reports this verdict exits with."""
        return EXIT_CODES[self.verdict]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"notes": list(self.notes), "limits": self.limits()}

    def amount(self, value: float, *, signed: bool = False) -> str:
        """A difference for people: in percentage points for shares, as it is for other scores."""
        sign = "+" if signed else ""
        return f"{value * 100:{sign}.1f} points" if self.scale == "share" else f"{value:{sign}.4g}"

    def limits(self) -> str:
        """What these items can and cannot show, in one sentence; takes the place of 'no difference'."""
        if self.least_detectable == 0.0:  # scores off the [0, 1] scale, and not a trace of spread
            return f"{self.n} items with one and the same difference do not say how small a difference they could tell"
        text = (
            f"{self.n} items cannot tell a difference below {self.amount(self.least_detectable)} (80 % power)"
        )
        if self.verdict == "inconclusive":
            text += (
                f"; about {self.items_to_settle:,} more would settle it"
                if self.items_to_settle is not None
                else "; no number of items would settle it at this margin and difference"
            )
        return text


def compare(
    a: Any,
    b: Any,
    *,
    clusters: Sequence[Hashable] | None = None,
    margin: float | None = None,
    confidence: float = 0.95,
    seed: int = 0,
) -> Comparison:
    """Compare arm `b` with arm `a`, item by item.

    a, b: scores of the same items in the same order, higher is better, shape [n] or [n, samples] (repeated samples are
    averaged per item first; the arms may have different numbers of samples).
    clusters: one label an item; items that share one are not independent (a template, a document).
    margin: greatest loss that is acceptable, in units of the score (0.02 = two points), at least 0.
    seed: used only where a p-value has to be sampled.
    Raises UserError for an empty set, NaN, lengths that differ, a negative margin or seed, or a margin above 1 for shares.
    """
    confidence, seed = checked_confidence(confidence), checked_seed(seed)
    first, second, shift = _paired_scores(a, b)
    n = len(first)
    labels = checked_clusters(clusters, n)
    binary = is_binary(first) and is_binary(second)
    bounded = is_bounded(first) and is_bounded(second)
    margin = checked_margin(margin, bounded=bounded)
    if binary:
        estimate = estimate_binary(first, second, labels, confidence=confidence)
    else:
        estimate = estimate_continuous(
            first, second, labels, confidence=confidence, bounded=bounded, seed=seed
        )
    verdict = decide(estimate.low, estimate.high, estimate.p_value <= 1.0 - confidence, margin)
    return Comparison(
        n=n,
        mean_a=_mean(first) + shift,
        mean_b=_mean(second) + shift,
        difference=estimate.difference,
        low=estimate.low,
        high=estimate.high,
        confidence=confidence,
        p_value=max(estimate.p_value, sys.float_info.min),  # evidence may underflow, it is never certainty
        test=estimate.test,
        interval=estimate.interval,
        reason=estimate.reason,
        notes=estimate.notes,
        **_cells(first, second, binary),
        clusters=estimate.clusters,
        scale="share" if bounded else "score",
        margin=margin,
        verdict=verdict,
        noninferiority=None
        if margin is None
        else noninferiority(estimate.one_sided_low, estimate.one_sided_high, margin),
        one_sided_low=estimate.one_sided_low,
        least_detectable=estimate.least_detectable,
        items_to_settle=items_to_settle(estimate, n, margin)
        if verdict == "inconclusive" and margin is not None
        else None,
    )


def _paired_scores(a: Any, b: Any) -> tuple[FloatArray, FloatArray, float]:
    """Both arms as arrays of one length, and what to add to their means: right/wrong scores that were negated (a metric
    where lower is better) are moved back from {-1, 0} to {0, 1}, so that they stay right or wrong."""
    first, second = checked_scores(a, name="scores of arm A"), checked_scores(b, name="scores of arm B")
    if len(first) != len(second):
        raise UserError(
            f"arm A has {len(first)} items and arm B {len(second)}",
            fix="pair the arms by item before comparing them",
        )
    if min(first.min(), second.min()) == -1.0 and is_binary(first + 1.0) and is_binary(second + 1.0):
        return first + 1.0, second + 1.0, -1.0
    return first, second, 0.0


def _mean(scores: FloatArray) -> float:
    return float(np.sort(scores).mean())


def decide(low: float, high: float, rejected: bool, margin: float | None) -> Verdict:
    """The verdict of an interval, given whether the test rejects 'no difference' (see the top of this file)."""
    if low > 0.0 and rejected:
        return "improved"
    if high < 0.0 and rejected:
        return "regressed"
    if margin is None or low > -margin:
        return "no-evidence"
    return "inconclusive"


def _cells(first: FloatArray, second: FloatArray, binary: bool) -> dict[str, int | None]:
    if not binary:
        return dict.fromkeys(("fixed", "broken", "both_right", "both_wrong"))
    return {
        "fixed": int(np.count_nonzero(first < second)),
        "broken": int(np.count_nonzero(first > second)),
        "both_right": int(np.count_nonzero((first == 1.0) & (second == 1.0))),
        "both_wrong": int(np.count_nonzero((first == 0.0) & (second == 0.0))),
    }
