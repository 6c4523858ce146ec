"""Cost and break-even, against the published example."""

from __future__ import annotations

import pytest

from finetune.errors import UserError
from finetune.plan.cost import break_even, query_cost, training_cost

EXAMPLE = {
    "tuning_cost": 5000.0,
    "amortise_months": 12.0,
    "large_price_per_million_tokens": 5.0,
    "small_price_per_million_tokens": 0.30,
    "gpu_per_month": 700.0,
}


def test_break_even_of_the_published_example() -> None:
    result = break_even(**EXAMPLE)
    assert result.million_tokens_per_month == pytest.approx(237.6, abs=0.05)
    assert result.of_which_gpu_only == pytest.approx(148.9, abs=0.05)


def test_both_ways_cost_the_same_at_the_break_even_volume() -> None:
    result = break_even(**EXAMPLE)
    volume = result.million_tokens_per_month
    assert volume is not None
    meeting = min(result.curve, key=lambda point: abs(point.million_tokens_per_month - volume))
    assert meeting.large_model == pytest.approx(meeting.tuned_model)
    assert result.curve[0].tuned_model > result.curve[0].large_model == 0
    assert result.curve[-1].tuned_model < result.curve[-1].large_model


def test_no_volume_pays_for_a_model_that_saves_nothing() -> None:
    result = break_even(**EXAMPLE | {"small_price_per_million_tokens": 5.0})
    assert result.million_tokens_per_month is None
    assert result.of_which_gpu_only is None
    assert all(point.tuned_model > point.large_model for point in result.curve)


@pytest.mark.parametrize(
    ("change", "flag"),
    [
        ({"tuning_cost": -1.0}, "--tuning-cost"),
        ({"gpu_per_month": float("nan")}, "--gpu-per-month"),
        ({"amortise_months": 0.0}, "--months"),
    ],
)
def test_impossible_prices_are_refused(change: dict[str, float], flag: str) -> None:
    with pytest.raises(UserError) as caught:
        break_even(**EXAMPLE | change)
    assert caught.value.faults[0].where == flag


def test_a_query_pays_for_prompt_and_answer() -> None:
    shown = query_cost(900, 40, input_price_per_million=5.0, output_price_per_million=15.0)
    assert shown == pytest.approx((900 * 5 + 40 * 15) / 1e6)
    assert query_cost(100, 100, input_price_per_million=2.0) == pytest.approx(0.0004)


def test_training_is_paid_by_device_hours() -> None:
    assert training_cost(5400, 2.0, n_devices=4) == 12.0
