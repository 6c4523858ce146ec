"""Model stock: how far to trust the average of fine-tuned models, from the angles between them."""

from __future__ import annotations

import itertools

import torch

from finetune.merge.methods.chunk import Blend, Chunk, Chunks, Settings
from finetune.merge.methods.gram import gram


def model_stock(chunks: Chunks, settings: Settings) -> Blend:
    """Model stock (arXiv:2403.19522): θ = t · mean(θᵢ) + (1−t) θ₀, t = k cos θ / (1 + (k−1) cos θ).

    cos θ is the mean over pairs of the angle between θᵢ − θ₀; for each tensor, or with `filter_wise: true` each row.
    paper     t clamped to [0, 1]: with deltas that point apart (cos θ < 0) the base is kept
    mergekit  t as it comes, and 0 where the denominator is below 1e-6: cos θ = −0.9926 of two models gives t = −267
    """
    k = chunks.n_inputs
    if settings.filter_wise:
        by_row = len(chunks.shape) >= 2

        def rows(chunk: Chunk) -> torch.Tensor:
            deltas = chunk.deltas()
            table = torch.stack([(deltas[i] * deltas[j]).sum(-1, keepdim=True) for i, j in _pairs(k)])
            norms = [torch.linalg.vector_norm(delta, dim=-1, keepdim=True) for delta in deltas]
            t = _ratio(_mean_cosine(table, norms, k), k, settings).float()
            return _towards(chunk, deltas, t)

        if by_row:
            return rows
    table = gram(chunks, Chunk.deltas)
    norms = list(table.diagonal().sqrt())
    products = torch.stack([table[i, j] for i, j in _pairs(k)])
    t = float(_ratio(_mean_cosine(products, norms, k), k, settings))
    return lambda chunk: _towards(chunk, chunk.deltas(), t)


def _pairs(k: int) -> list[tuple[int, int]]:
    return list(itertools.combinations(range(k), 2))


def _mean_cosine(products: torch.Tensor, norms: list[torch.Tensor], k: int) -> torch.Tensor:
    cosines = [
        (product / (norms[i] * norms[j]).clamp(min=1e-6)).clamp(-1, 1)
        for product, (i, j) in zip(products, _pairs(k), strict=True)
    ]
    return torch.stack(cosines).mean(dim=0)


def _ratio(cosine: torch.Tensor, k: int, settings: Settings) -> torch.Tensor:
    denominator = 1 + (k - 1) * cosine
    singular = denominator.abs() < 1e-6
    t = torch.where(singular, 0.0, k * cosine / torch.where(singular, 1.0, denominator))
    if settings.dialect == "mergekit":
        return t
    return torch.where(cosine <= 0, 0.0, t.clamp(0, 1))


def _towards(chunk: Chunk, deltas: list[torch.Tensor], t: float | torch.Tensor) -> torch.Tensor:
    """θ₀ + t · mean of the deltas."""
    assert chunk.base is not None
    total = deltas[0]
    for delta in deltas[1:]:
        total.add_(delta)
    return total.mul_(t).div_(len(deltas)).add_(chunk.base)
