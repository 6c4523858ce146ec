"""Low-rank factors: exact sums, truncation with its error, spectra. Pure tensor functions in fp32 and fp64.

Shapes: W [out, in], A [r, in], B [out, r], Δ = B A. By Eckart and Young (1936) the best approximation of rank r in the
Frobenius norm keeps the r largest singular values σ, and leaves the error √(Σ_{i>r} σᵢ²).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Factors:
    """Δ = b a, scaled fully: alpha equals the rank."""

    a: torch.Tensor
    b: torch.Tensor

    @property
    def rank(self) -> int:
        return self.a.shape[0]


@dataclass(frozen=True, slots=True)
class Truncation:
    """Factors of the wished rank, all singular values [min(out, in)] in falling order, and squared norms.

    `total_squares` is ‖Δ‖², `error_squares` ‖Δ − b a‖², both in the Frobenius norm.
    """

    factors: Factors
    singular_values: torch.Tensor
    total_squares: float
    error_squares: float


def concatenate(parts: Sequence[Factors], weights: Sequence[float]) -> Factors:
    """Factors of Σ wᵢ bᵢ aᵢ, exact: ranks add. (Adding the A and the B apart would add cross terms bᵢ aⱼ.)"""
    scaled = [weight * part.b for weight, part in zip(weights, parts, strict=True)]
    return Factors(torch.cat([part.a for part in parts], dim=0), torch.cat(scaled, dim=1))


def truncate(delta: torch.Tensor, rank: int) -> Truncation:
    """The best factors of `delta` [out, in] with at most `rank` columns, √σ on either side."""
    left, sigma, right = torch.linalg.svd(delta.double(), full_matrices=False)
    return _truncation(left, sigma, right, rank)


def truncate_factors(factors: Factors, rank: int) -> Truncation:
    """Like `truncate` of the product, without forming it: QR of either side, SVD of the [r, r] core."""
    q_left, r_left = torch.linalg.qr(factors.b.double())
    q_right, r_right = torch.linalg.qr(factors.a.double().T)
    left, sigma, right = torch.linalg.svd(r_left @ r_right.T, full_matrices=False)
    return _truncation(q_left @ left, sigma, right @ q_right.T, rank)


def _truncation(left: torch.Tensor, sigma: torch.Tensor, right: torch.Tensor, rank: int) -> Truncation:
    root = sigma[:rank].sqrt()
    factors = Factors(
        (root.unsqueeze(1) * right[:rank]).float().contiguous(), (left[:, :rank] * root).float().contiguous()
    )
    squares = sigma.square()
    return Truncation(factors, sigma, float(squares.sum()), float(squares[rank:].sum()))
