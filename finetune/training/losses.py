"""Losses of training, over target positions only.

Shapes: N tokens of a flattened batch, M <= N targets, D hidden size, V vocabulary. z [M, V] are the logits, p their
softmax, y the target, L = logsumexp(z), so that the negative log-likelihood is L - z_y.

    dft        p_y · (L - z_y) with p_y held constant               (Wu et al. 2025, arXiv:2508.05629)
    smoothing  (1 - ε) · (L - z_y) + ε · (L - mean z)               (Szegedy et al. 2016, arXiv:1512.00567)
    z-loss     … + λ · L²                                           (Chowdhery et al. 2022, arXiv:2204.02311)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# 512 x 49,152 logits in fp32 are 100 MB. Over a frozen head on a CPU 128 are as fast (576 units, AVX512-BF16: 0.78 s for
# 450 targets either way); a GPU needs more rows to be busy, and a head that is trained adds up its gradient for every chunk.
_CHUNK_TARGETS = 512
_CHUNK_TARGETS_ON_CPU = 128


@dataclass(frozen=True, slots=True)
class LossShape:
    """What is minimised in place of the plain negative log-likelihood."""

    dft: bool = False
    label_smoothing: float = 0.0
    z_loss: float = 0.0

    @property
    def is_plain(self) -> bool:
        return not (self.dft or self.label_smoothing or self.z_loss)


PLAIN = LossShape()


def target_nll(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> Tensor:
    """Negative log-likelihood [M], in nats, of every target; see `target_losses`."""
    return target_losses(hidden, weight, bias, targets)[0]


def target_losses(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, shape: LossShape = PLAIN
) -> tuple[Tensor, Tensor]:
    """(what is minimised, negative log-likelihood) of every target, [M] each, in fp32 (fp64 for fp64 weights).

    hidden [M, D], weight [V, D], bias [V] or None, targets [M] (token ids). Only the first one has a gradient;
    where `shape` is plain the two are equal. The logits [M, V] exist for one chunk of targets at a time. A frozen
    head takes one product forward and one backward; a trainable head is recomputed in the backward pass by activation
    checkpointing, and computes in the type of autocast.
    """
    device = hidden.device.type
    head_is_trainable = weight.requires_grad or (bias is not None and bias.requires_grad)
    if head_is_trainable and torch.is_autocast_enabled(device) and weight.dtype == torch.float32:
        weight = weight.to(torch.get_autocast_dtype(device))
    hidden = hidden.to(weight.dtype)
    bias = bias.to(weight.dtype) if bias is not None else None
    with torch.autocast(device, enabled=False):
        if not head_is_trainable:
            return _TargetLosses.apply(hidden, weight, bias, targets, shape)  # type: ignore[no-untyped-call,no-any-return]
        chunks = [
            torch.utils.checkpoint.checkpoint(
                _chunk_losses, hidden[i : i + _CHUNK_TARGETS], weight, bias, targets[i : i + _CHUNK_TARGETS], shape,
                use_reentrant=False,
            )
            for i in range(0, len(targets), _CHUNK_TARGETS)
        ]  # fmt: skip
        if not chunks:
            nothing = hidden.sum() * hidden.new_empty(0, dtype=_wide(hidden).dtype)
            return nothing, nothing.detach()
        objectives, nlls = (torch.cat(parts) for parts in zip(*chunks, strict=True))
        return objectives, nlls.detach()


class _TargetLosses(torch.autograd.Function):
    """Losses over a frozen head whose backward pass keeps the gradient of `hidden`, so logits never outlive a chunk."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, shape: LossShape
    ) -> tuple[Tensor, Tensor]:
        nll = hidden.new_empty(len(targets), dtype=_wide(hidden[:0]).dtype)
        objective = nll if shape.is_plain else torch.empty_like(nll)
        gradient = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        on_cpu = hidden.device.type == "cpu"
        size = min(_CHUNK_TARGETS, _CHUNK_TARGETS_ON_CPU) if on_cpu else _CHUNK_TARGETS
        for start in range(0, len(targets), size):
            part = slice(start, start + size)
            logits = _wide(torch.nn.functional.linear(hidden[part], weight, bias))
            chosen = logits.gather(1, targets[part, None])
            mean = logits.mean(dim=1) if shape.label_smoothing else None
            probabilities, log_normaliser = _normalise_(logits)
            nll[part] = (log_normaliser - chosen).squeeze(1)
            if not shape.is_plain:
                objective[part] = _shaped(nll[part], log_normaliser.squeeze(1), mean, shape)
            if gradient is not None:
                slope = _logit_gradient_(probabilities, log_normaliser, chosen, targets[part, None], shape)
                gradient[part] = slope.to(weight.dtype) @ weight
                del slope
            del logits, probabilities  # or the next chunk's would be made beside them
        ctx.save_for_backward(gradient)
        told = nll.clone() if shape.is_plain else nll  # a function's two results may not be one tensor
        ctx.mark_non_differentiable(told)
        return objective, told

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * upstream[0][:, None].to(gradient.dtype), None, None, None, None


def _normalise_(logits: Tensor) -> tuple[Tensor, Tensor]:
    """(softmax, logsumexp [m, 1]) of logits [m, V], the first written over them: no second tensor of that size."""
    highest = logits.amax(dim=-1, keepdim=True)
    total = logits.sub_(highest).exp_().sum(dim=-1, keepdim=True)
    return logits.div_(total), total.log_().add_(highest)


def _logit_gradient_(
    probabilities: Tensor, log_normaliser: Tensor, chosen: Tensor, targets: Tensor, shape: LossShape
) -> Tensor:
    """Derivative of the objective by the logits, written over their softmax [m, V]. The other arguments are [m, 1]."""
    weight_of_nll = (chosen - log_normaliser).exp_() if shape.dft else torch.ones_like(chosen)
    slope = probabilities
    if not shape.is_plain:
        slope.mul_(weight_of_nll + 2.0 * shape.z_loss * log_normaliser)
        slope.sub_(shape.label_smoothing / slope.shape[1])
    return slope.scatter_add_(1, targets, (shape.label_smoothing - 1.0) * weight_of_nll)


def _shaped(nll: Tensor, log_normaliser: Tensor, mean: Tensor | None, shape: LossShape) -> Tensor:
    """The objective [m] from its parts, [m] each; the mean logit is there where labels are smoothed."""
    value = nll
    if shape.dft:
        value = torch.exp(-nll.detach()) * nll
    if shape.label_smoothing:
        assert mean is not None
        smooth = log_normaliser - mean
        value = (1.0 - shape.label_smoothing) * value + shape.label_smoothing * smooth
    if shape.z_loss:
        value = value + shape.z_loss * log_normaliser**2
    return value


def _chunk_losses(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, shape: LossShape
) -> tuple[Tensor, Tensor]:
    logits = _wide(torch.nn.functional.linear(hidden, weight, bias))
    return logit_losses(logits, targets, shape)


def logit_losses(logits: Tensor, targets: Tensor, shape: LossShape = PLAIN) -> tuple[Tensor, Tensor]:
    """(what is minimised, negative log-likelihood) [M] from logits [M, V] that are there already."""
    nll = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    if shape.is_plain:
        return nll, nll
    mean = logits.mean(dim=1) if shape.label_smoothing else None
    return _shaped(nll, torch.logsumexp(logits, dim=1), mean, shape), nll


def _wide(tensor: Tensor) -> Tensor:
    """At least fp32: fp64 stays."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()
