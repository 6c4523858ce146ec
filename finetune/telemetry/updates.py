"""How far one optimizer step moves the weights, without a second copy of a model that is tuned whole."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

# 200 MB in fp32. Adapters are watched whole; of a model that is tuned in full, evenly spaced tensors are.
MAX_WATCHED_ELEMENTS = 50_000_000


class UpdateWatch:
    """||change|| / ||weights before|| of a step over the trainable parameters, or over a fixed sample of their tensors."""

    def __init__(self, max_elements: int = MAX_WATCHED_ELEMENTS) -> None:
        self.max_elements = max_elements
        self._before: list[Tensor] = []

    def start(self, model: nn.Module) -> None:
        """Copy what is watched. Call before the optimizer step."""
        self._before = [tensor.clone() for tensor in self._watched(model)]

    def finish(self, model: nn.Module) -> tuple[float, float]:
        """(norm of all trainable weights, update ratio), both after the optimizer step. Gives the copies back."""
        watched, before = self._watched(model), self._before
        self._before = []
        before_norm = global_norm(before)
        change = global_norm([old.sub_(new) for new, old in zip(watched, before, strict=True)])
        ratio = change / before_norm if before_norm > 0 else 0.0
        return global_norm(_trainable(model)), ratio

    def _watched(self, model: nn.Module) -> list[Tensor]:
        """The same tensors every time: evenly spaced over the model, as many as the limit allows, at least one."""
        tensors = _trainable(model)
        stride = max(math.ceil(sum(tensor.numel() for tensor in tensors) / self.max_elements), 1)
        chosen: list[Tensor] = []
        left = self.max_elements
        for tensor in tensors[::stride]:
            if tensor.numel() <= left:
                chosen.append(tensor)
                left -= tensor.numel()
        return chosen or sorted(tensors, key=Tensor.numel)[:1]


def global_norm(tensors: list[Tensor]) -> float:
    """Euclidean norm over all elements of all tensors."""
    if not tensors:
        return 0.0
    return float(torch.linalg.vector_norm(torch.stack(torch._foreach_norm(tensors)).float()))


def _trainable(model: nn.Module) -> list[Tensor]:
    return [parameter.detach() for parameter in model.parameters() if parameter.requires_grad]
