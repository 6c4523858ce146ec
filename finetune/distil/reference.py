"""The divergences in plain Python floats, as their definitions are written: what `losses.py` is measured against."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

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


def reference_aligned(
    kind: str,
    teacher_logits: Sequence[Sequence[float]],
    student_logits: Sequence[Sequence[float]],
    groups: Sequence[Sequence[int]],
    teacher_ids: Sequence[int],
    student_ids: Sequence[int],
    shared: Mapping[int, int],
    temperature: float,
    kept: Sequence[Sequence[int]] | None = None,
) -> list[float]:
    """T² times the divergence of every group of targets with different tokenizers (aligned/outcomes.py), from logits of all
    tokens at every target. groups: (student first, last, teacher first, last); shared: teacher's id -> student's id; kept:
    the ids that are known of the teacher at each of its targets (none: all)."""
    found = []
    for a, b, c, d in groups:
        q_at = [_outcomes(student_logits[place], temperature, None) for place in range(a, b)]
        p_at = [_outcomes(teacher_logits[place], temperature, None) for place in range(c, d)]
        known = [set(range(len(p_at[0]))) if kept is None else set(kept[place]) for place in range(c, d)]
        if kind == "uld":
            found.append(temperature**2 * _sorted_distance(p_at[0], q_at[0], known[0]))
            continue
        q_text = math.prod(q[student_ids[a + place]] for place, q in enumerate(q_at))
        p_text = math.prod(p[teacher_ids[c + place]] for place, p in enumerate(p_at))
        is_known = all(teacher_ids[c + place] in ids for place, ids in enumerate(known))
        named = [
            (their, our)
            for their, our in shared.items()
            if their in known[0] and their != teacher_ids[c] and our != student_ids[a]
        ]
        p = [p_at[0][their] for their, _ in named] + ([p_text] if is_known else [])
        q = [q_at[0][our] for _, our in named] + ([q_text] if is_known else [])
        p_rest, q_rest = max(1.0 - math.fsum(p), 0.0), max(1.0 - math.fsum(q), 0.0)
        if p_rest > 1e-14 and q_rest > 1e-14:
            p, q = [*p, p_rest], [*q, q_rest]
        sums = math.fsum(p), math.fsum(q)
        p, q = [one / sums[0] for one in p], [one / sums[1] for one in q]
        found.append(temperature**2 * _value(kind, p, q, KINDS[kind][1]))
    return found


def _sorted_distance(p: Sequence[float], q: Sequence[float], known: set[int]) -> float:
    ours = sorted(q, reverse=True)
    theirs = sorted((p[token] for token in known), reverse=True)
    if len(known) < len(p):
        theirs.append(math.fsum(one for token, one in enumerate(p) if token not in known))
        ours = [*ours[: len(known)], math.fsum(ours[len(known) :])]
    width = max(len(ours), len(theirs))
    padded = ([*one, *[0.0] * (width - len(one))] for one in (theirs, ours))
    return math.fsum(abs(a - b) for a, b in zip(*padded, strict=True))
