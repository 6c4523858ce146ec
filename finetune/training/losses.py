"""Losses of training, over target positions only.

Shapes: N tokens of a flattened batch, M <= N targets, D hidden size, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_CHUNK_TARGETS = 512  # 512 x 49,152 logits in fp32 are 100 MB


class _TargetNll(torch.autograd.Function):
    """Negative log-likelihood whose backward pass reuses softmax - onehot, so logits never outlive a chunk."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> Tensor:
        nll = hidden.new_empty(len(targets), dtype=torch.float32)
        gradient = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        for start in range(0, len(targets), _CHUNK_TARGETS):
            part = slice(start, start + _CHUNK_TARGETS)
            logits = torch.nn.functional.linear(hidden[part], weight, bias).float()
            log_normaliser = torch.logsumexp(logits, dim=-1, keepdim=True)
            chosen = logits.gather(1, targets[part, None])
            nll[part] = (log_normaliser - chosen).squeeze(1)
            if gradient is not None:
                probabilities = logits.sub_(log_normaliser).exp_()
                probabilities.scatter_add_(1, targets[part, None], torch.full_like(chosen, -1.0))
                gradient[part] = probabilities.to(weight.dtype) @ weight
                del probabilities
            del logits  # or the next chunk's would be made beside them
        ctx.save_for_backward(gradient)
        return nll

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * upstream[0][:, None].to(gradient.dtype), None, None, None


def _chunk_nll(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> Tensor:
    logits = torch.nn.functional.linear(hidden, weight, bias).float()
    return torch.nn.functional.cross_entropy(logits, targets, reduction="none")


def target_nll(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> Tensor:
    """Negative log-likelihood, in nats, of every target.

    hidden [M, D], weight [V, D], bias [V] or None, targets [M] (token ids) -> [M] in fp32.
    The logits [M, V] exist for one chunk of targets at a time. A frozen head takes one product forward and one
    backward; a trainable head is recomputed in the backward pass by activation checkpointing.
    """
    hidden = hidden.to(weight.dtype)
    with torch.autocast(hidden.device.type, enabled=False):
        head_is_trainable = weight.requires_grad or (bias is not None and bias.requires_grad)
        if not head_is_trainable:
            return _TargetNll.apply(hidden, weight, bias, targets)  # type: ignore[no-untyped-call,no-any-return]
        chunks = [
            torch.utils.checkpoint.checkpoint(
                _chunk_nll, hidden[i : i + _CHUNK_TARGETS], weight, bias, targets[i : i + _CHUNK_TARGETS],
                use_reentrant=False,
            )
            for i in range(0, len(targets), _CHUNK_TARGETS)
        ]  # fmt: skip
        return torch.cat(chunks) if chunks else hidden.sum() * hidden.new_empty(0, dtype=torch.float32)
