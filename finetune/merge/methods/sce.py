"""SCE: select elements by variance, weigh models by energy, erase minority signs."""

from __future__ import annotations

import torch

from finetune.merge.methods.chunk import Blend, Chunk, Chunks, Settings
from finetune.merge.methods.select import order_statistics


def sce(chunks: Chunks, settings: Settings) -> Blend:
    """SCE-merging (FuseChat, arXiv:2408.07990) on deltas δᵢ = θᵢ − θ₀ of one tensor.

    Select the `select_topk` share of the elements with the largest variance over models (of those that vary at all);
    weigh model i by Σδᵢ²/Σⱼ Σδⱼ² of the selection; erase the elements whose sign is not that of Σ δᵢ; average the rest by
    weight. On a zero sum `mergekit` keeps the positive side, `paper` none.
    """
    threshold = _variance_threshold(chunks, settings.select_topk) if settings.select_topk < 1 else 0.0

    def selected(chunk: Chunk) -> list[torch.Tensor]:
        deltas = chunk.deltas()
        if threshold <= 0:
            return deltas
        mask = _variance(deltas) >= threshold
        return [delta.mul_(mask) for delta in deltas]

    energy: torch.Tensor | None = None
    for part in chunks.map(lambda c: torch.stack([d.square().sum() for d in selected(c)]).double()):
        energy = part if energy is None else energy + part
    assert energy is not None
    n = 1
    for extent in chunks.shape:
        n *= extent
    mean = energy / max(n, 1)
    smallest = 1e-6 if settings.dialect == "mergekit" else 0.0
    if float(mean.sum()) <= smallest:
        weights = [1 / chunks.n_inputs] * chunks.n_inputs
    else:
        weights = [float(w) for w in mean / mean.sum()]

    def blend(chunk: Chunk) -> torch.Tensor:
        deltas = selected(chunk)
        total = deltas[0].clone()
        for delta in deltas[1:]:
            total.add_(delta)
        sign = total.sign_()
        if settings.dialect == "mergekit":
            sign.masked_fill_(sign == 0, 1.0)
        fused, divisor = torch.zeros_like(sign), torch.zeros_like(sign)
        for delta, weight in zip(deltas, weights, strict=True):
            agrees = (delta * sign > 0).float()
            fused.add_(delta.mul_(agrees), alpha=weight)
            divisor.add_(agrees, alpha=weight)
        assert chunk.base is not None
        return fused.div_(divisor.clamp_(min=1e-6)).add_(chunk.base)

    return blend


def _variance(deltas: list[torch.Tensor]) -> torch.Tensor:
    """Element by element in a fixed order, so that a value does not depend on the chunk it is computed in."""
    k = len(deltas)
    mean = deltas[0].clone()
    for delta in deltas[1:]:
        mean.add_(delta)
    mean.div_(k)
    total = (deltas[0] - mean).square_()
    for delta in deltas[1:]:
        total.add_((delta - mean).square_())
    return total.div_(k)


def _variance_threshold(chunks: Chunks, share: float) -> float:
    """The smallest variance that is still selected; infinity when none is."""
    varying = sum(chunks.map(lambda chunk: int(torch.count_nonzero(_variance(chunk.deltas())))))
    kept = int(varying * share)
    if kept <= 0:
        return float("inf")
    n = 1
    for extent in chunks.shape:
        n *= extent
    return order_statistics(chunks, lambda chunk: [_variance(chunk.deltas())], [[n - kept]])[0][0]
