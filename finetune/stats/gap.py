"""How much of the way from one arm to a better one a third arm has come, with a margin of error.

    share = (after - before) / (goal - before), each the mean over the same items

Items, or whole clusters of them, are drawn with replacement for all three arms at once, so that what makes an item hard
for every arm cancels (Efron & Tibshirani 1993, chapters 13 and 25: the ratio of two paired differences).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from finetune.errors import UserError
from finetune.stats.compare import compare
from finetune.stats.resample import Indices, resampled_interval


@dataclass(frozen=True, slots=True)
class GapShare:
    """1: `after` is where `goal` is; 0: where `before` is; above 1: beyond it; below 0: further away than before.

    `share` is None where the goal is no better than `before` on these items. `low` and `high` are None, and `reason` says
    why, where the gap itself is not shown: an interval of a share of what may be nothing means nothing. `gap` is
    goal - before, `left` is goal - after; n items.
    """

    share: float | None
    low: float | None
    high: float | None
    gap: float
    left: float
    n: int
    confidence: float
    reason: str = ""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def gap_share(
    before: Sequence[float],
    after: Sequence[float],
    goal: Sequence[float],
    *,
    clusters: Sequence[Hashable] | None = None,
    confidence: float = 0.95,
    seed: int = 0,
) -> GapShare:
    """Share of the gap between `before` and `goal` that `after` has closed, over the same items in one order.

    before, after, goal: scores of which higher is better, shape [n]. The interval is a percentile interval over 1,999
    seeded resamples; there is one only where `goal` is shown to be better than `before` at this confidence.
    """
    arms = [np.asarray(arm, dtype=np.float64) for arm in (before, after, goal)]
    if len({arm.shape for arm in arms}) > 1:
        raise UserError(
            f"{len(before)}, {len(after)} and {len(goal)} scores", fix="pair the three arms by item first"
        )
    low_arm, arm, high_arm = arms
    gap, left = float((high_arm - low_arm).mean()), float((high_arm - arm).mean())

    def share(items: Indices) -> float | None:
        whole = float((high_arm[items] - low_arm[items]).mean())
        return float((arm[items] - low_arm[items]).mean()) / whole if whole > 0.0 else None

    n = len(arm)
    if gap <= 0.0:
        reason = "the teacher is not better than the student was, so there is no gap to close"
        return GapShare(None, None, None, gap, left, n, confidence, reason)
    shown = compare(before, goal, clusters=clusters, confidence=confidence, seed=seed)
    whole = share(np.arange(n))
    if shown.verdict != "improved":
        reason = "that the teacher is better at all is not shown with these items"
        return GapShare(whole, None, None, gap, left, n, confidence, reason)
    found = resampled_interval(share, n, clusters=clusters, confidence=confidence, seed=seed)
    reason = "" if found.low is not None else "there are too few clusters to resample"
    return GapShare(whole, found.low, found.high, gap, left, n, confidence, reason)
