"""The divergences in plain Python floats, as their definitions are written: what `losses.py` is measured against."""

from __future__ import annotations

import math
from collections.abc import Sequence

from finetune.distil.losses import KINDS


def reference_divergence(
    kind: str,
    teacher_logits: Sequence[Sequence[float]],
    student_logits: Sequence[Sequence[float]],
    temperature: float,
    ids: Sequence[Sequence[int]] | None = None,
    beta: float | None = None,
) -> list[float]:
    """T² times the divergence of every target in nats, from finite logits [n][V]. With `ids` [n][k], all other tokens are
    one outcome."""
    weight = KINDS[kind][1] if beta is None else beta
    found = []
    for row, (teacher, student) in enumerate(zip(teacher_logits, student_logits, strict=True)):
        kept = None if ids is None else ids[row]
        p, q = (_outcomes(logits, temperature, kept) for logits in (teacher, student))
        found.append(temperature**2 * _value(kind, p, q, weight))
    return found


def _outcomes(logits: Sequence[float], temperature: float, ids: Sequence[int] | None) -> list[float]:
    largest = max(logits)
    masses = [math.exp((logit - largest) / temperature) for logit in logits]
    total = math.fsum(masses)
    if ids is None:
        return [mass / total for mass in masses]
    others = math.fsum(mass for token, mass in enumerate(masses) if token not in set(ids))
    tail = [others / total] if len(ids) < len(masses) else []
    return [masses[token] / total for token in ids] + tail


def _value(kind: str, p: Sequence[float], q: Sequence[float], weight: float | None) -> float:
    if kind == "forward_kl":
        return _kl(p, q)
    if kind == "reverse_kl":
        return _kl(q, p)
    if kind == "total_variation":
        return 0.5 * math.fsum(abs(a - b) for a, b in zip(p, q, strict=True))
    assert weight is not None
    if kind == "skew_forward_kl":
        return _kl(p, _mixture(p, q, weight))
    if kind == "skew_reverse_kl":
        return _kl(q, _mixture(q, p, weight))
    assert kind == "jsd", kind
    between = _mixture(p, q, weight)
    return weight * _kl(p, between) + (1.0 - weight) * _kl(q, between)


def _kl(p: Sequence[float], q: Sequence[float]) -> float:
    return math.fsum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a > 0.0)


def _mixture(p: Sequence[float], q: Sequence[float], weight: float) -> list[float]:
    return [weight * a + (1.0 - weight) * b for a, b in zip(p, q, strict=True)]
