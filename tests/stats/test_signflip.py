"""The sign-flip test against enumeration, McNemar and scipy."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from finetune.stats.binary import mcnemar_exact, mcnemar_mid_p
from finetune.stats.signflip import sign_flip_p_value


def enumerated(differences: list[float], mid: bool) -> float:
    observed = abs(sum(differences))
    sums = [abs(sum(s * d for s, d in zip(signs, differences, strict=True)))
            for signs in itertools.product((-1, 1), repeat=len(differences))]  # fmt: skip
    beyond = sum(value > observed + 1e-9 for value in sums)
    tied = sum(abs(value - observed) <= 1e-9 for value in sums)
    return (
        min(1.0, (beyond + (0.5 if mid else 1.0) * tied) / len(sums)) if observed > 1e-12 or not mid else 1.0
    )


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(-6, 6), min_size=1, max_size=10), st.booleans())
def test_whole_numbers_against_enumeration(differences: list[int], mid: bool) -> None:
    found, how = sign_flip_p_value(np.array(differences, dtype=float), mid=mid)
    expected = 1.0 if sum(differences) == 0 else enumerated([float(d) for d in differences], mid)
    assert how == "exact"
    assert found == pytest.approx(expected, abs=1e-10)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.floats(-1, 1).filter(lambda x: abs(x) > 1e-3), min_size=1, max_size=9))
def test_graded_differences_against_enumeration(differences: list[float]) -> None:
    found, how = sign_flip_p_value(np.array(differences))
    assert how == "exact"
    assert found == pytest.approx(enumerated(differences, False), abs=1e-9)


@given(st.integers(0, 300), st.integers(0, 300))
@settings(max_examples=40, deadline=None)
def test_mcnemar_is_the_special_case(fixed: int, broken: int) -> None:
    differences = np.array([1.0] * fixed + [-1.0] * broken + [0.0] * 5)
    assert sign_flip_p_value(differences, mid=True)[0] == pytest.approx(
        mcnemar_mid_p(fixed, broken), abs=1e-9
    )
    assert sign_flip_p_value(differences)[0] == pytest.approx(mcnemar_exact(fixed, broken), abs=1e-9)


def test_many_graded_units_against_scipy() -> None:
    differences = np.random.default_rng(0).normal(0.25, 1.0, 40)
    found, how = sign_flip_p_value(differences, seed=1)
    reference = stats.permutation_test(
        (differences,), np.sum, permutation_type="samples", n_resamples=20_000, rng=np.random.default_rng(2)
    ).pvalue
    assert how == "seeded"
    assert found == pytest.approx(reference, abs=0.015)
    assert found == sign_flip_p_value(differences, seed=1)[0]
    assert found != sign_flip_p_value(differences, seed=2)[0]


def test_no_difference_is_no_evidence() -> None:
    assert sign_flip_p_value(np.zeros(5)) == (1.0, "exact")
    assert sign_flip_p_value(np.zeros(0)) == (1.0, "exact")
    assert sign_flip_p_value(np.array([0.3, -0.3]))[0] == 1.0


def test_overwhelming_evidence_is_tiny_and_never_zero() -> None:
    found, _ = sign_flip_p_value(np.ones(500))
    assert 0.0 < found < 1e-11
    seeded, how = sign_flip_p_value(np.linspace(0.5, 1.0, 60))
    assert how == "seeded"
    assert seeded == pytest.approx(1 / 20_001)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.floats(-1, 1), min_size=17, max_size=25), st.randoms(use_true_random=False))
def test_order_and_direction_change_nothing(differences: list[float], random: object) -> None:
    found = sign_flip_p_value(np.array(differences))[0]
    shuffled = list(differences)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert sign_flip_p_value(np.array(shuffled))[0] == found
    assert sign_flip_p_value(-np.array(differences))[0] == pytest.approx(found, abs=1e-3)
