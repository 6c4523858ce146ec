"""Student's sleep data: the paired t test, the exact permutation test, and what ignoring the pairing would say."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from finetune.errors import UserError
from finetune.stats import compare
from finetune.stats.paired import paired_t, welch_t
from finetune.stats.signflip import sign_flip_p_value

DRUG_1 = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]
DRUG_2 = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]


def test_sleep_paired() -> None:
    found = paired_t(DRUG_2, DRUG_1)
    assert found.t == pytest.approx(-4.0621, abs=5e-5)
    assert found.p_value == pytest.approx(0.002833, abs=5e-7)
    assert (found.low, found.high) == (pytest.approx(-2.4599, abs=5e-5), pytest.approx(-0.7001, abs=5e-5))


def test_sleep_permutation() -> None:
    found, how = sign_flip_p_value(np.array(DRUG_1) - np.array(DRUG_2))
    assert how == "exact"
    assert found == pytest.approx(0.00390625, abs=1e-12)


def test_sleep_unpaired() -> None:
    assert welch_t(DRUG_2, DRUG_1).p_value == pytest.approx(0.0794, abs=5e-5)


def test_sleep_compared() -> None:
    """Ten items: the exact permutation decides, the interval is Student's."""
    found = compare(DRUG_2, DRUG_1)
    assert found.verdict == "regressed"
    assert found.test == "sign-flip permutation of items (exact)"
    assert found.p_value == pytest.approx(0.00390625, abs=1e-12)
    assert (found.low, found.high) == (pytest.approx(-2.4599, abs=5e-5), pytest.approx(-0.7001, abs=5e-5))
    assert found.scale == "score"
    assert "points" not in found.limits()


def test_against_scipy() -> None:
    generator = np.random.default_rng(0)
    a, b = generator.normal(size=25), generator.normal(0.3, 2.0, size=40)
    reference = stats.ttest_ind(b, a, equal_var=False)
    found = welch_t(a, b)
    interval = reference.confidence_interval()
    assert (found.t, found.p_value) == (pytest.approx(reference.statistic), pytest.approx(reference.pvalue))
    assert (found.low, found.high) == (pytest.approx(interval.low), pytest.approx(interval.high))
    assert paired_t(a, b[:25]).p_value == pytest.approx(stats.ttest_rel(b[:25], a).pvalue)


def test_degenerate_arms() -> None:
    assert paired_t([1.0, 2.0, 3.0], [1.0, 2.0, 3.0]).p_value == 1.0
    assert welch_t([1.0, 1.0], [1.0, 1.0]).p_value == 1.0
    assert paired_t([1.0, 2.0], [2.0, 3.0]).p_value == 0.0
    with pytest.raises(UserError, match="at least 2"):
        paired_t([1.0], [2.0])
    with pytest.raises(UserError, match="arm A has 2 items and arm B 3"):
        paired_t([1.0, 2.0], [2.0, 3.0, 4.0])
    with pytest.raises(UserError, match="at least 2"):
        welch_t([1.0, 2.0], [2.0])
