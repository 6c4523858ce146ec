"""Methods on task vectors δᵢ = θᵢ − θ₀: task arithmetic, TIES, DARE, DELLA and breadcrumbs."""

from __future__ import annotations

import torch
from torch.nn import functional

from finetune.merge.methods.chunk import Blend, Chunk, Chunks, Settings
from finetune.merge.methods.deltas import Sparsify, fuse_deltas
from finetune.merge.methods.draw import below, uniform
from finetune.merge.methods.select import n_kept, order_statistics


def task_arithmetic(chunks: Chunks, settings: Settings) -> Blend:
    """Task arithmetic (arXiv:2212.04089): θ₀ + λ Σ wᵢ δᵢ; negative weights forget a task. All dialects agree."""
    return fuse_deltas(chunks, settings)


def ties(chunks: Chunks, settings: Settings) -> Blend:
    """TIES-merging (arXiv:2306.01708): trim each δᵢ to its largest magnitudes, elect a sign, average what agrees.

    `density` is the share kept: of the whole model in `paper` (`settings.thresholds`, when the plan measured them), of
    this tensor in `mergekit` and `peft`. `rescale: true` restores the L1 norm of each trimmed delta. Elements as large as the last kept one are all kept, as in the authors' code.
    """
    sparsify, match = _trim(chunks, settings), bool(settings.rescale)
    return fuse_deltas(chunks, settings, sparsify=sparsify, elect=True, normalize=True, match_l1=match)


def dare_linear(chunks: Chunks, settings: Settings) -> Blend:
    """DARE (arXiv:2311.03099): each element of δᵢ survives with probability `density`, survivors are scaled up; summed.

    paper, peft  survivors divided by `density`, so that the expectation is δᵢ
    mergekit     survivors scaled so that the tensor's L1 norm is what it was, which for deltas of very unequal size is
                 another number
    """
    sparsify, match = _drop(settings)
    return fuse_deltas(chunks, settings, sparsify=sparsify, match_l1=match)


def dare_ties(chunks: Chunks, settings: Settings) -> Blend:
    """DARE (arXiv:2311.03099) followed by the sign election of TIES.

    `paper` and `peft` average the agreeing deltas as TIES does, `mergekit` sums them (its `normalize: false`).
    """
    sparsify, match = _drop(settings)
    divide = settings.dialect != "mergekit"
    return fuse_deltas(chunks, settings, sparsify=sparsify, elect=True, normalize=divide, match_l1=match)


def della(chunks: Chunks, settings: Settings) -> Blend:
    """DELLA (arXiv:2406.11617): in each row, survival grows with the rank of the magnitude; then elect and average.

    The element of rank r (0 smallest, n−1 largest of its row) survives with probability
    pᵣ = density − ε + 2ε·r/(n−1), so ε (`epsilon`) is half the paper's window.
    paper     survivors divided by their own pᵣ, so that the expectation is δᵢ
    mergekit  survivors scaled by one number for the tensor, which matches the L1 norm: on average small elements come out
              at 0.65 and large ones at 1.13 of themselves
    """
    sparsify, match = _rank_drop(settings)
    return fuse_deltas(chunks, settings, sparsify=sparsify, elect=True, normalize=True, match_l1=match)


def della_linear(chunks: Chunks, settings: Settings) -> Blend:
    """DELLA (arXiv:2406.11617) without the election: θ₀ + λ Σ wᵢ δᵢ of the dropped and rescaled deltas."""
    sparsify, match = _rank_drop(settings)
    return fuse_deltas(chunks, settings, sparsify=sparsify, match_l1=match)


def breadcrumbs(chunks: Chunks, settings: Settings) -> Blend:
    """Model breadcrumbs (arXiv:2312.06795): of each tensor's δᵢ, drop the `gamma` largest magnitudes and then the smallest,
    so that the share `density` is left; θ₀ + λ Σ wᵢ δᵢ. All dialects agree.
    """
    return fuse_deltas(chunks, settings, sparsify=_band(chunks, settings), match_l1=bool(settings.rescale))


def breadcrumbs_ties(chunks: Chunks, settings: Settings) -> Blend:
    """Model breadcrumbs (arXiv:2312.06795) followed by the sign election of TIES, summed."""
    sparsify, match = _band(chunks, settings), bool(settings.rescale)
    return fuse_deltas(chunks, settings, sparsify=sparsify, elect=True, match_l1=match)


def keep_from(delta: torch.Tensor, threshold: float) -> torch.Tensor:
    """A copy with every element of a magnitude below `threshold` set to zero; NaN stays."""
    # hardshrink keeps what is larger than its limit, in one pass: the limit is the next smaller fp32 number.
    limit = torch.nextafter(torch.tensor(threshold, dtype=torch.float32), torch.tensor(0.0))
    return functional.hardshrink(delta, float(limit))


def _magnitudes(chunk: Chunk) -> list[torch.Tensor]:
    return [delta.abs_() for delta in chunk.deltas()]


def _trim(chunks: Chunks, settings: Settings) -> Sparsify | None:
    n = _n_elements(chunks)
    thresholds = settings.thresholds
    if thresholds is None:
        if all(density >= 1 for density in settings.density):
            return None
        kept = [n_kept(density, n) for density in settings.density]
        found = order_statistics(chunks, _magnitudes, [[n - k] if k else [] for k in kept])
        thresholds = tuple(values[0] if values else float("inf") for values in found)

    def sparsify(i: int, delta: torch.Tensor, offset: int) -> torch.Tensor:
        threshold = thresholds[i]
        return delta if threshold <= 0 else keep_from(delta, threshold)

    return sparsify


def _band(chunks: Chunks, settings: Settings) -> Sparsify | None:
    if all(density >= 1 for density in settings.density):
        return None
    n = _n_elements(chunks)
    ranks = []
    for density, gamma in zip(settings.density, settings.gamma, strict=True):
        kept = int(density * n)
        lowest = max(0, n - kept - int(gamma * n))
        ranks.append([lowest, lowest + kept - 1] if kept > 0 else [])
    limits = order_statistics(chunks, _magnitudes, ranks)

    def sparsify(i: int, delta: torch.Tensor, offset: int) -> torch.Tensor:
        if settings.density[i] >= 1:
            return delta
        if not limits[i]:
            return delta.zero_()
        low, high = limits[i]
        kept = keep_from(delta, low)
        # What is larger than `high` is left by the second cut, and taken away.
        return kept.sub_(functional.hardshrink(kept, high))

    return sparsify


def _drop(settings: Settings) -> tuple[Sparsify, bool]:
    """The random drop of DARE, and whether the L1 norm is matched afterwards."""
    match = settings.dialect == "mergekit" and settings.rescale is not False
    divide = settings.dialect != "mergekit" and settings.rescale is not False

    def sparsify(i: int, delta: torch.Tensor, offset: int) -> torch.Tensor:
        density = settings.density[i]
        if density >= 1:
            return delta
        delta.mul_(below(settings.streams[i], offset, delta.shape, density).float())
        return delta.div_(density) if divide and density > 0 else delta

    return sparsify, match


def _rank_drop(settings: Settings) -> tuple[Sparsify, bool]:
    match = settings.dialect == "mergekit" and settings.rescale is not False
    divide = settings.dialect != "mergekit" and settings.rescale is not False

    def sparsify(i: int, delta: torch.Tensor, offset: int) -> torch.Tensor:
        density, epsilon = settings.density[i], settings.epsilon[i]
        if density >= 1:
            return delta
        if density <= 0:
            return delta.zero_()
        rows = delta.reshape(1, -1) if delta.dim() < 2 else delta.reshape(len(delta), -1)
        order = rows.abs().argsort(dim=1, stable=True)
        n = rows.shape[1]
        ramp = torch.arange(n, dtype=torch.float32).div_(max(n - 1, 1))
        ranks = torch.empty_like(rows).scatter_(1, order, ramp.expand_as(rows))
        probability = ranks.mul_(2 * epsilon).add_(density - epsilon).reshape(delta.shape)
        delta.mul_((uniform(settings.streams[i], offset, delta.shape) < probability).float())
        return delta.div_(probability) if divide else delta

    return sparsify, match


def _n_elements(chunks: Chunks) -> int:
    n = 1
    for extent in chunks.shape:
        n *= extent
    return n
