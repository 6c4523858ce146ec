"""Before the tuning the screen says what the items will not be able to show, from the untuned arms as a pilot."""

from __future__ import annotations

import json
from typing import Any

import pytest

from finetune.evaluation.power import plan_suite
from finetune.evaluation.suite import Suite
from finetune.stats.power import items_needed_paired, least_detectable_paired


def _records(arm: str, scores: list[float], per_cluster: int = 1) -> list[dict[str, Any]]:
    return [
        {"item": f"i{n}", "arm": arm, "cluster": f"c{n // per_cluster}", "scores": {"exact_match": score}}
        for n, score in enumerate(scores)
    ]


def test_a_base_that_gets_nothing_right_is_planned_with_an_assumed_discordance(suite: Suite) -> None:
    found = plan_suite(suite, [_records("zero_shot", [0.0] * 240), _records("few_shot", [0.0] * 240)])
    assert found.least_detectable == pytest.approx(least_detectable_paired(240, 0.15))
    assert found.wanted == 0.25 and not found.is_too_small
    assert found.lines() == [
        "power: tiny, 240 items: cannot tell a difference below 7.0 points (80 % power, 15.0% of the items discordant, assumed)"
    ]
    json.dumps(found.to_dict(), allow_nan=False)


def test_a_good_base_leaves_little_to_gain_and_few_items_warn(suite: Suite) -> None:
    few = [1.0] * 9 + [0.0]
    found = plan_suite(suite, [_records("zero_shot", few * 6), _records("few_shot", few[::-1] * 6)])
    assert found.discordance == pytest.approx(0.2)
    assert "as the untuned arms are" in found.basis
    assert found.more_items == items_needed_paired(0.025, 0.2) - 60
    assert found.lines()[1].startswith("warning: mending a quarter of what is wrong would be 2.5 points")
    assert f"about {found.more_items:,} more items would do" in found.lines()[1]


def test_clusters_make_a_difference_harder_to_tell(suite: Suite) -> None:
    scores = [float(n // 4 % 2) for n in range(240)]
    alone = plan_suite(suite, [_records("zero_shot", [0.0] * 240), _records("few_shot", scores)])
    alike = plan_suite(suite, [_records("zero_shot", [0.0] * 240, 4), _records("few_shot", scores, 4)])
    assert alike.clusters == 60
    assert alike.least_detectable > 1.5 * alone.least_detectable  # type: ignore[operator]
    assert "240 items in 60 clusters" in alike.lines()[0]


def test_a_guarding_suite_is_held_against_its_margin(suite: Suite) -> None:
    guard = suite.model_copy(update={"role": "regression", "margin": 0.05})
    found = plan_suite(guard, [_records("zero_shot", [1.0, 0.0] * 81)])
    assert found.least_detectable == pytest.approx((1.6449 + 0.8416) * (0.15 / 162) ** 0.5, rel=1e-3)
    assert found.more_items == 209
    assert "cannot exclude a loss below 7.6 points" in found.lines()[0]
    assert "the margin is 5.0 points" in found.lines()[1]
    wide = guard.model_copy(update={"margin": 0.1})
    assert not plan_suite(wide, [_records("zero_shot", [1.0, 0.0] * 81)]).is_too_small


def test_graded_scores_need_two_untuned_arms(suite: Suite) -> None:
    one = [0.1 * (n % 10) for n in range(100)]
    assert plan_suite(suite, [_records("zero_shot", one)]).least_detectable is None
    two = [0.1 * ((n + n % 3) % 10) for n in range(100)]
    found = plan_suite(suite, [_records("zero_shot", one), _records("few_shot", two)])
    assert found.discordance is None and 0.0 < found.least_detectable < 0.2  # type: ignore[operator]
    assert "not known before the tuning" in plan_suite(suite, [_records("zero_shot", [0.5])]).lines()[0]


@pytest.mark.parametrize("scores", [[0.0] * 5, [1.0, 0.0, 1.0, 1.0, 0.0], [0.3, 0.5, 0.1, 0.9, 0.2]])
@pytest.mark.parametrize("role", ["task", "regression"])
def test_one_cluster_plans_nothing_and_fails_nothing(suite: Suite, scores: list[float], role: str) -> None:
    one = suite.model_copy(update={"role": role})
    for arms in ([scores], [scores, scores[::-1]]):
        found = plan_suite(one, [_records(f"arm{n}", arm, per_cluster=9) for n, arm in enumerate(arms)])
        assert found.least_detectable is None
        assert "fewer than two clusters" in found.lines()[0]
        json.dumps(found.to_dict(), allow_nan=False)


def test_a_vanishing_margin_is_no_plan(suite: Suite) -> None:
    one = suite.model_copy(update={"role": "regression", "margin": 1e-300})
    found = plan_suite(one, [_records("zero_shot", [1.0, 0.0] * 20)])
    assert found.more_items is None
    json.dumps(found.to_dict(), allow_nan=False)
