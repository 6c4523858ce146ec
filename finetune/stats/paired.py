"""Student's t for two arms: paired on the same items, or unpaired (Welch) for what ignoring the pairing costs."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from finetune.errors import UserError
from finetune.stats.distributions import t_quantile, t_two_sided
from finetune.stats.validate import checked_confidence, checked_scores


@dataclass(frozen=True, slots=True)
class StudentT:
    """A t test of mean(b) - mean(a) with its interval."""

    difference: float
    standard_error: float
    degrees_of_freedom: float
    t: float
    p_value: float
    low: float
    high: float

    def to_dict(self) -> dict[str, float]:
        return asdict(self)


def paired_t(a: Any, b: Any, *, confidence: float = 0.95) -> StudentT:
    """Paired t test; a and b hold scores of the same items, at least two. Identical arms: difference 0, p = 1."""
    first, second = checked_scores(a, name="scores of arm A"), checked_scores(b, name="scores of arm B")
    if len(first) != len(second):
        raise UserError(f"arm A has {len(first)} items and arm B {len(second)}", fix="pair the arms by item")
    differences = np.sort(second - first)
    n = len(differences)
    _at_least_two(n)
    error = float(differences.std(ddof=1) / np.sqrt(n))
    return _student(float(differences.mean()), error, n - 1.0, confidence)


def welch_t(a: Any, b: Any, *, confidence: float = 0.95) -> StudentT:
    """Unpaired t test with unequal variances (Welch 1947); the arms may hold different items."""
    first = np.sort(checked_scores(a, name="scores of arm A"))
    second = np.sort(checked_scores(b, name="scores of arm B"))
    _at_least_two(min(len(first), len(second)))
    one, two = first.var(ddof=1) / len(first), second.var(ddof=1) / len(second)
    difference = float(second.mean() - first.mean())
    if one + two == 0.0:
        return _student(difference, 0.0, len(first) + len(second) - 2.0, confidence)
    dof = float((one + two) ** 2 / (one**2 / (len(first) - 1) + two**2 / (len(second) - 1)))
    return _student(difference, float(np.sqrt(one + two)), dof, confidence)


def _at_least_two(n: int) -> None:
    if n < 2:
        raise UserError("a t test needs at least 2 items", fix="compare more items")


def _student(difference: float, error: float, dof: float, confidence: float) -> StudentT:
    half = float(t_quantile(0.5 + checked_confidence(confidence) / 2.0, dof)) * error
    if error > 0.0:
        t = difference / error
    else:
        t = 0.0 if difference == 0.0 else float(np.copysign(np.inf, difference))
    return StudentT(
        difference, error, dof, t, float(t_two_sided(t, dof)), difference - half, difference + half
    )
