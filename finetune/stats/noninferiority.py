"""Is B at most `margin` worse than A? The question of a regression gate, which is not 'is there a difference?'."""

from __future__ import annotations

from typing import Literal

Outcome = Literal["pass", "regressed", "inconclusive"]


def noninferiority(one_sided_low: float, one_sided_high: float, margin: float) -> Outcome:
    """Three outcomes from the one-sided bounds of mean(b) - mean(a), each at the declared confidence.

    pass           the lower bound is above -margin: a loss of `margin` or more is excluded
    regressed      it is not, and the upper bound is below 0: a loss is shown
    inconclusive   neither: too few items to tell
    """
    if one_sided_low > -margin:
        return "pass"
    return "regressed" if one_sided_high < 0.0 else "inconclusive"
