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
        return TargetOutput(nll=target_nll(hidden, head.weight, head.bias, targets))

    model.forward = types.MethodType(forward, model)


def full_logits_nll(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    """The same losses [M] from the model's own logits: the reference, and the way for bent logits."""
    if "sources" in inputs:
        rest = {k: v for k, v in inputs.items() if k not in ("sources", "targets")}
        logits = model(**rest, use_cache=False).logits.flatten(0, 1)[inputs["sources"]]
        return torch.nn.functional.cross_entropy(logits.float(), inputs["targets"], reduction="none")
    labels = inputs["labels"][:, 1:]
    logits = model(**{k: v for k, v in inputs.items() if k != "labels"}, use_cache=False).logits[:, :-1]
    is_target = labels != IGNORED
    return torch.nn.functional.cross_entropy(logits[is_target].float(), labels[is_target], reduction="none")
