"""Before its first step a model that starts at its reference is that reference: where it is not, the reference is wrong."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from finetune.errors import UserError

# A fresh copy scores what it copied: in another batch, sums of hundreds of tokens differ by less, in half precision (and
# under int8, which rounds the inputs of a layer) by more than in fp32.
_TOLERANCE_NATS, _SHARE_FP32, _SHARE_ROUNDED = 1e-2, 1e-4, 1e-2


def require_start(
    log_ratios: Tensor, reference: Tensor, model: nn.Module, compute_dtype: torch.dtype
) -> None:
    """Raise UserError where an answer of the first batch is not as likely as the reference says.

    `log_ratios` are those of the model to the `reference` log-probabilities, in nats and of any shape; all zero in theory,
    so that the loss of `sigmoid` is ln 2.
    """
    share = _SHARE_ROUNDED if _rounds(model, compute_dtype) else _SHARE_FP32
    largest = reference.abs().max()
    off = log_ratios.detach().abs().max()
    if bool(off > _TOLERANCE_NATS + share * largest):
        raise UserError(
            f"before the first step an answer is {float(off):.2g} nats off the reference, which should be the same model",
            where="train.preference.reference",
            why="the kept log-probabilities of the reference belong to another start, or to other versions of the libraries",
            fix="delete the folder `references` beside the runs, which are then computed anew; if it comes back, report it "
            "with the recipe",
        )


def _rounds(model: nn.Module, compute_dtype: torch.dtype) -> bool:
    """Whether the forward pass computes in less than fp32."""
    int8 = any(type(module).__name__ == "Linear8bitLt" for module in model.modules())
    return int8 or compute_dtype != torch.float32
