"""The share of a gap: exact where it is known, without an interval where the gap itself is not shown."""

from __future__ import annotations

import numpy as np
import pytest

from finetune.errors import UserError
from finetune.stats.gap import gap_share


def test_a_student_halfway_has_closed_half() -> None:
    before, goal = [0.0] * 40, [1.0] * 40
    after = [1.0, 0.0] * 20
    found = gap_share(before, after, goal)
    assert found.share == pytest.approx(0.5)
    assert (found.gap, found.left) == (1.0, 0.5)
    assert found.low is not None and found.high is not None
    assert found.low < 0.5 < found.high
    assert found.low == pytest.approx(0.5 - 1.96 * 0.5 / 40**0.5, abs=0.03)


def test_a_student_equal_to_its_teacher_has_closed_all_of_it_in_every_resample() -> None:
    generator = np.random.default_rng(1)
    goal = generator.random(60) < 0.9
    found = gap_share([0.0] * 60, goal.astype(float), goal.astype(float))
    assert (found.share, found.low, found.high) == (1.0, 1.0, 1.0)


def test_shares_beyond_the_ends_are_told_as_they_are() -> None:
    before, goal = [0.2] * 30, [0.6] * 30
    assert gap_share(before, [0.8] * 30, goal).share == pytest.approx(1.5)
    assert gap_share(before, [0.0] * 30, goal).share == pytest.approx(-0.5)


@pytest.mark.parametrize("goal", [[0.0] * 30, [-1.0] * 30])
def test_a_teacher_that_is_not_better_leaves_no_gap(goal: list[float]) -> None:
    found = gap_share([0.0] * 30, [1.0] * 30, goal)
    assert found.share is None and found.low is None
    assert "no gap" in found.reason


def test_a_gap_that_may_be_nothing_has_no_interval() -> None:
    before, goal = [0.0] * 39 + [0.0], [0.0] * 39 + [1.0]
    found = gap_share(before, goal, goal)
    assert found.share == 1.0
    assert found.low is None
    assert "not shown" in found.reason


def test_clusters_are_drawn_whole_and_make_the_interval_wider() -> None:
    after = [1.0] * 20 + [0.0] * 20
    alone = gap_share([0.0] * 40, after, [1.0] * 40)
    whole = gap_share([0.0] * 40, after, [1.0] * 40, clusters=[place // 5 for place in range(40)])
    assert whole.share == alone.share == 0.5
    assert whole.low is not None and alone.low is not None
    assert whole.low < alone.low


def test_arms_of_other_lengths_are_refused() -> None:
    with pytest.raises(UserError, match="3, 2 and 3 scores"):
        gap_share([0.0] * 3, [0.0] * 2, [1.0] * 3)
