"""Rates of rare events: what zero, or few, failures among n items can prove."""

from __future__ import annotations

import math

from finetune.errors import UserError


def failure_rate_upper_bound(failures: int, n: int, *, confidence: float = 0.95) -> float:
    """One-sided exact upper bound of a failure rate (Clopper & Pearson 1934): 0 of 40 proves a rate below 7.2 %."""
    from scipy.special import betaincinv

    if n < 1 or not 0 <= failures <= n:
        raise UserError(f"{failures} failures among {n} items make no rate", fix="count at least one item")
    if failures == n:
        return 1.0
    return float(betaincinv(failures + 1, n - failures, confidence))


def items_to_prove_rate(rate: float, *, confidence: float = 0.95) -> int:
    """How many items without a failure prove a failure rate below `rate`."""

    if not 0.0 < rate < 1.0:
        raise UserError(f"rate {rate} must lie between 0 and 1", fix="write 5 % as 0.05")
    return math.ceil(math.log(1.0 - confidence) / math.log1p(-rate) - 1e-9)
