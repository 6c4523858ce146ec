"""What zero failures prove, and where the noise of sampled answers comes from."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from finetune.errors import UserError
from finetune.stats.rates import failure_rate_upper_bound, items_to_prove_rate
from finetune.stats.repeats import difference_noise, variance_parts


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


def test_noise_of_a_difference_says_what_more_repeats_could_gain() -> None:
    """The promise is checked against the same questions with ten times the repeats."""
    generator = np.random.default_rng(3)
    questions = generator.normal(0.05, 0.2, 3000)
    samples = questions[:, None] + generator.normal(0.0, 0.4, (3000, 40))
    found = difference_noise(samples[:, :4].tolist())
    assert found is not None
    assert found.repeats == 4
    assert found.sampling_share == pytest.approx(0.04 / 0.08, rel=0.1)
    assert found.standard_error_floor == pytest.approx(0.2 / np.sqrt(3000), rel=0.1)
    assert found.narrower_at_most == pytest.approx(1 - np.sqrt(0.5), rel=0.15)
    more = difference_noise(samples.tolist())
    assert more is not None
    assert found.standard_error_floor < more.standard_error < found.standard_error


def test_clustered_questions_leave_less_for_repeats_to_gain() -> None:
    generator = np.random.default_rng(4)
    clusters = np.repeat(np.arange(100), 5)
    questions = generator.normal(0.0, 0.3, 100)[clusters]
    samples = (questions[:, None] + generator.normal(0.0, 0.5, (500, 3))).tolist()
    alone, together = difference_noise(samples), difference_noise(samples, clusters.tolist())
    assert alone is not None and together is not None
    assert together.standard_error > alone.standard_error
    assert together.narrower_at_most < alone.narrower_at_most
    assert together.sampling == alone.sampling


def test_noise_without_repeats_or_spread() -> None:
    assert difference_noise([[0.0], [1.0], [0.5]]) is None
    assert difference_noise([[0.0, 1.0]]) is None
    assert difference_noise([[0.0, 1.0], [1.0, 0.0]], ["a", "a"]) is None
    still = difference_noise([[0.5, 0.5]] * 10)
    assert still is not None
    assert (still.standard_error, still.sampling_share, still.narrower_at_most) == (0.0, 0.0, 0.0)
    only_sampling = difference_noise([[1.0, -1.0, 1.0], [1.0, -1.0, -1.0]] * 4)
    assert only_sampling is not None
    assert only_sampling.narrower_at_most == 1.0
