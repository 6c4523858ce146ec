"""Inner products of whole tensors, chunk by chunk: all that methods on spheres and planes need to know of a tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from finetune.merge.methods.chunk import Blend, Chunk, Chunks

_BLOCK = 1 << 15
Vectors = Callable[[Chunk], list[torch.Tensor]]


def gram(chunks: Chunks, vectors: Vectors) -> torch.Tensor:
    """⟨xᵢ, xⱼ⟩ over the whole tensor, fp64 [k, k]. Blocks of 32k elements are summed in fp32, the blocks in fp64."""
    total: torch.Tensor | None = None
    for part in chunks.map(lambda chunk: _products(vectors(chunk))):
        total = part if total is None else total + part
    assert total is not None
    return total


def _products(vectors: Sequence[torch.Tensor]) -> torch.Tensor:
    blocks = [torch.split(vector.reshape(-1), _BLOCK) for vector in vectors]
    k = len(blocks)
    products = torch.zeros(k, k, dtype=torch.float64)
    for i in range(k):
        for j in range(i + 1):
            dots = [torch.dot(a, b) for a, b in zip(blocks[i], blocks[j], strict=True)]
            products[i, j] = products[j, i] = torch.stack(dots).double().sum() if dots else 0.0
    return products


def combination(coefficients: Sequence[float], vectors: Vectors) -> Blend:
    """Σ cᵢ xᵢ. The first vector's memory is overwritten."""

    def blend(chunk: Chunk) -> torch.Tensor:
        first, *others = vectors(chunk)
        result = first.mul_(coefficients[0])
        for coefficient, other in zip(coefficients[1:], others, strict=True):
            result.add_(other, alpha=coefficient)
        return result

    return blend


def inputs(chunk: Chunk) -> list[torch.Tensor]:
    return chunk.tensors
