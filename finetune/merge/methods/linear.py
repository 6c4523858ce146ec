"""Weighted averages (model soups) and single models."""

from __future__ import annotations

import torch

from finetune.merge.methods.chunk import Blend, Chunk, Chunks, Settings
from finetune.merge.methods.gram import combination, inputs


def linear(chunks: Chunks, settings: Settings) -> Blend:
    """Model soup (arXiv:2203.05482), and interpolation with the base (WiSE-FT, arXiv:2109.01903): θ = Σ wᵢ θᵢ / Σ wᵢ.

    With `normalize: false` the sum is not divided. All dialects agree.
    """
    total = sum(settings.weight)
    if settings.normalize is False:
        return combination(settings.weight, inputs)
    if total == 0:
        raise ZeroDivisionError("the weights sum to zero")
    weights = settings.weight

    def blend(chunk: Chunk) -> torch.Tensor:
        result = chunk.tensors[0].mul_(weights[0])
        for weight, tensor in zip(weights[1:], chunk.tensors[1:], strict=True):
            result.add_(tensor, alpha=weight)
        return result if total == 1 else result.div_(total)

    return blend


def passthrough(chunks: Chunks, settings: Settings) -> Blend:
    """The tensor of one model, as it is or times `scale`: for stacking layers (depth up-scaling, arXiv:2312.15166)."""
    scale = settings.scale[0] if settings.scale else 1.0

    def blend(chunk: Chunk) -> torch.Tensor:
        tensor = chunk.tensors[0]
        return tensor if scale == 1 else tensor.mul_(scale)

    return blend
