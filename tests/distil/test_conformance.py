"""The conformance checks hold, and each catches the mistake that it is for."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from finetune.distil import conformance, losses
from finetune.distil.targets import TeacherTargets


@pytest.mark.parametrize("name", conformance.CHECKS)
def test_holds(name: str) -> None:
    value, limit, detail = conformance.CHECKS[name]()
    assert value <= limit, detail


def is_broken(check: str) -> bool:
    try:
        value, limit, _ = conformance.CHECKS[check]()
    except ValueError:
        return True
    return not value <= limit


def without_square(
    kind: str, student: Any, teacher: Any, *, temperature: float = 1.0, beta: Any = None
) -> Any:
    """T² multiplies what is told and not the gradient."""
    value = losses.divergence(kind, student, teacher, temperature=temperature, beta=beta)
    plain = value / temperature**2
    return plain + (value - plain).detach()


def untempered(kind: str, student: Any, teacher: Any, *, temperature: float = 1.0, beta: Any = None) -> Any:
    if teacher.is_top_k:
        return losses.divergence(kind, student, teacher, temperature=temperature, beta=beta)
    return losses.divergence(kind, student, teacher, beta=beta)


def renormalised(kind: str, student: Any, teacher: Any, *, temperature: float = 1.0, beta: Any = None) -> Any:
    """The k tokens normalised to 1 on both sides: k = 1 has no loss at all."""
    if not teacher.is_top_k:
        return losses.divergence(kind, student, teacher, temperature=temperature, beta=beta)
    top = student.gather(1, teacher.ids)
    return losses.divergence(
        kind, top, TeacherTargets.full(teacher.logits), temperature=temperature, beta=beta
    )


def truncated(kind: str, student: Any, teacher: Any, *, temperature: float = 1.0, beta: Any = None) -> Any:
    """The tail left out: it can be negative, and above the full divergence."""
    if not teacher.is_top_k or kind != "reverse_kl":
        return losses.divergence(kind, student, teacher, temperature=temperature, beta=beta)
    log_p, log_q = losses.bucket_log_probabilities(student, teacher, temperature)
    k = teacher.ids.shape[1]
    return losses.reverse_kl(log_p[:, :k], log_q[:, :k]) * temperature**2


def zero_filled(kind: str, student: Any, teacher: Any, **options: Any) -> Any:
    """Columns that the student does not have, filled with 0: tokens as likely as any."""
    return losses.divergence(kind, student.masked_fill(student == -math.inf, 0.0), teacher, **options)


def in_bf16(kind: str, student: Any, teacher: Any, **options: Any) -> Any:
    log_q, log_p = (torch.log_softmax(one.bfloat16(), dim=1) for one in (student, teacher.logits))
    return (log_p.exp() * (log_p - log_q)).sum(dim=1)


def over_the_vocabulary(kind: str, student: Any, teacher: Any, **options: Any) -> Any:
    """A mean that also divides by the vocabulary."""
    return losses.divergence(kind, student, teacher, **options) / student.shape[1]


def swapped_at_the_ends(kind: str, student: Any, teacher: Any, *, beta: Any = None, **options: Any) -> Any:
    """Near β = 0 and 1 another loss in place of the one that goes to 0."""
    if kind == "jsd" and beta is not None and not 0.01 < beta < 0.99:
        return losses.divergence("forward_kl" if beta < 0.5 else "reverse_kl", student, teacher, **options)
    return losses.divergence(kind, student, teacher, beta=beta, **options)


@pytest.mark.parametrize(
    ("mistake", "check"),
    [
        (without_square, "T² in the gradient"),
        (untempered, "given numbers"),
        (renormalised, "k = 1"),
        (renormalised, "given numbers"),
        (truncated, "tail bucket"),
        (zero_filled, "-inf filler"),
        (in_bf16, "bf16 logits"),
        (over_the_vocabulary, "given numbers"),
        (swapped_at_the_ends, "β"),
    ],
)
def test_catches(mistake: Callable[..., Any], check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conformance, "divergence", mistake)
    assert is_broken(check)


def test_catches_a_mask_that_is_not_shifted(monkeypatch: pytest.MonkeyPatch) -> None:
    def unshifted(labels: Any) -> Any:
        return labels != -100, labels[labels != -100]

    monkeypatch.setattr(conformance, "target_places", unshifted)
    assert is_broken("mask")


def test_catches_a_temperature_rebuilt_from_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the normaliser of T = 1 kept: at T = 2 its tail, one token of that mass, is not the truth."""
    keep = conformance.keep_top_k

    def only_one(logits: Any, coding: Any) -> Any:
        top = keep(logits, coding)
        tail = 1.0 - conformance.covered_mass(top, coding, 1.0)
        as_token = torch.log(tail) + top.logsumexp[:, 0].double()
        rebuilt = torch.logsumexp(torch.cat([top.gaps.double(), as_token[:, None]], dim=1) / 2.0, dim=1)
        return type(top)(top.ids, top.gaps, torch.stack([top.logsumexp[:, 0], rebuilt.float()], dim=1))

    monkeypatch.setattr(conformance, "keep_top_k", only_one)
    assert is_broken("planned temperatures")


def test_catches_a_temperature_that_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    def ignoring(*args: Any, temperature: float = 1.0, **options: Any) -> Any:
        return losses.chunked_distillation_loss(*args, **options)

    monkeypatch.setattr(conformance, "chunked_distillation_loss", ignoring)
    assert is_broken("temperature") and is_broken("sums")
