"""The language-model head applied to target positions only, in place of TRL's head over every position.

On CPU, TRL's fused head scores all positions and recomputes them in the backward pass; with 60 % of the tokens in
prompts and the head holding a fifth of a small model's matrices, that is a quarter of a step.
"""

from __future__ import annotations

import functools
import types
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from finetune.training.losses import PLAIN, LossShape, logit_losses, target_losses

IGNORED = -100
# Models whose logits are bent after the head; for them the plain product would be another loss.
_BENT_LOGITS = (
    "final_logit_softcapping",
    "logit_scale",
    "logits_scaling",
    "output_multiplier",
    "lm_head_multiplier",
)


@dataclass
class TargetOutput:
    """Per-target losses of one forward pass, [M] each, fp32, in the order of the flattened batch.

    `nll` is the negative log-likelihood in nats; `objective` what is minimised, the same for a plain loss. Only the
    objective of a loss with another shape, and the nll of a plain one, have a gradient.
    """

    nll: Tensor
    objective: Tensor


def supports_target_head(model: nn.Module) -> bool:
    """Whether the logits of this model are the plain product of head and hidden states, and the latter can be had alone."""
    config: Any = model.config.get_text_config()  # type: ignore[operator,union-attr]
    if model.base_model is model:  # its class names a body that it does not have (Llama 4's text model)
        return False
    return all(getattr(config, name, None) in (None, 1, 1.0) for name in _BENT_LOGITS)


def add_target_head(model: nn.Module) -> None:
    """Let `model(..., labels=labels, target_head=True)` return a `TargetOutput`; without the flag nothing changes.

    `model` is the causal language model under any adapter. It goes through `forward` so that wrappers (DDP, FSDP)
    keep working. Labels [B, T] are unshifted: position t is the target of position t - 1. In place of labels, `sources`
    [M] may say from which place of the flattened batch each of `targets` [M] is predicted.
    """
    original_forward = model.forward

    @functools.wraps(type(model).forward)
    def forward(
        self: Any,
        *args: Any,
        target_head: bool = False,
        labels: Tensor | None = None,
        sources: Tensor | None = None,
        targets: Tensor | None = None,
        loss_shape: LossShape = PLAIN,
        **kwargs: Any,
    ) -> Any:
        if not target_head:
            return original_forward(*args, **({"labels": labels} if labels is not None else {}), **kwargs)
        hidden = self.base_model(*args, use_cache=False, **kwargs).last_hidden_state
        if sources is not None:
            hidden = hidden.flatten(0, 1)[sources]
        else:
            assert labels is not None
            is_target = labels[:, 1:] != IGNORED
            hidden, targets = hidden[:, :-1][is_target], labels[:, 1:][is_target]
        assert targets is not None
        head = self.get_output_embeddings()
        bias = getattr(head, "bias", None)  # not there where only new tokens' rows of the head are trained
        objective, nll = target_losses(hidden, head.weight, bias, targets, loss_shape)
        return TargetOutput(objective if loss_shape.is_plain else nll, objective)

    model.forward = types.MethodType(forward, model)


def full_logits_nll(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    """Negative log-likelihoods [M] from the model's own logits: the reference, and the way for bent logits."""
    return full_logits_losses(model, inputs).nll


def full_logits_losses(
    model: nn.Module, inputs: dict[str, Any], loss_shape: LossShape = PLAIN
) -> TargetOutput:
    """The same losses as the target head's, from the model's own logits."""
    if "sources" in inputs:
        rest = {k: v for k, v in inputs.items() if k not in ("sources", "targets")}
        logits = model(**rest, use_cache=False).logits.flatten(0, 1)[inputs["sources"]]
        targets = inputs["targets"]
    else:
        labels = inputs["labels"][:, 1:]
        logits = model(**{k: v for k, v in inputs.items() if k != "labels"}, use_cache=False).logits[:, :-1]
        is_target = labels != IGNORED
        logits, targets = logits[is_target], labels[is_target]
    wide = logits if logits.dtype == torch.float64 else logits.float()
    objective, nll = logit_losses(wide, targets, loss_shape)
    return TargetOutput(nll, objective)
