"""McNemar's tests and Tango's interval against published numbers and against an independent inversion of the score test."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize, stats

from finetune.stats.binary import mcnemar, mcnemar_exact, mcnemar_mid_p, score_statistic, tango_interval


def test_bentur_table() -> None:
    """Fagerland, Lydersen & Laake 2013, table of Bentur et al."""
    found = mcnemar(1, 7)
    assert found.exact == pytest.approx(0.0703125, abs=1e-12)
    assert found.mid_p == pytest.approx(0.0390625, abs=1e-12)
    assert found.asymptotic == pytest.approx(0.033895, abs=5e-7)
    assert found.corrected == pytest.approx(0.0771, abs=5e-5)


def test_identical_arms_are_no_evidence() -> None:
    """Where others return p = 0 or NaN."""
    found = mcnemar(0, 0)
    assert (found.exact, found.mid_p, found.asymptotic, found.corrected) == (1.0, 1.0, 1.0, 1.0)
    assert (found.statistic, found.corrected_statistic) == (0.0, 0.0)


def test_statsmodels_tables() -> None:
    found = mcnemar(121, 59)
    assert found.corrected_statistic == pytest.approx(20.67222, abs=5e-6)
    assert found.corrected == pytest.approx(5.450095e-6, rel=1e-6)
    assert found.statistic == pytest.approx(21.35556, abs=5e-6)
    assert found.asymptotic == pytest.approx(3.815136e-6, rel=1e-6)
    assert mcnemar(70, 59).exact == pytest.approx(0.378688, abs=5e-7)


def test_agresti_table() -> None:
    found = mcnemar(150, 86)
    assert found.statistic == pytest.approx(17.3559, abs=5e-5)
    assert found.corrected_statistic == pytest.approx(16.8178, abs=5e-5)
    assert found.corrected == pytest.approx(4.1146e-5, rel=1e-4)


def test_negative_counts_are_a_bug_of_the_caller() -> None:
    with pytest.raises(ValueError, match="negative"):
        mcnemar(-1, 3)


@given(st.integers(0, 400), st.integers(0, 400))
def test_p_values_agree_with_the_binomial_distribution(fixed: int, broken: int) -> None:
    total, smaller = fixed + broken, min(fixed, broken)
    exact = stats.binomtest(smaller, total, 0.5).pvalue if total else 1.0
    assert mcnemar_exact(fixed, broken) == pytest.approx(exact, rel=1e-9)
    mid = 1.0
    if fixed != broken:
        mid = 2 * stats.binom.cdf(smaller, total, 0.5) - stats.binom.pmf(smaller, total, 0.5)
    assert mcnemar_mid_p(fixed, broken) == pytest.approx(mid, rel=1e-9)


def test_arrays_of_tables() -> None:
    fixed, broken = np.array([1, 0, 121]), np.array([7, 0, 59])
    assert mcnemar_mid_p(fixed, broken) == pytest.approx(
        [mcnemar(int(f), int(b)).mid_p for f, b in zip(fixed, broken, strict=True)]
    )


def test_tango_published_interval() -> None:
    low, high = tango_interval(40, 20, 160)
    assert low == pytest.approx(0.03086, abs=5e-6)
    assert high == pytest.approx(0.21806, abs=5e-6)


def brute_force_statistic(fixed: int, broken: int, n: int, delta: float) -> float:
    """The score statistic from its definition: maximise the trinomial likelihood under P(fixed) - P(broken) = delta by
    golden-section search, then (estimate - delta) over the standard error at that maximum."""

    def minus_log_likelihood(share_broken: float) -> float:
        share_fixed = share_broken + delta
        rest = 1 - share_fixed - share_broken
        total = 0.0
        for count, share in ((fixed, share_fixed), (broken, share_broken), (n - fixed - broken, rest)):
            if count:
                total -= count * math.log(max(share, 1e-300))
        return total

    lower, upper = max(0.0, -delta), (1 - delta) / 2
    found = optimize.minimize_scalar(
        minus_log_likelihood, bounds=(lower, upper), method="bounded", options={"xatol": 1e-12}
    )
    share_broken = float(found.x)
    variance = (2 * share_broken + delta - delta**2) / n
    return ((fixed - broken) / n - delta) / math.sqrt(variance)


@pytest.mark.parametrize(
    ("fixed", "broken", "n"),
    [(40, 20, 160), (8, 14, 200), (3, 1, 30), (12, 5, 40), (30, 70, 101), (1, 9, 2000)],
)
def test_tango_is_the_inverted_score_test(fixed: int, broken: int, n: int) -> None:
    low, high = tango_interval(fixed, broken, n)
    z, estimate = stats.norm.ppf(0.975), (fixed - broken) / n
    lower = optimize.brentq(
        lambda d: brute_force_statistic(fixed, broken, n, d) - z, -0.999, estimate - 1e-9, xtol=1e-10
    )
    upper = optimize.brentq(
        lambda d: brute_force_statistic(fixed, broken, n, d) + z, estimate + 1e-9, 0.999, xtol=1e-10
    )
    assert (low, high) == (pytest.approx(lower, abs=2e-6), pytest.approx(upper, abs=2e-6))


def test_score_statistic_at_zero_is_mcnemars() -> None:
    assert score_statistic(121, 59, 314, 0.0) ** 2 == pytest.approx(21.35556, abs=5e-6)


def test_no_discordant_item_still_has_a_margin() -> None:
    low, high = tango_interval(0, 0, 20)
    z2 = stats.norm.ppf(0.975) ** 2
    assert (low, high) == (pytest.approx(-z2 / (20 + z2)), pytest.approx(z2 / (20 + z2)))


def test_extreme_tables_stay_on_the_scale() -> None:
    assert tango_interval(5, 0, 5)[1] == 1.0
    assert tango_interval(0, 5, 5)[0] == -1.0
    assert -1.0 <= tango_interval(1, 0, 1)[0] < tango_interval(1, 0, 1)[1] <= 1.0


@settings(max_examples=60)
@given(st.integers(0, 60), st.integers(0, 60), st.integers(0, 200))
def test_tango_swaps_contains_the_estimate_and_widens(fixed: int, broken: int, concordant: int) -> None:
    n = fixed + broken + concordant
    if n == 0:
        return
    low, high = tango_interval(fixed, broken, n)
    swapped_low, swapped_high = tango_interval(broken, fixed, n)
    assert (low, high) == (pytest.approx(-swapped_high, abs=1e-9), pytest.approx(-swapped_low, abs=1e-9))
    assert low <= (fixed - broken) / n <= high
    wide_low, wide_high = tango_interval(fixed, broken, n, confidence=0.99)
    assert wide_low <= low + 1e-12
    assert wide_high >= high - 1e-12
