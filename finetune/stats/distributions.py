"""Quantiles and tail areas, from scipy.special: exact, and a quarter of the import time of scipy.stats.

scipy is imported inside the functions so that importing `finetune.stats` costs no more than numpy.
Every function takes scalars or arrays and broadcasts.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]


def normal_quantile(probability: Any) -> Any:
    """z with P(Z <= z) = probability for a standard normal Z."""
    from scipy.special import ndtri

    return ndtri(probability)


def normal_cdf(z: Any) -> Any:
    """P(Z <= z) for a standard normal Z."""
    from scipy.special import ndtr

    return ndtr(z)


def t_quantile(probability: Any, degrees_of_freedom: Any) -> Any:
    """t with P(T <= t) = probability for Student's t; infinite degrees of freedom give the normal quantile."""
    from scipy.special import ndtri, stdtrit

    dof = np.asarray(degrees_of_freedom, dtype=np.float64)
    finite = np.where(np.isfinite(dof), dof, 1.0)
    return np.where(np.isfinite(dof), stdtrit(finite, probability), ndtri(probability))[()]


def t_two_sided(statistic: Any, degrees_of_freedom: Any) -> Any:
    """P(|T| >= |statistic|) for Student's t (the normal for infinite degrees of freedom)."""
    from scipy.special import ndtr, stdtr

    dof = np.asarray(degrees_of_freedom, dtype=np.float64)
    size = -np.abs(np.asarray(statistic, dtype=np.float64))
    finite = np.where(np.isfinite(dof), dof, 1.0)
    return (2.0 * np.where(np.isfinite(dof), stdtr(finite, size), ndtr(size)))[()]


def fair_coin_cdf(heads: Any, tosses: Any) -> Any:
    """P(X <= heads) for X ~ Binomial(tosses, 1/2); 0 for heads < 0. Counts are whole numbers held as floats."""
    from scipy.special import bdtr

    heads = np.asarray(heads, dtype=np.float64)
    tosses = np.asarray(tosses, dtype=np.float64)
    inside = np.clip(heads, 0, tosses)
    # bdtr is defined through an integer number of trials; the incomplete beta below it is exact to ~1e-15
    return np.where(
        heads < 0, 0.0, np.where(heads >= tosses, 1.0, bdtr(inside, tosses.astype(np.int64), 0.5))
    )[()]
