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

from finetune.training.losses import target_nll

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
    """Per-target losses of one forward pass: `nll` [M] in nats, fp32, in the order of the flattened batch."""

    nll: Tensor


def supports_target_head(model: nn.Module) -> bool:
    """Whether the logits of this model are the plain product of hidden states and head."""
    config: Any = model.config.get_text_config()  # type: ignore[operator,union-attr]
    return all(getattr(config, name, None) in (None, 1, 1.0) for name in _BENT_LOGITS)


def add_target_head(model: nn.Module) -> None:
    """Let `model(..., labels=labels, target_head=True)` return a `TargetOutput`; without the flag nothing changes.

    `model` is the causal language model under any adapter. It goes through `forward` so that wrappers (DDP, FSDP)
    keep working. Labels [B, T] are unshifted: position t is the target of position t - 1.
    """
    original_forward = model.forward

    @functools.wraps(type(model).forward)
    def forward(
        self: Any, *args: Any, target_head: bool = False, labels: Tensor | None = None, **kwargs: Any
    ) -> Any:
        if not target_head:
            return original_forward(*args, **({"labels": labels} if labels is not None else {}), **kwargs)
        assert labels is not None
        hidden = self.base_model(*args, use_cache=False, **kwargs).last_hidden_state
        next_labels = labels[:, 1:]
        is_target = next_labels != IGNORED
        head = self.get_output_embeddings()
        nll = target_nll(hidden[:, :-1][is_target], head.weight, head.bias, next_labels[is_target])
        return TargetOutput(nll=nll)

    model.forward = types.MethodType(forward, model)


def full_logits_nll(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    """The same losses [M] from the model's own logits: the reference, and the way for bent logits."""
    labels = inputs["labels"][:, 1:]
    logits = model(**{k: v for k, v in inputs.items() if k != "labels"}, use_cache=False).logits[:, :-1]
    is_target = labels != IGNORED
    return torch.nn.functional.cross_entropy(logits[is_target].float(), labels[is_target], reduction="none")
