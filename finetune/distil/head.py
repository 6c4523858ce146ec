"""The student's head and its distillation loss inside `forward`, so that wrappers (DDP, FSDP) keep working.

Shapes: B rows of T tokens, n targets of the flattened batch, D hidden size, V shared vocabulary.
"""

from __future__ import annotations

import functools
import types
from typing import Any

import torch
from torch import Tensor, nn

from finetune.distil.losses import DistillationLoss, Targets, chunked_distillation_loss, target_places
from finetune.distil.targets import TeacherTargets
from finetune.errors import UserError
from finetune.model.adapters import without_adapters
from finetune.training.head import supports_target_head

# What a batch holds beside the model's own inputs.
NOT_INPUTS = ("labels", "target_weights", "rows")


def add_distillation_head(model: nn.Module) -> None:
    """Let `model(..., labels=labels, teacher=targets, distillation={…})` return a `DistillationLoss` of the batch's sum.

    `model` is the causal language model under any adapter; without `teacher` nothing changes. `distillation` holds further
    arguments of `chunked_distillation_loss`, and `n_vocabulary`, the tokens that both models know: only their logits
    count. labels [B, T] are unshifted.
    """
    original_forward = model.forward

    @functools.wraps(type(model).forward)
    def forward(
        self: Any,
        *args: Any,
        teacher: Targets | None = None,
        labels: Tensor | None = None,
        distillation: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        if teacher is None:
            return original_forward(*args, **({"labels": labels} if labels is not None else {}), **kwargs)
        assert labels is not None and distillation is not None
        options = dict(distillation)
        n_vocabulary = options.pop("n_vocabulary")
        hidden = self.base_model(*args, use_cache=False, **kwargs).last_hidden_state
        places, answers = target_places(labels)
        head = self.get_output_embeddings()
        bias = getattr(head, "bias", None)
        return chunked_distillation_loss(
            hidden[places],
            head.weight[:n_vocabulary],
            teacher,
            answers,
            head_bias=None if bias is None else bias[:n_vocabulary],
            **options,
        )

    model.forward = types.MethodType(forward, model)


def teacher_not_finite(where: str, kept: str = "") -> UserError:
    """The fault of a teacher whose logits are NaN or infinite; `kept`: what the remedy adds on what was computed."""
    return UserError(
        "the teacher's logits are not finite",
        where=where,
        why="its weights are damaged, or its compute type overflows",
        fix=f"set distil.teacher.dtype: fp32, or bring the teacher's weights back{kept}",
    )


@torch.no_grad()
def live_targets(teacher: Any, inputs: dict[str, Any], n_vocabulary: int) -> TeacherTargets:
    """What the teacher says at every target of a batch, in the order of the flattened batch.

    Of most models only the hidden states are kept, and logits are made of them chunk by chunk; of those that bend their
    logits behind the head, the logits themselves.
    """
    places, _ = target_places(inputs["labels"])
    plain = {name: value for name, value in inputs.items() if name not in NOT_INPUTS}
    base = without_adapters(teacher)
    if not supports_target_head(base):
        logits = teacher(**plain, use_cache=False).logits[places]
        return TeacherTargets.full(logits[:, :n_vocabulary])
    hidden = base.base_model(**plain, use_cache=False).last_hidden_state
    head = base.get_output_embeddings()
    bias = getattr(head, "bias", None)
    return TeacherTargets.live(
        hidden[places], head.weight[:n_vocabulary], None if bias is None else bias[:n_vocabulary]
    )


__all__ = ["NOT_INPUTS", "DistillationLoss", "add_distillation_head", "live_targets", "teacher_not_finite"]
