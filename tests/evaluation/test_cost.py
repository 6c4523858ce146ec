"""Costs are paired ratios with intervals; money appears only when the user gave a rate."""

from __future__ import annotations

import json
from typing import Any

import pytest

from finetune.evaluation.cost import Spent, cost_of
from finetune.evaluation.records import ArmSummary, Record
from finetune.recipe.schema import PricesSection


def _arm(
    name: str, tokens: list[int], latency: list[float], prompt: int = 1000, seconds: float = 10.0
) -> tuple[ArmSummary, list[Record]]:
    records: list[Record] = [
        {
            "item": f"i{n}", "arm": name, "cluster": f"c{n // 2}", "prompt_tokens": prompt, "output_tokens": count,
            "latency_seconds": wait,
        }
        for n, (count, wait) in enumerate(zip(tokens, latency, strict=True))
    ]  # fmt: skip
    summary = ArmSummary(
        suite="s", suite_digest="d", items_digest="d", arm=name, n=len(records), metrics={},
        output_tokens=sum(tokens), seconds=seconds, latency_seconds={"p50": 1.0, "p95": 2.0}, finish_reasons={},
        adapter_sha256=None, key="k", batch_size=1, prompt_tokens=prompt * len(records), template_sha256="t",
    )  # fmt: skip
    return summary, records


BEFORE = _arm("few_shot", [20 + n % 7 for n in range(40)], [1.0 + 0.01 * n for n in range(40)])
AFTER = _arm(
    "tuned", [2 * (20 + n % 7) for n in range(40)], [0.5 * (1.0 + 0.01 * n) for n in range(40)], prompt=100
)


def _cost(spent: Spent | None = None, before: Any = BEFORE, after: Any = AFTER) -> dict[str, Any]:
    found = cost_of(before[0], after[0], before[1], after[1], spent=spent)
    json.dumps(found, allow_nan=False)
    return found


def test_ratios_are_paired_and_have_intervals() -> None:
    ratios = _cost()["ratios"]
    assert ratios["output_tokens"]["ratio"] == pytest.approx(2.0)
    assert ratios["prompt_tokens"]["ratio"] == pytest.approx(0.1)
    assert ratios["latency_seconds"]["ratio"] == pytest.approx(0.5)
    assert ratios["output_tokens_per_second"]["ratio"] == pytest.approx(4.0)
    assert ratios["latency_seconds_p95"]["ratio"] == pytest.approx(0.5)
    for one in ratios.values():
        if one["ratio"] is not None:
            assert one["low"] <= one["ratio"] <= one["high"]
            assert (one["n"], one["left_out"]) == (40, 0)
    assert ratios["price"] == {
        "ratio": None,
        "low": None,
        "high": None,
        "confidence": 0.95,
        "n": 0,
        "left_out": 40,
    }


def test_noise_between_items_widens_the_interval_and_order_turns_the_ratio() -> None:
    noisy = _arm(
        "tuned", [10 if n % 2 else 40 for n in range(40)], [1.0 if n % 4 < 2 else 2.0 for n in range(40)]
    )
    found = _cost(after=noisy)["ratios"]
    assert found["latency_seconds"]["low"] < found["latency_seconds"]["ratio"] - 0.05
    back = _cost(before=noisy, after=BEFORE)["ratios"]
    assert back["output_tokens"]["ratio"] == pytest.approx(1 / found["output_tokens"]["ratio"])
    assert back["output_tokens"]["low"] == pytest.approx(1 / found["output_tokens"]["high"])


def test_items_without_a_number_are_left_out_and_counted() -> None:
    empty = _arm("tuned", [0] * 5 + [10] * 35, [1.0] * 40)
    ratio = _cost(after=empty)["ratios"]["output_tokens"]
    assert (ratio["n"], ratio["left_out"]) == (35, 5)


def test_token_prices_and_the_volume_from_which_the_tuning_pays() -> None:
    prices = PricesSection(input_per_million=2.0, output_per_million=4.0, tuning=1200.0, months=12.0)
    found = _cost(Spent(prices))
    before, after = (found[side]["price_per_query"] for side in ("baseline", "arm"))
    tokens = sum(record["output_tokens"] for record in BEFORE[1]) / 40
    assert before == pytest.approx((1000 * 2 + tokens * 4) / 1e6)
    assert after == pytest.approx((100 * 2 + 2 * tokens * 4) / 1e6)
    assert found["break_even"]["queries_per_month"] == pytest.approx(100.0 / (before - after))
    ratio = found["ratios"]["price"]
    assert ratio["low"] <= ratio["ratio"] <= ratio["high"] < 1.0


def test_hours_are_shared_out_by_latency_and_price_the_training_too() -> None:
    prices = PricesSection(per_hour=36.0)
    found = _cost(Spent(prices, training_seconds=7200.0))
    assert found["baseline"]["price_per_query"] == pytest.approx(36.0 * 10.0 / 3600 / 40)
    assert found["break_even"]["tuning_cost"] == pytest.approx(72.0)
    assert found["break_even"]["queries_per_month"] is None  # both arms took the same time: no saving


def test_a_baseline_may_have_prices_of_its_own() -> None:
    prices = PricesSection(
        input_per_million=0.3, baseline_input_per_million=5.0, tuning=5000.0, serving_per_month=700.0
    )
    before, after = (_arm(name, [400] * 40, [1.0] * 40, prompt=600) for name in ("few_shot", "tuned"))
    even = _cost(Spent(prices), before, after)["break_even"]
    # 1,000 tokens a query: 237.6 million tokens a month, the published example
    assert even["queries_per_month"] == pytest.approx(237_600, rel=1e-3)


@pytest.mark.parametrize("given", [{"per_hour": 1.0, "input_per_million": 1.0}, {"output_per_million": 1.0}])
def test_prices_that_contradict_each_other_are_refused(given: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"not by both|prompt tokens have none"):
        PricesSection(**given)


def test_one_cluster_has_ratios_but_no_interval() -> None:
    """It used to refuse the whole comparison, scores included."""
    arms = [
        (summary, [{**record, "cluster": "all"} for record in records])
        for summary, records in (BEFORE, AFTER)
    ]
    ratios = _cost(before=arms[0], after=arms[1])["ratios"]
    assert ratios["output_tokens"]["ratio"] == pytest.approx(2.0)
    assert ratios["latency_seconds_p50"]["ratio"] == pytest.approx(0.5)
    assert {(one["low"], one["high"]) for one in ratios.values()} == {(None, None)}
