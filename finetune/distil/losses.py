"""Divergences between teacher and student, one pure function each, and their sum over targets in chunks.

Shapes: n target tokens · V vocabulary · k kept tokens · m outcomes (V, or k and a bucket for all others) · D hidden size.
p is the teacher's distribution and q the student's, both at temperature T: softmax(z / T). In nats a target.

    forward_kl       KL(p || q)                                    (Hinton et al. 2015, arXiv:1503.02531)
    reverse_kl       KL(q || p)                                    (Gu et al. 2024, MiniLLM, arXiv:2306.08543)
    jsd              β KL(p || m) + (1-β) KL(q || m), m = βp + (1-β)q   (Agarwal et al. 2024, GKD, arXiv:2306.13649)
    skew_forward_kl  KL(p || αp + (1-α)q)                          (Ko et al. 2024, DistiLLM, arXiv:2402.03898)
    skew_reverse_kl  KL(q || (1-α)p + αq)                          (the same)
    total_variation  ½ Σ |p - q|                                   (Wen et al. 2023, f-distill, arXiv:2307.15190)

Each is multiplied by T², value and gradient alike, so that the gradient of the KL family keeps its size when T grows. With
a teacher's top k, all other tokens are one outcome, the tail bucket, whose mass both sides know: the divergence stays
non-negative, is never above the one over all tokens, and equals it where k = V. Dropping the tail can make it negative;
renormalising the k can make it 0 for models that differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from finetune.distil.outcomes import bucket_log_probabilities, wide
from finetune.distil.targets import TeacherTargets

__all__ = [
    "KINDS",
    "ULD",
    "DistillationLoss",
    "Targets",
    "TeacherTargets",
    "bucket_log_probabilities",
    "check_loss",
    "chunked_distillation_loss",
    "divergence",
    "forward_kl",
    "generalised_jsd",
    "reverse_kl",
    "skew_forward_kl",
    "skew_reverse_kl",
    "target_places",
    "total_variation",
]

# Logits in one chunk: 4 Mi are 16 MiB in fp32, 85 targets of a vocabulary of 49,152.
_CHUNK_LOGITS = 1 << 22
# Weights nearer to 0 or 1 than this cannot be told from them in fp32, where the mixture is one of the two models.
LEAST_WEIGHT = 1e-3
# exp of more overflows; where p is that much smaller than q, its share of the sum is below every rounding.
_GREATEST_EXPONENT = {torch.float32: 80.0, torch.float64: 700.0}


def forward_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(p || q) [n] of log-probabilities [n, m]. Outcomes that p rules out (log-probability -inf) add nothing; one that q
    alone rules out makes it infinite, as it is."""
    p = log_p.exp()
    return (p * torch.where(p > 0, log_p - log_q, 0.0)).sum(dim=-1)


def reverse_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(q || p) [n] of log-probabilities [n, m]."""
    return forward_kl(log_q, log_p)


def generalised_jsd(log_p: Tensor, log_q: Tensor, beta: float) -> Tensor:
    """β KL(p || m) + (1-β) KL(q || m) [n], m = βp + (1-β)q; β = ½ is the Jensen-Shannon divergence.

    It goes to 0 with β and with 1 - β: nothing is put in its place there. Divided by β it goes to KL(p || q) at 0, and
    divided by 1 - β to KL(q || p) at 1.
    """
    of_p, of_q = _kl_to_mixture(log_p, log_q, beta), _kl_to_mixture(log_q, log_p, 1.0 - beta)
    return beta * of_p + (1.0 - beta) * of_q


def skew_forward_kl(log_p: Tensor, log_q: Tensor, alpha: float) -> Tensor:
    """KL(p || αp + (1-α)q) [n]; α = 0 is the forward KL."""
    return _kl_to_mixture(log_p, log_q, alpha)


def skew_reverse_kl(log_p: Tensor, log_q: Tensor, alpha: float) -> Tensor:
    """KL(q || (1-α)p + αq) [n]; α = 0 is the reverse KL."""
    return _kl_to_mixture(log_q, log_p, alpha)


def total_variation(log_p: Tensor, log_q: Tensor) -> Tensor:
    """½ Σ |p - q| [n], between 0 and 1."""
    return 0.5 * (log_p.exp() - log_q.exp()).abs().sum(dim=-1)


def _kl_to_mixture(log_p: Tensor, log_q: Tensor, weight: float) -> Tensor:
    """KL(p || wp + (1-w)q) [n] as -Σ p log1p((1-w)(q/p - 1)): exactly 0 where q = p, and exact for q near p."""
    if weight == 0.0:
        return forward_kl(log_p, log_q)
    p = log_p.exp()
    bound = _GREATEST_EXPONENT[log_p.dtype]
    ratio = torch.where(p > 0, log_q - log_p, 0.0).clamp(-bound, bound).expm1()
    return -(p * torch.log1p((1.0 - weight) * ratio)).sum(dim=-1)


ULD = "uld"  # of models with different tokenizers, which have no outcomes in common (aligned/targets.py)
# kind -> the function and the weight that it takes when none is given (None: it takes none).
KINDS: dict[str, tuple[Callable[..., Tensor], float | None]] = {
    "forward_kl": (forward_kl, None),
    "reverse_kl": (reverse_kl, None),
    "jsd": (generalised_jsd, 0.5),
    "skew_forward_kl": (skew_forward_kl, 0.1),
    "skew_reverse_kl": (skew_reverse_kl, 0.1),
    "total_variation": (total_variation, None),
}


def check_loss(kind: str, temperature: float, beta: float | None, *, aligned: bool = False) -> None:
    """Raise ValueError for a kind that does not exist and for a temperature or weight for which it is not defined.

    aligned: the tokenizers differ, and `uld` is a kind too (aligned/targets.py).
    """
    known = [*KINDS, ULD] if aligned else list(KINDS)
    if kind not in known:
        raise ValueError(f"no divergence named {kind}; known: {', '.join(known)}")
    if not (math.isfinite(temperature) and temperature > 0.0):
        raise ValueError(f"temperature {temperature}: above 0")
    if beta is None:
        return
    if kind == ULD or KINDS[kind][1] is None:
        raise ValueError(f"{kind} takes no weight; {beta} was given")
    if kind == "jsd" and not LEAST_WEIGHT <= beta <= 1.0 - LEAST_WEIGHT:
        raise ValueError(
            f"jsd with a weight of {beta}: between {LEAST_WEIGHT} and {1.0 - LEAST_WEIGHT}, for at 0 and 1 it is 0 for any "
            "two models; what it tends to there is forward_kl and reverse_kl"
        )
    if kind != "jsd" and beta != 0.0 and not LEAST_WEIGHT <= beta <= 1.0 - LEAST_WEIGHT:
        raise ValueError(f"{kind} with a weight of {beta}: 0, or {LEAST_WEIGHT} to {1.0 - LEAST_WEIGHT}")


def divergence(
    kind: str,
    student_logits: Tensor,
    teacher: TeacherTargets,
    *,
    temperature: float = 1.0,
    beta: float | None = None,
) -> Tensor:
    """T² times the divergence of every target, [n], in fp32 (fp64 for fp64 logits).

    student_logits [n, V]. beta: the weight β of `jsd` (½) or α of the skew kinds (0.1). Logits may be -inf, for tokens that
    neither model has. Raises ValueError as `check_loss` does, and for a teacher of another vocabulary.
    """
    check_loss(kind, temperature, beta)
    function, default = KINDS[kind]
    weight = default if beta is None else beta
    log_p, log_q = bucket_log_probabilities(student_logits, teacher, temperature)
    values = function(log_p, log_q) if weight is None else function(log_p, log_q, weight)
    return values * temperature**2


class OtherTargets(Protocol):
    """A teacher of another vocabulary, which says itself how far a student's logits are from it (aligned/targets.py)."""

    def __len__(self) -> int: ...

    def cuts(self, chunk_tokens: int) -> list[int]: ...

    def part(self, start: int, stop: int) -> OtherTargets: ...

    def is_finite(self) -> bool: ...

    def divergence(
        self, kind: str, student_logits: Tensor, *, temperature: float = 1.0, beta: float | None = None
    ) -> Tensor: ...


Targets = TeacherTargets | OtherTargets


class DistillationLoss(NamedTuple):
    """`loss` is what is minimised. The sums over targets, and the losses [n] of each of them before its weight, are for
    telemetry and have no gradient; a part of weight 0 is not computed, and its sum is NaN."""

    loss: Tensor
    divergence_sum: Tensor
    nll_sum: Tensor
    by_target: Tensor


def chunked_distillation_loss(
    hidden: Tensor,
    head_weight: Tensor,
    targets: Targets,
    answer_ids: Tensor,
    *,
    kind: str,
    temperature: float = 1.0,
    beta: float | None = None,
    answer_weight: float = 0.0,
    n_items: Tensor | float | None = None,
    chunk_tokens: int | None = None,
    head_bias: Tensor | None = None,
    weights: Tensor | None = None,
) -> DistillationLoss:
    """Σ w [(1-a) T² divergence + a (-log q(answer))] / n_items over the targets, a being `answer_weight`.

    hidden [n, D] are the student's last hidden states at the places that predict the targets (`target_places`), head_weight
    [V, D] and head_bias [V] its head, answer_ids [n] the targets' own tokens, weights [n] theirs (1). n_items: what the sum
    is divided by; of accumulated micro-batches and ranks it is the number of targets of the whole step (None: n).
    The answer's likelihood is at temperature 1. Logits exist for `chunk_tokens` targets at a time (None: about 16 MiB of
    them); each chunk's gradient is computed at once, so nothing of width V outlives it, for a trainable head too.
    """
    check_loss(kind, temperature, beta, aligned=not isinstance(targets, TeacherTargets))
    n = len(hidden)
    if not len(targets) == len(answer_ids) == n:
        raise ValueError(
            f"{n} hidden states, {len(targets)} teacher targets, {len(answer_ids)} answer tokens"
        )
    if not 0.0 <= answer_weight <= 1.0:
        raise ValueError(f"answer_weight {answer_weight}: between 0 and 1")
    divisor = max(n, 1) if n_items is None else n_items
    device = hidden.device.type
    if torch.is_autocast_enabled(device) and head_weight.dtype == torch.float32:
        head_weight = head_weight.to(torch.get_autocast_dtype(device))
    settings = _Settings(kind, temperature, beta, answer_weight, chunk_tokens or _chunk_size(head_weight))
    with torch.autocast(device, enabled=False):
        head_bias = None if head_bias is None else head_bias.to(head_weight.dtype)
        found = _ChunkedLoss.apply(
            hidden.to(head_weight.dtype), head_weight, head_bias, targets, answer_ids, weights, settings
        )  # type: ignore[no-untyped-call]
    loss, divergence_sum, nll_sum, by_target = found
    return DistillationLoss(loss / divisor, divergence_sum, nll_sum, by_target)


def target_places(labels: Tensor, *, ignored: int = -100) -> tuple[Tensor, Tensor]:
    """(mask [B, S] of the positions whose hidden state predicts a target, the targets' ids [n] in their order).

    labels [B, S] are unshifted: position t is predicted by position t - 1, so the mask is the targets' moved left by one.
    """
    predicts = torch.zeros_like(labels, dtype=torch.bool)
    predicts[:, :-1] = labels[:, 1:] != ignored
    return predicts, labels[:, 1:][predicts[:, :-1]]


class _Settings(NamedTuple):
    kind: str
    temperature: float
    beta: float | None
    answer_weight: float
    chunk_tokens: int


def _chunk_size(head_weight: Tensor) -> int:
    return max(8, _CHUNK_LOGITS // len(head_weight))


class _ChunkedLoss(torch.autograd.Function):
    """The weighted sum over targets. Forward keeps gradients of `hidden` and of the head instead of logits."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        bias: Tensor | None,
        targets: Targets,
        answer_ids: Tensor,
        weights: Tensor | None,
        settings: _Settings,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        summed = torch.float64 if head.dtype == torch.float64 else torch.float32
        sums = torch.zeros(3, dtype=torch.float64, device=hidden.device)
        by_target = torch.zeros(len(hidden), dtype=summed, device=hidden.device)
        slopes = [  # of the head and its bias they are sums over chunks
            torch.zeros_like(one, dtype=one.dtype if one is hidden else summed)
            if one is not None and needed
            else None
            for one, needed in zip((hidden, head, bias), ctx.needs_input_grad[:3], strict=True)
        ]
        for start, stop in pairwise(targets.cuts(settings.chunk_tokens)):
            states = hidden[start:stop]
            logits = wide(torch.nn.functional.linear(states, head, bias))
            own = None if weights is None else weights[start:stop]
            slope = _chunk(
                logits, targets.part(start, stop), answer_ids[start:stop], own, settings, sums,
                by_target[start:stop], differentiate=any(ctx.needs_input_grad[:3]),
            )  # fmt: skip
            del logits
            if slope is not None:
                _collect(slope, states, head, slopes, start)
            del slope  # or the next chunk's would be made beside it
        ctx.save_for_backward(*slopes)
        ctx.dtypes = [None if one is None else one.dtype for one in (hidden, head, bias)]
        loss, divergence_sum, nll_sum = sums.to(summed).unbind()
        if settings.answer_weight == 1.0:
            divergence_sum = divergence_sum * math.nan
        if settings.answer_weight == 0.0:
            nll_sum = nll_sum * math.nan
        divergence_sum, nll_sum = divergence_sum.clone(), nll_sum.clone()  # views cannot be marked
        ctx.mark_non_differentiable(divergence_sum, nll_sum, by_target)
        return loss.clone(), divergence_sum, nll_sum, by_target

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        found = [
            None if slope is None else (slope * upstream[0].to(slope.dtype)).to(dtype)
            for slope, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return (*found, None, None, None, None)


def _chunk(
    logits: Tensor,
    teacher: Targets,
    answer_ids: Tensor,
    weights: Tensor | None,
    settings: _Settings,
    sums: Tensor,
    by_target: Tensor,
    *,
    differentiate: bool,
) -> Tensor | None:
    """Add a chunk's weighted loss, divergence and nll to `sums` [3] and write each target's own loss into `by_target` [c];
    return the loss's derivative by the logits [c, V]."""
    share = settings.answer_weight
    with torch.set_grad_enabled(differentiate):
        logits = logits.detach().requires_grad_(differentiate)
        total = logits.new_zeros(len(logits))
        if share < 1.0:
            value = _distance(logits, teacher, settings)
            sums[1] += value.detach().sum()
            total = total + (1.0 - share) * value
        if share > 0.0:
            nll = torch.nn.functional.cross_entropy(logits, answer_ids, reduction="none")
            sums[2] += nll.detach().sum()
            total = total + share * nll
        by_target.copy_(total.detach())
        loss = (total if weights is None else total * weights).sum()
        sums[0] += loss.detach()
        return torch.autograd.grad(loss, logits)[0] if differentiate else None


def _distance(logits: Tensor, teacher: Targets, settings: _Settings) -> Tensor:
    """T² times the divergence of every target of a chunk, [c]."""
    options: dict[str, Any] = {"temperature": settings.temperature, "beta": settings.beta}
    if isinstance(teacher, TeacherTargets):
        return divergence(settings.kind, logits, teacher, **options)
    return teacher.divergence(settings.kind, logits, **options)


def _collect(slope: Tensor, states: Tensor, head: Tensor, slopes: list[Tensor | None], start: int) -> None:
    """Carry the derivative by a chunk's logits [c, V] on to its hidden states, the head and the bias."""
    of_hidden, of_head, of_bias = slopes
    if of_hidden is not None:
        of_hidden[start : start + len(slope)] = slope.to(head.dtype) @ head
    if of_head is not None:
        of_head.addmm_(slope.T, states.to(slope.dtype))
    if of_bias is not None:
        of_bias += slope.sum(dim=0)
