"""How many more items would settle an inconclusive comparison."""

from __future__ import annotations

import math

from finetune.stats.binary import tango_interval
from finetune.stats.distributions import normal_quantile
from finetune.stats.estimate import Estimate

_MOST_ITEMS = 100_000_000


def items_to_settle(estimate: Estimate, n: int, margin: float, *, power: float = 0.80) -> int | None:
    """More items, beyond the n at hand, until the interval leaves 0 or clears -margin with the wished power.

    Assumes that the true difference is the observed one and that new items (and clusters) are like the old ones. Power is
    bought by asking the interval at critical value t + z(power) to be decisive. None when no number of items would do:
    a difference of exactly -margin, 0 without a margin, or a single cluster.
    """
    if not math.isfinite(estimate.critical):
        return None
    strict = estimate.critical + float(normal_quantile(power))
    low_factor, high_factor = 1.0, _MOST_ITEMS / n
    if not _decisive(estimate, margin, strict, high_factor):
        return None
    for _ in range(60):
        middle = math.sqrt(low_factor * high_factor)
        if _decisive(estimate, margin, strict, middle):
            high_factor = middle
        else:
            low_factor = middle
    return max(1, math.ceil(n * high_factor - n))


def _decisive(estimate: Estimate, margin: float, critical: float, factor: float) -> bool:
    """Would `factor` times as many items leave no doubt?"""
    if estimate.effective_items is not None and estimate.discordance is not None:
        items = estimate.effective_items * factor
        fixed = 0.5 * (estimate.discordance + estimate.difference) * items
        broken = 0.5 * (estimate.discordance - estimate.difference) * items
        low, high = tango_interval(fixed, broken, items, critical=critical)
    else:
        half = 0.5 * (estimate.high - estimate.low) * critical / estimate.critical / math.sqrt(factor)
        low, high = estimate.difference - half, estimate.difference + half
    return bool(low > 0.0 or high < 0.0 or low > -margin)
