"""Bootstrap intervals of what has no formula: they cover, whole clusters are drawn, undefined draws are no zeros."""

from __future__ import annotations

import numpy as np
import pytest

from finetune.errors import UserError
from finetune.stats.resample import quantile_ratio, resampled_interval


def test_the_interval_of_a_mean_is_that_of_student_nearly() -> None:
    values = np.random.default_rng(1).normal(5.0, 2.0, 400)
    found = resampled_interval(lambda items: float(values[items].mean()), 400)
    half = 1.96 * values.std() / 20
    assert found.value == pytest.approx(values.mean())
    assert found.low == pytest.approx(values.mean() - half, abs=0.02)
    assert found.high == pytest.approx(values.mean() + half, abs=0.02)


def test_items_of_a_cluster_are_drawn_together() -> None:
    values = np.repeat(np.random.default_rng(2).normal(0.0, 1.0, 40), 10)
    alone = resampled_interval(lambda items: float(values[items].mean()), 400)
    together = resampled_interval(
        lambda items: float(values[items].mean()), 400, clusters=[place // 10 for place in range(400)]
    )
    assert together.high - together.low > 2.5 * (alone.high - alone.low)  # type: ignore[operator]


def test_undefined_resamples_are_left_out_and_too_many_leave_no_interval() -> None:
    sometimes = resampled_interval(lambda items: None if items[0] % 4 == 1 else 1.0, 40)
    assert (sometimes.low, sometimes.high) == (1.0, 1.0)
    never = resampled_interval(lambda items: None, 40)
    assert (never.value, never.low, never.high) == (None, None, None)
    with pytest.raises(UserError, match="no items"):
        resampled_interval(lambda items: 1.0, 0)


def test_a_ratio_of_quantiles_is_paired_and_seeded() -> None:
    before = np.random.default_rng(3).gamma(2.0, 1.0, 300)
    found = quantile_ratio(before, 0.5 * before, 0.95)
    assert found.value == pytest.approx(0.5)
    assert found.low == pytest.approx(0.5) and found.high == pytest.approx(0.5)  # paired: no spread at all
    other = np.random.default_rng(4).gamma(2.0, 1.0, 300)
    assert quantile_ratio(before, other, 0.95) == quantile_ratio(before, other, 0.95)
    assert quantile_ratio(before, other, 0.95).low < 1.0 < quantile_ratio(before, other, 0.95).high  # type: ignore[operator]
    with pytest.raises(UserError, match="pair the arms"):
        quantile_ratio([1.0], [1.0, 2.0], 0.5)
