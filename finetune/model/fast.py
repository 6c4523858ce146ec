"""The passes that a training step takes in place of the model's own: the same results, fewer copies kept."""

from __future__ import annotations

from torch import nn

from finetune.model.fast_lora import restore_lora, speed_up_lora
from finetune.model.fast_mlp import restore_gates, slim_gates
from finetune.model.fast_norm import restore_norms, slim_norms


def speed_up(model: nn.Module) -> None:
    """Fused LoRA, norms and gated MLPs wherever they are known to give the model's own results; idempotent.

    Without gradients, as in generation, the model's own passes run. State dicts and saving are untouched.
    """
    speed_up_lora(model)
    slim_norms(model)
    slim_gates(model)


def restore(model: nn.Module) -> None:
    """Give every module its own forward pass back."""
    restore_lora(model)
    restore_norms(model)
    restore_gates(model)
