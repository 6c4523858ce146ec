"""Permutation test of a paired difference: under 'the arms are interchangeable' every unit's sign is a fair coin.

A unit is an item, or a whole cluster with its summed difference. McNemar's test is the special case of units that
are +1 or -1. The answer depends neither on the order of the units nor on which arm is called A.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from finetune.stats.distributions import FloatArray, normal_cdf

RESAMPLES = 20_000
_EXACT_UNITS = 16  # 2^16 sign patterns are enumerated in milliseconds
_LATTICE_POINTS = 1 << 21  # whole-number sums up to a million: the exact distribution by one FFT
_BLOCK_CELLS = 4_000_000  # signs drawn at a time: bounds the memory to tens of MB


def sign_flip_p_value(differences: FloatArray, *, seed: int = 0, mid: bool = False) -> tuple[float, str]:
    """Two-sided p of H0 'every unit's difference is symmetric about 0', and 'exact' or 'seeded'.

    `differences` has shape [units]. `mid` counts half of the probability of the observed sum (mid-p).
    Exact for whole-number differences (FFT of the characteristic function) and for up to 16 units that are not 0 (all
    sign patterns); otherwise from 20,000 seeded flips, the observed pattern counted among them so that p is never 0.
    All differences 0: p = 1.
    """
    size = np.sort(np.abs(differences))
    size = size[size > 1e-12 * size[-1]] if size.size else size  # sums that cancel up to rounding are 0
    if size.size == 0:
        return 1.0, "exact"
    observed = abs(np.sort(differences).sum().item())
    if bool(np.all(size == np.rint(size))) and size.sum().item() < _LATTICE_POINTS / 2:
        return _lattice_p_value(size.astype(np.int64), round(observed), mid), "exact"
    tolerance = 1e-9 * size.sum().item()
    if size.size <= _EXACT_UNITS:
        sums = np.abs(_all_sums(size))
        beyond = np.count_nonzero(sums > observed + tolerance)
        tied = np.count_nonzero(np.abs(sums - observed) <= tolerance)
        return float(min(1.0, (beyond + (0.5 if mid else 1.0) * tied) / sums.size)), "exact"
    return _sampled_p_value(size, observed - tolerance, seed), "seeded"


def _all_sums(size: FloatArray) -> FloatArray:
    """The sums of all 2^units sign patterns."""
    sums = np.zeros(1)
    for value in size:
        sums = np.concatenate((sums + value, sums - value))
    return sums


def _lattice_p_value(size: npt.NDArray[np.int64], observed: int, mid: bool) -> float:
    """Exact tail of Σ ±size for whole sizes, from the product of cosines that is its characteristic function."""
    if observed == 0:
        return 1.0
    total = int(size.sum())
    points = 1 << (2 * total + 1).bit_length()
    angle = 2.0 * np.pi * np.arange(points // 2 + 1) / points
    values, counts = np.unique(size, return_counts=True)
    characteristic = np.ones_like(angle)
    for value, count in zip(values.tolist(), counts.tolist(), strict=True):
        characteristic *= np.cos(value * angle) ** count
    probability = np.fft.irfft(characteristic, n=points)  # at index s: P(sum = s); symmetric about 0
    tail = 2.0 * float(np.maximum(probability[observed + 1 : total + 1], 0.0).sum())
    p = tail + (1.0 if mid else 2.0) * max(float(probability[observed]), 0.0)
    if p < 1e-11:  # within the rounding of the FFT: bounded by the normal tail, which is what remains there
        p = float(2.0 * normal_cdf(-observed / np.sqrt(float((size.astype(np.float64) ** 2).sum()))))
    return min(1.0, p)


def _sampled_p_value(size: FloatArray, observed: float, seed: int) -> float:
    generator = np.random.default_rng(seed)
    block = max(1, _BLOCK_CELLS // size.size)
    beyond, left = 0, RESAMPLES
    while left:
        draws = min(block, left)
        sums = 2.0 * (generator.integers(0, 2, (draws, size.size), dtype=np.int8) @ size) - size.sum()
        beyond += int(np.count_nonzero(np.abs(sums) >= observed))
        left -= draws
    return (beyond + 1) / (RESAMPLES + 1)
