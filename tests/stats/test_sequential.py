"""The e-process: its value, its decision, and its promise under repeated looks."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import special

from finetune.errors import UserError
from finetune.stats.binary import mcnemar_mid_p
from finetune.stats.compare import compare
from finetune.stats.sequential import EProcess, log_betting_value, sequential_compare


@pytest.mark.parametrize(("fixed", "broken"), [(0, 0), (1, 0), (7, 3), (40, 20)])
def test_value_by_definition(fixed: int, broken: int) -> None:
    expected = special.beta(fixed + 0.5, broken + 0.5) / special.beta(0.5, 0.5) * 2.0 ** (fixed + broken)
    process = EProcess(fixed=fixed, broken=broken)
    assert process.e_value == pytest.approx(expected)
    assert process.p_value == pytest.approx(min(1.0, 1.0 / expected))


def test_it_is_a_martingale() -> None:
    """Under equal arms the value after one more discordant item is on average what it was."""
    for fixed, broken in ((0, 0), (3, 5), (12, 4)):
        now = math.exp(EProcess.log_e_value(fixed, broken))
        later = (
            math.exp(EProcess.log_e_value(fixed + 1, broken))
            + math.exp(EProcess.log_e_value(fixed, broken + 1))
        ) / 2
        assert later == pytest.approx(now)


def test_decides_in_the_right_direction_and_only_when_sure() -> None:
    process = EProcess()
    assert process.decision is None
    process.update(fixed=4, broken=4)
    assert process.decision is None
    process.update(fixed=40, broken=2)
    assert process.decision == "improved"
    assert EProcess(fixed=2, broken=40).decision == "regressed"
    assert EProcess(alpha=0.0001, fixed=14, broken=2).decision is None


def test_overwhelming_evidence_does_not_overflow() -> None:
    process = EProcess(fixed=5000, broken=10)
    assert math.isfinite(process.e_value)
    assert 0.0 < process.p_value < 1e-100


def test_peeking_keeps_the_promise_that_a_fixed_test_breaks() -> None:
    """2,000 equal items, 20 % discordant: a fixed-n test after every 100 items against the e-process after every item."""
    generator = np.random.default_rng(0)
    discordant = generator.random((1000, 2000)) < 0.2
    fixed = (discordant & (generator.random((1000, 2000)) < 0.5)).cumsum(axis=1)
    broken = discordant.cumsum(axis=1) - fixed
    looks = slice(99, None, 100)
    naive = (mcnemar_mid_p(fixed[:, looks], broken[:, looks]) <= 0.05).any(axis=1).mean()
    process = (EProcess.log_e_value(fixed, broken) >= math.log(20)).any(axis=1).mean()
    assert naive == pytest.approx(0.239, abs=0.04)
    assert process == pytest.approx(0.033, abs=0.017)
    assert process <= 0.05


def test_bad_use() -> None:
    with pytest.raises(UserError, match="alpha"):
        EProcess(alpha=5)
    with pytest.raises(ValueError, match="negative"):
        EProcess().update(-1, 0)


def _arms(fixed: int, broken: int, alike: int) -> tuple[list[float], list[float]]:
    return (
        [0.0] * fixed + [1.0] * broken + [1.0] * alike,
        [1.0] * fixed + [0.0] * broken + [1.0] * alike,
    )


@pytest.mark.parametrize(
    "counts", [(0, 0, 5), (7, 3, 20), (40, 2, 100), (3, 30, 7), (1, 0, 0), (400, 300, 300)]
)
def test_independent_items_give_the_e_process_and_an_interval_that_agrees_with_it(
    counts: tuple[int, int, int],
) -> None:
    found = sequential_compare(*_arms(*counts))
    process = EProcess(fixed=counts[0], broken=counts[1])
    assert found.e_value == pytest.approx(process.e_value, rel=1e-9)
    assert found.p_value == pytest.approx(process.p_value, rel=1e-9)
    assert found.is_decided == (process.decision is not None) == (not found.low <= 0.0 <= found.high)
    assert found.low <= found.difference <= found.high
    fixed_n = compare(*_arms(*counts))
    assert found.high - found.low > fixed_n.high - fixed_n.low  # the price of looking whenever one likes


def test_an_end_of_the_interval_is_where_the_bets_begin_to_win() -> None:
    arms = _arms(60, 3, 180)
    found = sequential_compare(*arms)
    differences = np.subtract(arms[1], arms[0])
    for end, outwards in ((found.low, -1), (found.high, 1)):
        values = [
            log_betting_value(differences, np.ones(243), end + outwards * step, 1.0) for step in (-1e-4, 1e-4)
        ]
        assert values[0] < math.log(20) < values[1]


def _clustered(generator: np.random.Generator, gain: float) -> tuple[np.ndarray, np.ndarray]:
    """Sums and sizes of 60 clusters of 1 to 5 items with a fate in common; the mean difference is `gain`."""
    sizes = generator.integers(1, 6, 60)
    fate = generator.random(60)
    sums = np.empty(60)
    for cluster, size in enumerate(sizes):
        discordant = generator.random(size) < (0.8 if fate[cluster] < 0.5 else 0.2)
        luck = generator.random() < 0.5  # half of the clusters agree among themselves on who is right
        better = (
            generator.random(size) < 0.5 + gain
            if not luck
            else np.full(size, generator.random() < 0.5 + gain)
        )
        sums[cluster] = np.where(discordant, np.where(better, 1, -1), 0).sum()
    return sums, sizes.astype(float)


@pytest.mark.parametrize("gain", [0.0, 0.2])
def test_clustered_items_keep_the_promise_at_every_block(gain: float) -> None:
    """Mean difference = 0.5 discordant · 2 · gain, looked at after every 5 clusters: 5 % of the paths may ever refute it."""
    generator = np.random.default_rng(1)
    refuted = 0
    for _ in range(400):
        sums, sizes = _clustered(generator, gain)
        refuted += any(
            log_betting_value(sums[:seen], sizes[:seen], gain, 5.0) >= math.log(20)
            for seen in range(5, 61, 5)
        )
    assert refuted / 400 <= 0.05


def test_a_clustered_gain_is_found_before_all_is_seen() -> None:
    generator = np.random.default_rng(2)
    looks = []
    for _ in range(50):
        sums, sizes = _clustered(generator, 0.45)
        seen = range(5, 61, 5)
        looks.append(
            next((k for k in seen if log_betting_value(sums[:k], sizes[:k], 0.0, 5.0) >= math.log(20)), 99)
        )
    assert np.mean(np.array(looks) <= 40) > 0.8


def test_the_largest_cluster_bounds_the_bets_whether_seen_or_not() -> None:
    a, b = [0.0] * 12, [1.0] * 12
    clusters = [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    seen, unseen = (sequential_compare(a, b, clusters=clusters, largest_cluster=size) for size in (None, 8))
    assert seen.units == unseen.units == 6
    assert unseen.e_value < seen.e_value
    assert unseen.low < seen.low


def test_bad_scores_for_bets() -> None:
    with pytest.raises(UserError, match=r"within \[0, 1\]"):
        sequential_compare([0.0, 2.0], [1.0, 1.0])
    with pytest.raises(UserError, match="same items"):
        sequential_compare([0.0], [1.0, 1.0])
    with pytest.raises(UserError, match="empty"):
        sequential_compare([], [])
