"""The symmetric bootstrap-t: its interval and its p-value are one decision, and skew no longer breaks coverage."""

from __future__ import annotations

import numpy as np
import pytest

from finetune.stats.bootstrap import RESAMPLES, bootstrap_p_value, bootstrap_statistics, critical_value
from finetune.stats.clusters import UnitTotals, robust_mean, unit_totals


def skewed(generator: np.random.Generator, n: int) -> np.ndarray:
    return generator.exponential(0.3, n) * (generator.random(n) < 0.1)


def slow_statistics(values: np.ndarray, seed: int) -> np.ndarray:
    """|t| of each resample, one by one."""
    ordered = np.sort(values)
    picks = np.random.default_rng(seed).integers(0, len(values), (RESAMPLES, len(values)))
    samples = ordered[picks]
    spread = samples.std(axis=1, ddof=1)
    gap = np.abs(samples.mean(axis=1) - ordered.mean())
    with np.errstate(divide="ignore"):
        return np.sort(
            np.where(spread > 1e-9, gap * np.sqrt(len(values)) / np.maximum(spread, 1e-300), np.inf)
        )


def test_against_resampling_one_by_one() -> None:
    values = skewed(np.random.default_rng(0), 60)
    found = bootstrap_statistics(unit_totals(values, None), seed=4)
    expected = slow_statistics(values, 4)
    finite = np.isfinite(expected)
    assert np.array_equal(np.isfinite(found), finite)
    assert found[finite] == pytest.approx(expected[finite], rel=1e-6)


def test_unequal_sizes_of_one_reduce_to_items() -> None:
    values = np.sort(skewed(np.random.default_rng(1), 50))
    items = bootstrap_statistics(unit_totals(values, None), seed=2)
    sizes = np.ones(50)
    sizes[-1] = 1.0 + 1e-12  # not exactly equal: takes the general path
    general = bootstrap_statistics(UnitTotals(values, sizes, values**2), seed=2)
    finite = np.isfinite(items)
    assert general[finite] == pytest.approx(items[finite], rel=1e-6)


def test_interval_and_p_value_agree() -> None:
    generator = np.random.default_rng(3)
    for _ in range(20):
        totals = unit_totals(skewed(generator, 80) - 0.03, None)
        robust = robust_mean(totals)
        statistics = bootstrap_statistics(totals)
        t = robust.mean / robust.standard_error
        rejected = float(bootstrap_p_value(statistics, t)) <= 1 - 0.95
        assert rejected == (abs(t) > float(critical_value(statistics, 0.95)))


def test_direction_changes_nothing() -> None:
    values = skewed(np.random.default_rng(5), 70)
    forwards = bootstrap_statistics(unit_totals(values, None))
    backwards = bootstrap_statistics(unit_totals(-values, None))
    assert np.nan_to_num(forwards, posinf=-1) == pytest.approx(np.nan_to_num(backwards, posinf=-1))


def test_coverage_where_students_t_fails() -> None:
    """100 items, one in ten changed by an exponential amount: Student's t covers about 87 %."""
    generator = np.random.default_rng(6)
    data = np.sort(np.stack([skewed(generator, 100) for _ in range(400)]), axis=1)
    totals = UnitTotals(data, np.ones(100), data**2)
    robust = robust_mean(totals)
    critical = critical_value(bootstrap_statistics(totals), 0.95)
    covered = np.abs(robust.mean - 0.03) <= critical * robust.standard_error
    student = np.abs(robust.mean - 0.03) <= 1.984 * robust.standard_error
    assert student.mean() < 0.90
    assert covered.mean() > 0.93
