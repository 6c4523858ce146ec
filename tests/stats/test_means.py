"""Intervals of a mean: published Wilson intervals, the chosen method, clusters, and the inputs that break other tools."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from finetune.errors import UserError
from finetune.stats import mean_interval
from finetune.stats.means import bca_interval, wilson_interval


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_newcombe_1998(successes: int, n: int, low: float, high: float) -> None:
    assert wilson_interval(successes, n) == (pytest.approx(low, abs=5e-5), pytest.approx(high, abs=5e-5))
    scores = [1.0] * successes + [0.0] * (n - successes)
    found = mean_interval(scores)
    assert (found.method, found.n) == ("wilson", n)
    assert (found.low, found.high) == (pytest.approx(low, abs=5e-5), pytest.approx(high, abs=5e-5))


def test_many_items_use_the_central_limit_theorem() -> None:
    scores = np.random.default_rng(0).integers(0, 2, 1000)
    found = mean_interval(scores)
    low, high = stats.t.interval(0.95, 999, loc=scores.mean(), scale=stats.sem(scores))
    assert found.method == "clt"
    assert (found.low, found.high) == (pytest.approx(low), pytest.approx(high))


def test_a_rare_outcome_keeps_wilson_at_any_size() -> None:
    found = mean_interval([1.0] * 995 + [0.0] * 5)
    assert found.method == "wilson"
    assert found.high < 1.0
    assert mean_interval([1.0] * 2000).low == pytest.approx(wilson_interval(2000, 2000)[0])


def test_bca_agrees_with_scipy() -> None:
    scores = np.random.default_rng(1).exponential(1.0, 60)
    found = mean_interval(scores)
    reference = stats.bootstrap(
        (scores,), np.mean, method="BCa", n_resamples=20_000, rng=np.random.default_rng(2)
    ).confidence_interval
    width = reference.high - reference.low
    assert found.method == "bca"
    assert found.low == pytest.approx(reference.low, abs=0.05 * width)
    assert found.high == pytest.approx(reference.high, abs=0.05 * width)


def test_bca_is_seeded() -> None:
    scores = np.random.default_rng(1).random(50)
    assert bca_interval(scores, seed=3) == bca_interval(scores[::-1], seed=3)
    assert bca_interval(scores, seed=3) != bca_interval(scores, seed=4)


@pytest.mark.parametrize("value", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("n", [1, 7, 400])
def test_identical_scores_have_a_margin_and_no_nan(value: float, n: int) -> None:
    """A BCa bootstrap of identical scores is NaN elsewhere."""
    found = mean_interval([value] * n)
    assert found.mean == value
    assert 0.0 <= found.low <= value <= found.high <= 1.0
    assert found.low < found.high
    assert all(math.isfinite(end) for end in (found.low, found.high))


def test_identical_scores_off_the_scale() -> None:
    assert mean_interval([7.5, 7.5]).to_dict() == {
        "mean": 7.5,
        "low": 7.5,
        "high": 7.5,
        "n": 2,
        "method": "identical",
    }


def test_equal_clusters_give_the_textbook_formula() -> None:
    generator = np.random.default_rng(5)
    clusters = np.repeat(np.arange(40), 10)
    scores = np.clip(generator.normal(0.5, 0.1, 40)[clusters] + generator.normal(0, 0.1, 400), 0, 1)
    found = mean_interval(scores, clusters=clusters.tolist())
    totals = scores.reshape(40, 10).mean(axis=1)
    low, high = stats.t.interval(0.95, 39, loc=totals.mean(), scale=stats.sem(totals))
    assert found.method == "clustered"
    assert (found.low, found.high) == (pytest.approx(low), pytest.approx(high))


def test_clusters_widen_the_interval() -> None:
    clusters = [index // 20 for index in range(400)]
    scores = [float(cluster % 2) for cluster in clusters]
    alone, together = mean_interval(scores), mean_interval(scores, clusters=clusters)
    assert together.high - together.low > 3 * (alone.high - alone.low)


def test_clusters_of_one_item_are_no_clusters() -> None:
    scores = np.random.default_rng(0).random(50)
    assert mean_interval(scores, clusters=list(range(50))) == mean_interval(scores)


def test_perfect_score_in_clusters_has_a_margin() -> None:
    found = mean_interval([1.0] * 200, clusters=[index // 5 for index in range(200)])
    assert found.method == "clustered wilson"
    assert 0.85 < found.low < 0.95
    assert found.high == 1.0


def test_one_cluster_proves_nothing() -> None:
    found = mean_interval([1.0, 0.0, 1.0], clusters=["t", "t", "t"])
    assert (found.low, found.high) == (0.0, 1.0)
    with pytest.raises(UserError, match="one cluster"):
        mean_interval([3.0, 5.0], clusters=["t", "t"])


def test_repeated_samples_are_averaged_per_item() -> None:
    assert mean_interval([[0.0, 1.0], [1.0, 1.0], [0.25, 0.5]]) == mean_interval([0.5, 1.0, 0.375])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([], "empty"),
        ([0.5, float("nan")], "not finite"),
        ([float("inf")], "not finite"),
        (["x"], "not numbers"),
        ([[[1.0]]], "shape"),
    ],
)
def test_bad_scores(values: list[object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        mean_interval(values)


def test_bad_clusters_and_confidence() -> None:
    with pytest.raises(UserError, match="2 cluster labels for 3 items"):
        mean_interval([0.0, 1.0, 1.0], clusters=["a", "b"])
    with pytest.raises(UserError, match="no cluster label"):
        mean_interval([0.0, 1.0, 1.0], clusters=["a", None, "b"])
    with pytest.raises(UserError, match="write 95 %"):
        mean_interval([0.0, 1.0], confidence=95)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=40), st.randoms(use_true_random=False))
def test_order_of_items_changes_nothing(scores: list[float], random: object) -> None:
    shuffled = list(scores)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert mean_interval(shuffled) == mean_interval(scores)
