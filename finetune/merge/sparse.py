"""TIES and DARE on whole deltas of one tensor. Pure functions; deltas [k, out, in] in fp32, weights [k].

Both act on what the adapters really add (s·BA, DoRA's rescaling included), never on A and B apart: the product of two
trimmed factors is not the trimmed product.
"""

from __future__ import annotations

import torch


def ties(deltas: torch.Tensor, weights: torch.Tensor, density: float) -> torch.Tensor:
    """TIES-merging (arXiv:2306.01708) of one tensor: trim, elect a sign, average those that agree; [out, in].

    Of each delta the `density` share with the largest magnitude is kept, within this tensor. The elected sign of an
    element is that of Σ wᵢ δᵢ; where the sum is exactly zero, the sign that most elements of the tensor have, as in the
    authors' code, so that ties(−δ) = −ties(δ). The result is Σ wᵢ δᵢ / Σ wᵢ over the agreeing ones, times Σ wᵢ over
    all: one delta at weight w and density 1 gives w·δ.
    """
    trimmed = torch.stack([trim(delta, density) for delta in deltas])
    shaped = weights.reshape(-1, *([1] * (deltas.dim() - 1))).to(deltas)
    sign = (shaped * trimmed).sum(0).sign()
    majority = sign.sum().sign()
    sign = torch.where(sign == 0, majority if majority != 0 else torch.ones_like(majority), sign)
    agreeing = (trimmed.sign() * shaped.sign() == sign) & (trimmed != 0)
    summed = (shaped * trimmed * agreeing).sum(0)
    divisor = (shaped.abs() * agreeing).sum(0)
    return torch.where(divisor > 0, summed / divisor.clamp(min=1e-30), 0.0) * weights.abs().sum().to(deltas)


def trim(delta: torch.Tensor, density: float) -> torch.Tensor:
    """`delta` with all but its round(density · n) largest magnitudes set to zero; ties at the threshold are kept."""
    n_kept = round(density * delta.numel())
    if n_kept >= delta.numel():
        return delta
    if n_kept == 0:
        return torch.zeros_like(delta)
    magnitude = delta.abs()
    threshold = magnitude.flatten().kthvalue(delta.numel() - n_kept + 1).values
    return torch.where(magnitude >= threshold, delta, 0.0)


def drop_and_rescale(delta: torch.Tensor, density: float, generator: torch.Generator) -> torch.Tensor:
    """DARE (arXiv:2311.03099): each element survives with probability `density` and is divided by it.

    The expectation is `delta`. The draw is made on the CPU from `generator`, so that it is the same on every device.
    """
    kept = torch.rand(delta.shape, generator=generator) < density
    return torch.where(kept.to(delta.device), delta / density, 0.0)
