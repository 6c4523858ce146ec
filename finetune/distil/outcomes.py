"""Teacher and student as distributions over the same outcomes: all tokens, or the teacher's top k and one for all others.

Shapes: n target tokens · V vocabulary · k kept tokens · m outcomes, V or k + 1.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from finetune.distil.targets import TeacherTargets


def bucket_log_probabilities(
    student_logits: Tensor, teacher: TeacherTargets, temperature: float
) -> tuple[Tensor, Tensor]:
    """Log-probabilities [n, m] of teacher and student over the same outcomes: V tokens, or k tokens and all others.

    With k = V there are no others, and the teacher's k logits are normalised by themselves.
    """
    student = wide(student_logits)
    if teacher.logits is None:
        teacher = teacher.part(0, len(teacher))
    assert teacher.logits is not None
    known = teacher.logits.to(student.dtype) / temperature
    if teacher.ids is None:
        if known.shape != student.shape:
            raise ValueError(f"teacher logits {tuple(known.shape)}, student logits {tuple(student.shape)}")
        scaled = student / temperature if temperature != 1.0 else student
        return torch.log_softmax(known, dim=-1), torch.log_softmax(scaled, dim=-1)
    if teacher.ids.shape[1] == student.shape[1]:
        top = student.gather(1, teacher.ids) / temperature
        return torch.log_softmax(known, dim=-1), torch.log_softmax(top, dim=-1)
    assert teacher.logsumexp is not None
    log_p = known - teacher.logsumexp.to(known.dtype)[:, None]
    outcomes = _TopAndTail.apply(student, teacher.ids, temperature)  # type: ignore[no-untyped-call]
    # Bounded, for rows whose tail is ruled out altogether (-inf).
    bound = math.log(torch.finfo(student.dtype).tiny)
    log_q = torch.log_softmax(outcomes, dim=-1)
    log_q = torch.cat([log_q[:, :-1], log_q[:, -1:].clamp(min=bound)], dim=1)
    return _with_teacher_tail(log_p, torch.finfo(teacher.logsumexp.dtype).eps), log_q


def _with_teacher_tail(log_p: Tensor, least: float) -> Tensor:
    """Log-probabilities [n, k] of the teacher's top k, and behind them the log of the mass that they leave.

    Rounded logits can add up to a little more than 1; they are scaled down to it then. A tail below `least`, the rounding
    of the normaliser, is taken as that: a tail of nothing would make the reverse KL infinite.
    """
    covered = torch.logsumexp(log_p, dim=1, keepdim=True)
    over = covered.clamp(min=0.0)
    tail = (-torch.expm1(covered - over)).clamp(min=least).log()
    return torch.cat([log_p - over, tail], dim=1)


class _TopAndTail(torch.autograd.Function):
    """Logits [n, V] over T as those of k + 1 outcomes: the tokens `ids` [n, k], and logsumexp of all others.

    The others are summed for themselves, not as 1 - Σ top: where the top holds nearly all mass, that would be rounding
    alone. Backward makes the one tensor [n, V] that it returns.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, ids: Tensor, temperature: float) -> Tensor:
        others = logits / temperature
        top = others.gather(1, ids)
        others.scatter_(
            1, ids, torch.finfo(logits.dtype).min / 4
        )  # finite, for rows whose others are all -inf
        rest = torch.logsumexp(others, dim=1, keepdim=True)
        ctx.save_for_backward(logits, ids, rest)
        ctx.temperature = temperature
        return torch.cat([top, rest], dim=1)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        logits, ids, rest = ctx.saved_tensors
        slope = upstream[0] / ctx.temperature
        result = torch.div(logits, ctx.temperature).sub_(rest).exp_().mul_(slope[:, -1:])
        return result.scatter_(1, ids, slope[:, :-1]), None, None


def wide(tensor: Tensor) -> Tensor:
    """At least fp32: a divergence of nearby models is lost in bf16, and can come out negative. fp64 stays."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()
