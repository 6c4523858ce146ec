"""What all task-vector methods share: sparsify each delta, let the signs of an element agree, add to the base.

Legend: δᵢ = θᵢ − θ₀ after sparsification, wᵢ its weight, γ the elected sign of an element, A = {i : sign(wᵢδᵢ) = γ}.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from finetune.merge.methods.chunk import Blend, Chunk, Chunks, Settings

Sparsify = Callable[[int, torch.Tensor, int], torch.Tensor]
"""(input, its delta in a chunk, elements before the chunk) -> the delta with elements set to zero, and perhaps rescaled.
It may work in place, and gives the same result every time."""


def fuse_deltas(
    chunks: Chunks,
    settings: Settings,
    *,
    sparsify: Sparsify | None = None,
    elect: bool = False,
    normalize: bool = False,
    match_l1: bool = False,
) -> Blend:
    """θ₀ + λ · fused deltas. `normalize` is the method's default; a recipe's setting wins.

    Without election: Σ wᵢδᵢ, divided by Σ wᵢ with `normalize`. With election (`fuse_elected`), only agreeing deltas count.
    `match_l1` multiplies each sparsified delta so that its L1 norm over the tensor is what it was (mergekit's `rescale`).
    """
    divide = normalize if settings.normalize is None else settings.normalize
    factors: list[float] | None = None
    if sparsify is not None and match_l1:
        factors = _l1_factors(chunks, sparsify)
    weights = list(settings.weight)

    def sparse(chunk: Chunk) -> list[torch.Tensor]:
        deltas = chunk.deltas()
        if sparsify is None:
            return deltas
        deltas = [sparsify(i, delta, chunk.offset) for i, delta in enumerate(deltas)]
        return deltas if factors is None else [d.mul_(f) for d, f in zip(deltas, factors, strict=True)]

    majority = 1.0
    if elect and settings.dialect == "paper":
        majority = _majority(chunks, sparse, weights)

    def blend(chunk: Chunk) -> torch.Tensor:
        deltas = sparse(chunk)
        if elect:
            fused = fuse_elected(deltas, weights, settings.dialect, divide, majority)
        else:
            fused = _weighted_sum(deltas, weights)
            total = sum(weights)
            if divide and abs(total) >= 1e-8:
                fused.div_(total)
        if settings.lambda_ != 1:
            fused.mul_(settings.lambda_)
        assert chunk.base is not None
        return fused.add_(chunk.base)

    return blend


def fuse_elected(
    deltas: list[torch.Tensor], weights: list[float], dialect: str, divide: bool, majority: float
) -> torch.Tensor:
    """Sum over A of wᵢδᵢ, with `divide` over the sum of their weights. Overwrites the deltas.

    paper     γ = sign(Σ wᵢδᵢ), and the tensor's majority sign where the sum is zero; divided by Σ_A |wᵢ|
    mergekit  γ = sign(Σ wᵢδᵢ), + where the sum is zero; divided by Σ_A wᵢ
    peft      γ = sign(Σ δᵢ), + where the sum is zero; divided by the number of A
    """
    unweighted = dialect == "peft"
    if not unweighted:
        deltas = [delta.mul_(weight) for delta, weight in zip(deltas, weights, strict=True)]
    total = deltas[0].clone()
    for delta in deltas[1:]:
        total.add_(delta)
    sign = _signs(total, majority)
    fused: torch.Tensor | None = None
    divisor: torch.Tensor | None = None
    for delta, weight in zip(deltas, weights, strict=True):
        # What agrees is positive here; masks of truth values would cost more than all the rest.
        agreeing = delta.mul_(sign).clamp_(min=0)
        if divide:
            share = agreeing.sign()
            share.mul_({"mergekit": weight, "paper": abs(weight), "peft": 1.0}[dialect])
            divisor = share if divisor is None else divisor.add_(share)
        if unweighted:
            agreeing.mul_(weight)
        fused = agreeing if fused is None else fused.add_(agreeing)
    assert fused is not None
    if divisor is not None:
        fused.div_(_nonzero(divisor, all(weight >= 0 for weight in weights)))
    return fused.mul_(sign)


def _signs(total: torch.Tensor, majority: float) -> torch.Tensor:
    """±1 in the memory of `total`; the majority's sign where it is zero. (−0 + 0 = 0, and copysign tells ±0 apart.)"""
    one = torch.ones(())
    if majority < 0:
        return torch.copysign(one, total.neg_().add_(0.0), out=total).neg_()
    return torch.copysign(one, total.add_(0.0), out=total)


def _nonzero(divisor: torch.Tensor, positive: bool) -> torch.Tensor:
    """Zeros, where nothing agrees and nothing is to be divided, become another number."""
    return divisor.clamp_(min=1e-37) if positive else divisor.masked_fill_(divisor == 0, 1.0)


def _weighted_sum(deltas: list[torch.Tensor], weights: list[float]) -> torch.Tensor:
    total = deltas[0].mul_(weights[0])
    for delta, weight in zip(deltas[1:], weights[1:], strict=True):
        total.add_(delta, alpha=weight)
    return total


def _l1_factors(chunks: Chunks, sparsify: Sparsify) -> list[float]:
    """Σ|δ| before over after sparsification, for each input; 1 where either is below 1e-7."""

    def norms(chunk: Chunk) -> torch.Tensor:
        pairs = []
        for i, delta in enumerate(chunk.deltas()):
            before = delta.abs().sum()
            pairs.append(torch.stack([before, sparsify(i, delta, chunk.offset).abs().sum()]))
        return torch.stack(pairs).double()

    total: torch.Tensor | None = None
    for part in chunks.map(norms):
        total = part if total is None else total + part
    assert total is not None
    return [
        1.0 if before < 1e-7 or after < 1e-7 else before / after
        for before, after in ((float(b), float(a)) for b, a in total)
    ]


def _majority(chunks: Chunks, sparse: Callable[[Chunk], list[torch.Tensor]], weights: list[float]) -> float:
    """The sign that most elements of the fused tensor have, +1 on a draw: as the authors of TIES break zero sums.

    It matters only where deltas cancel exactly, and makes merge(−δ) = −merge(δ).
    """

    def balance(chunk: Chunk) -> tuple[int, int]:
        total = _weighted_sum(sparse(chunk), weights)
        return int(torch.count_nonzero(total > 0)), int(torch.count_nonzero(total < 0))

    parts = list(chunks.map(balance))
    return 1.0 if sum(up for up, _ in parts) >= sum(down for _, down in parts) else -1.0
