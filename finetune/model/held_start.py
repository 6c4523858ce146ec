"""The half of a doubled adapter that never moves, whatever the optimizer does.

PiSSA (Meng et al. 2024, arXiv:2404.02948) and OLoRA (Büyükakyüz 2024, arXiv:2406.01775) start A and B from parts of the
weight and take B·A out of it, so that the first forward pass is the base model's. The model then trained stands on other
weights than those on disk: in bf16 the remainder is rounded once more, disabling the adapter no longer gives the base, and
the saved adapter is of no use without the changed weights. Here the weight stays, and the adapter computes
    W + s·(B·A − B₀·A₀) = W + s·[B  −B₀]·[A; A₀],
a plain LoRA of twice the rank whose second half is held. Gradients of A and B are those of the method.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class HeldHalves:
    """The held halves of a model's adapters. `keep(step)` runs an optimizer step that leaves them bit by bit."""

    def __init__(self, model: nn.Module, adapter: str = "default") -> None:
        self._halves: list[tuple[nn.Parameter, int, int]] = []
        for module in model.modules():
            layer: Any = module
            if hasattr(layer, "lora_A") and adapter in layer.lora_A:
                rank = layer.lora_A[adapter].weight.shape[0] // 2
                self._halves += [
                    (layer.lora_A[adapter].weight, 0, rank),
                    (layer.lora_B[adapter].weight, 1, rank),
                ]
        for parameter, dimension, rank in self._halves:
            hooked: Any = parameter  # torch leaves register_hook untyped
            hooked.register_hook(_without_second_half(dimension, rank))
        self._values: list[Tensor] = []

    def before_step(self) -> None:
        """Remember the halves; they are read anew, for a checkpoint may have been loaded since."""
        if not self._values:
            self._values = [half.clone() for half in self._views()]

    def after_step(self) -> None:
        """Undo what weight decay, momentum or a preconditioner did to them."""
        with torch.no_grad():
            for half, value in zip(self._views(), self._values, strict=True):
                half.copy_(value)

    def _views(self) -> list[Tensor]:
        return [
            parameter.detach().narrow(dimension, rank, rank) for parameter, dimension, rank in self._halves
        ]


def _without_second_half(dimension: int, rank: int) -> Callable[[Tensor], Tensor]:
    def hook(gradient: Tensor) -> Tensor:
        kept = gradient.clone()
        kept.narrow(dimension, rank, rank).zero_()
        return kept

    return hook
