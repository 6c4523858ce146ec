"""How many more items would settle an inconclusive comparison."""

from __future__ import annotations

import math

from finetune.stats.distributions import normal_quantile
from finetune.stats.estimate import Estimate

_MOST_ITEMS = 100_000_000


def items_to_settle(estimate: Estimate, n: int, margin: float, *, power: float = 0.80) -> int | None:
    """More items, beyond the n at hand, until the interval would leave 0 or clear -margin with the wished power.

    Assumes that the true difference is the observed one and that new items (and clusters) are like the old ones, so the
    half-width shrinks with the square root of n. None when the difference sits on -margin or on 0 without a margin.
    """
    difference = estimate.difference
    distance = max(abs(difference), difference + margin)
    if distance <= 0.0:
        return None
    half = 0.5 * (estimate.high - estimate.low)
    z = float(normal_quantile(0.5 + 0.475))
    wanted = distance * z / (z + float(normal_quantile(power)))
    needed = n * (half / wanted) ** 2
    return max(1, math.ceil(needed - n)) if needed < _MOST_ITEMS else None
