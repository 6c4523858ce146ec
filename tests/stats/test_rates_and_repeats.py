"""What zero failures prove, and where the noise of sampled answers comes from."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from finetune.errors import UserError
from finetune.stats.rates import failure_rate_upper_bound, items_to_prove_rate
from finetune.stats.repeats import variance_parts


@pytest.mark.parametrize(("n", "bound"), [(30, 0.095), (50, 0.058), (40, 0.072)])
def test_zero_failures(n: int, bound: float) -> None:
    assert failure_rate_upper_bound(0, n) == pytest.approx(bound, abs=5e-4)


def test_some_failures_against_scipy() -> None:
    expected = stats.binomtest(3, 40, alternative="less").proportion_ci(0.95, method="exact").high
    assert failure_rate_upper_bound(3, 40) == pytest.approx(expected)
    assert failure_rate_upper_bound(40, 40) == 1.0


def test_items_to_prove_a_rate() -> None:
    n = items_to_prove_rate(0.05)
    assert failure_rate_upper_bound(0, n) <= 0.05 < failure_rate_upper_bound(0, n - 1)


def test_bad_rates() -> None:
    for failures, n in ((0, 0), (3, 2), (-1, 5)):
        with pytest.raises(UserError, match="make no rate"):
            failure_rate_upper_bound(failures, n)
    with pytest.raises(UserError, match="rate"):
        items_to_prove_rate(0.0)


def test_variance_is_split_as_it_was_made() -> None:
    generator = np.random.default_rng(0)
    questions = generator.normal(0.6, 0.2, 4000)
    samples = questions[:, None] + generator.normal(0.0, 0.3, (4000, 5))
    parts = variance_parts(samples.tolist())
    assert parts.question == pytest.approx(0.04, rel=0.08)
    assert parts.sampling == pytest.approx(0.09, rel=0.05)
    assert parts.sampling_share == pytest.approx(0.018 / 0.058, rel=0.08)
    assert parts.standard_error == pytest.approx(samples.mean(axis=1).std(ddof=1) / np.sqrt(4000))
    assert (parts.n, parts.samples) == (4000, pytest.approx(5.0))


def test_parts_add_up_to_the_variance_of_the_means() -> None:
    parts = variance_parts([[0.4, 0.6], [1.0, 1.0], [0.2, 0.3], [0.9, 0.1]])
    means = np.array([0.5, 1.0, 0.25, 0.5])
    assert parts.question + parts.sampling / 2 == pytest.approx(means.var(ddof=1))
    assert parts.standard_error**2 * 4 == pytest.approx(means.var(ddof=1))


def test_pure_sampling_noise_leaves_no_question_noise() -> None:
    parts = variance_parts([[0.0, 1.0], [0.0, 1.0], [1.0, 0.0]])
    assert parts.question == 0.0
    assert parts.sampling == 0.5
    assert parts.sampling_share == 0.0  # the observed means do not vary at all


def test_single_samples_say_nothing_about_sampling() -> None:
    parts = variance_parts([[0.0], [1.0], [1.0]])
    assert (parts.sampling, parts.sampling_share) == (0.0, 0.0)
    assert parts.question == pytest.approx(1 / 3)


def test_bad_samples() -> None:
    with pytest.raises(UserError, match="at least two questions"):
        variance_parts([[1.0, 0.0]])
    with pytest.raises(UserError, match="at least two questions"):
        variance_parts([[1.0], []])
    with pytest.raises(UserError, match="not a finite number"):
        variance_parts([[1.0], [float("nan")]])
