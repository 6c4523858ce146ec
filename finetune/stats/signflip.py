"""Permutation test of a paired difference: under 'the arms are interchangeable' every unit's sign is a fair coin.

A unit is an item, or a whole cluster with its summed difference. McNemar's test is the special case of units that
are +1 or -1. The answer depends neither on the order of the units nor on which arm is called A.
"""

from __future__ import annotations

import numpy as np

from finetune.stats.distributions import FloatArray, normal_cdf

_EXACT_UNITS = 16  # 2^16 sign patterns are enumerated in milliseconds
_LATTICE_POINTS = 1 << 21  # whole-number sums up to a million: the exact distribution by one FFT
_RESAMPLES = 20_000
_BLOCK_DRAWS = 4_000_000  # signs drawn at a time: bounds the memory to a few tens of MB


def sign_flip_p_value(differences: FloatArray, *, seed: int = 0, mid: bool = False) -> tuple[float, str]:
    """Two-sided p of H0 'every unit's difference is symmetric about 0', and how it was computed.

    `differences` has shape [units]. `mid` counts half of the probability of the observed sum (mid-p).
    The distribution is exact for whole-number differences (FFT of its characteristic function) and for up to 16
    units (all sign patterns); otherwise 20,000 seeded flips, with the observed pattern counted among them so that p is
    never 0. All differences 0: p = 1.
    """
    size = np.sort(np.abs(differences[differences != 0.0]))
    if size.size == 0:
        return 1.0, "exact"
    observed = abs(float(np.sort(differences).sum()))
    whole = bool(np.all(size == np.rint(size))) and float(size.sum()) < _LATTICE_POINTS / 2
    if whole:
        return _lattice_p_value(size.astype(np.int64), round(observed), mid), "exact"
    tolerance = 1e-9 * float(size.sum())
    if size.size <= _EXACT_UNITS:
        sums = np.abs(_all_sums(size))
        beyond, tied = np.mean(sums > observed + tolerance), np.mean(np.abs(sums - observed) <= tolerance)
        return float(min(1.0, beyond + (0.5 if mid else 1.0) * tied)), "exact"
    return _sampled_p_value(size, observed - tolerance, seed), "seeded"


def _all_sums(size: FloatArray) -> FloatArray:
    """The sums of all 2^units sign patterns."""
    sums = np.zeros(1)
    for value in size:
        sums = np.concatenate((sums + value, sums - value))
    return sums


def _lattice_p_value(size: np.ndarray, observed: int, mid: bool) -> float:
    """Exact tail of Σ ±size for whole sizes, from the product of cosines that is its characteristic function."""
    total = int(size.sum())
    points = 1 << int(np.ceil(np.log2(2 * total + 2)))
    angle = 2.0 * np.pi * np.arange(points // 2 + 1) / points
    values, counts = np.unique(size, return_counts=True)
    characteristic = np.ones_like(angle)
    for value, count in zip(values, counts, strict=True):
        characteristic *= np.cos(value * angle) ** int(count)
    probability = np.fft.irfft(characteristic, n=points)  # index s holds P(sum = s mod points); symmetric
    if observed == 0:
        return 1.0
    tail = 2.0 * float(np.maximum(probability[observed + 1 : total + 1], 0.0).sum())
    at = 2.0 * float(max(probability[observed], 0.0))
    p = tail + (0.5 if mid else 1.0) * at
    if p < 1e-12:  # below the FFT's rounding: the normal tail, which is what remains of it there
        p = float(2.0 * normal_cdf(-observed / np.sqrt(float((size.astype(np.float64) ** 2).sum()))))
    return min(1.0, p)


def _sampled_p_value(size: FloatArray, observed: float, seed: int) -> float:
    generator = np.random.default_rng(seed)
    block = max(1, _BLOCK_DRAWS // size.size)
    beyond, left = 0, _RESAMPLES
    while left:
        draws = min(block, left)
        signs = generator.integers(0, 2, (draws, size.size), dtype=np.int8)
        sums = 2.0 * (signs @ size) - size.sum()
        beyond += int(np.count_nonzero(np.abs(sums) >= observed))
        left -= draws
    return (beyond + 1) / (_RESAMPLES + 1)
