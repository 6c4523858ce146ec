"""How far one optimizer step moves the weights, without a second copy of a model that is tuned whole."""

from __future__ import annotations

import math
import re
import statistics
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

# 200 MB in fp32. Adapters are watched whole; of a model that is tuned in full, evenly spaced tensors are.
MAX_WATCHED_ELEMENTS = 50_000_000
OUTSIDE = "outside"  # the block of tensors that belong to no layer: embeddings, the last norm, a head
_LAYER = re.compile(r"(?:^|\.)(?:layers|layer|blocks|block|h)\.(\d+)\.")
_DIGITS = 4


@dataclass(frozen=True, slots=True)
class Movement:
    """One optimizer step. Ratios are norm of the change / norm before the step, over the watched tensors.

    weight_norm: of all trainable weights after the step. ratio: over all watched tensors together. median: of the ratios
    of single tensors, zero tensors left out (LoRA's B before its first step); None when all are. blocks: layer number, or
    'outside' -> the ratio of its tensors together.
    """

    weight_norm: float = 0.0
    ratio: float = 0.0
    median: float | None = None
    blocks: dict[str, float] = field(default_factory=dict)


class UpdateWatch:
    """The movement of a step over the trainable parameters, or over a fixed sample of their tensors."""

    def __init__(self, max_elements: int = MAX_WATCHED_ELEMENTS) -> None:
        self.max_elements = max_elements
        self._before: list[Tensor] = []

    def start(self, model: nn.Module) -> None:
        """Copy what is watched. Call before the optimizer step."""
        self._before = [own_part(parameter).clone() for _, parameter in self._watched(model)]

    def finish(self, model: nn.Module) -> Movement:
        """The movement, after the optimizer step. Gives the copies back."""
        watched, before = self._watched(model), self._before
        self._before = []
        everything = [parameter for _, parameter in _trainable(model)]
        spread = any(map(in_parts, everything))
        norms = _norms(before, spread)
        changes = _norms(
            [old.sub_(own_part(new)) for (_, new), old in zip(watched, before, strict=True)], spread
        )
        single = [change / norm for change, norm in zip(changes, norms, strict=True) if norm > 0]
        return Movement(
            weight_norm=global_norm([own_part(parameter) for parameter in everything], spread),
            ratio=_ratio(changes, norms),
            median=_rounded(statistics.median(single)) if single else None,
            blocks=_by_block([block_of(name) for name, _ in watched], changes, norms),
        )

    def _watched(self, model: nn.Module) -> list[tuple[str, Tensor]]:
        """The same tensors every time: evenly spaced over the model, as many as the limit allows, at least one."""
        tensors = _trainable(model)
        stride = max(math.ceil(sum(count(tensor) for _, tensor in tensors) / self.max_elements), 1)
        chosen: list[tuple[str, Tensor]] = []
        left = self.max_elements
        for name, tensor in tensors[::stride]:
            if count(tensor) <= left:
                chosen.append((name, tensor))
                left -= count(tensor)
        return chosen or sorted(tensors, key=lambda pair: count(pair[1]))[:1]


def block_of(parameter: str) -> str:
    """The layer number in a parameter's name, or 'outside'."""
    match = _LAYER.search(parameter)
    return match[1] if match else OUTSIDE


def global_norm(tensors: list[Tensor], spread: bool = False) -> float:
    """Euclidean norm over all elements of all tensors, and of all processes where they are spread."""
    return math.hypot(*_norms(tensors, spread))


def in_parts(parameter: Tensor) -> bool:
    """Whether each process holds a part of this weight: FSDP2 spread it, or DeepSpeed's ZeRO-3, which leaves it empty."""
    return isinstance(parameter, DTensor) or hasattr(parameter, "ds_id")


def count(parameter: Tensor) -> int:
    """Elements of the whole weight."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def own_part(parameter: Tensor) -> Tensor:
    """The elements that this process holds: all, or its part, under ZeRO-3 flat and without the filling at its end."""
    held: Any = parameter.detach()
    if isinstance(parameter, DTensor):
        held = held.to_local()
    if not hasattr(parameter, "ds_id"):
        return held  # type: ignore[no-any-return]
    shard: Tensor = parameter.ds_tensor.detach().flatten()  # type: ignore[attr-defined]
    start = shard.numel() * torch.distributed.get_rank()
    return shard[: min(max(count(parameter) - start, 0), shard.numel())]


def _norms(tensors: list[Tensor], spread: bool = False) -> list[float]:
    """The Euclidean norm of each; of all processes' parts together where they are spread."""
    if not tensors:
        return []
    norms = torch.stack(torch._foreach_norm(tensors)).float()
    if spread:
        norms = norms.square()
        torch.distributed.all_reduce(norms)
        norms = norms.sqrt()
    return norms.tolist()


def _ratio(changes: list[float], norms: list[float]) -> float:
    norm = math.hypot(*norms)
    return math.hypot(*changes) / norm if norm > 0 else 0.0


def _by_block(blocks: list[str], changes: list[float], norms: list[float]) -> dict[str, float]:
    """Block -> ratio, layers in order and what is outside them last; blocks that are zero throughout are left out."""
    of_block: dict[str, list[int]] = defaultdict(list)
    for place, block in enumerate(blocks):
        of_block[block].append(place)
    ordered = sorted(of_block, key=lambda block: (block == OUTSIDE, int(block) if block != OUTSIDE else 0))
    found = {}
    for block in ordered:
        places = of_block[block]
        if any(norms[place] > 0 for place in places):
            found[block] = _rounded(_ratio([changes[p] for p in places], [norms[p] for p in places]))
    return found


def _rounded(value: float) -> float:
    """Four significant digits: one line an event, and no more."""
    return float(f"{value:.{_DIGITS}g}")


def _trainable(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]
