"""Schedules against their formulas, and against the planning figures."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from finetune.recipe.train_section import TrainSection
from finetune.training.schedules import build_schedule, rate_share


def settings(**keys: Any) -> TrainSection:
    return TrainSection(**({"learning_rate": 3e-4, "warmup_share": 0.01} | keys))


def rate(section: TrainSection, step: int, total: int) -> float:
    return section.learning_rate * rate_share(section, step, total)


# Peak 3e-4, 1,000 of 100,000 steps of warm-up, floor of 10 %.
PLANNED = {0: 0.0, 500: 1.5e-4, 1000: 3e-4, 50500: 1.65e-4, 100000: 3e-5}


@pytest.mark.parametrize(("step", "expected"), PLANNED.items())
def test_cosine_to_a_floor_of_ten_percent(step: int, expected: float) -> None:
    assert rate(settings(), step, 100_000) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    ("schedule", "shares"),
    {
        "linear": {0: 0.0, 10: 1.0, 55: 0.55, 100: 0.1},
        "wsd": {0: 0.0, 5: 0.5, 10: 1.0, 80: 1.0, 90: 0.55, 100: 0.1},
        "inverse_sqrt": {0: 0.0, 10: 1.0, 40: 0.5, 90: 1 / 3},
        "constant": {0: 0.0, 5: 0.5, 10: 1.0, 100: 1.0},
    }.items(),
)
def test_shapes(schedule: Any, shares: dict[int, float]) -> None:
    section = settings(schedule=schedule, warmup_share=0.1)
    assert {step: rate_share(section, step, 100) for step in shares} == pytest.approx(shares)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd", "inverse_sqrt", "constant"])
def test_no_schedule_rises_after_the_warm_up_or_leaves_its_range(schedule: Any) -> None:
    for warmup in (0.0, 0.03, 0.5):
        for total in (1, 2, 7, 100):
            section = settings(schedule=schedule, warmup_share=warmup)
            shares = [rate_share(section, step, total) for step in range(total + 1)]
            start = math.ceil(warmup * total) if total > 1 else 0
            assert all(0.0 <= share <= 1.0 for share in shares)
            assert all(
                left >= right for left, right in zip(shares[start:], shares[start + 1 :], strict=False)
            )
            assert shares[start] == pytest.approx(1.0) or start == total


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd", "inverse_sqrt", "constant"])
def test_a_run_of_a_single_step_learns_at_the_peak(schedule: Any) -> None:
    assert rate_share(settings(schedule=schedule, warmup_share=0.05, decay_share=0.2), 0, 1) == 1.0


def test_every_group_keeps_its_own_multiple_of_the_rate() -> None:
    weights = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    optimizer = torch.optim.SGD([{"params": [weights[0]]}, {"params": [weights[1]], "lr": 4.8e-3}], lr=3e-4)
    section = settings(warmup_share=0.0)
    schedule = build_schedule(optimizer, section, 10)
    for step in range(10):
        assert optimizer.param_groups[0]["lr"] == pytest.approx(rate(section, step, 10))
        assert optimizer.param_groups[1]["lr"] == pytest.approx(16 * rate(section, step, 10))
        optimizer.step()
        schedule.step()
