"""What is suggested when a recipe does not fit: enough, no more than enough, and cheapest first."""

from __future__ import annotations

from typing import Any

import pytest

from finetune.plan.fits import Fit, fits, with_changes
from finetune.plan.memory import Forecast, forecast_training
from finetune.recipe.schema import Recipe

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "vocab_size": 128256,
}


def recipe(**sections: dict[str, Any]) -> Recipe:
    return Recipe.model_validate(
        {
            "name": "fitted",
            "model": {"id": "m", **sections.pop("model", {})},
            "data": {"spec": "d", "max_tokens": 1024, **sections.pop("data", {})},
            "eval": {"suites": ["s"]},
            **sections,
        }
    )


def forecast(planned: Recipe) -> Forecast:
    return forecast_training(planned, CONFIG, device="cuda")


def fit(planned: Recipe, gigabytes: float) -> Fit:
    return fits(forecast(planned), int(gigabytes * 1e9), planned, forecast)


LARGE = {"train": {"micro_batch_size": 4, "pack_tokens": 2048}}


def test_a_recipe_that_fits_needs_no_suggestion() -> None:
    result = fit(recipe(), 80)
    assert result.fits
    assert result.suggestions == ()


@pytest.mark.parametrize("gigabytes", [15, 20, 24, 30, 40, 45])
def test_every_suggestion_really_fits_when_it_says_so(gigabytes: float) -> None:
    planned = recipe(**LARGE)
    result = fit(planned, gigabytes)
    assert not result.fits
    assert result.suggestions
    for suggestion in result.suggestions:
        changed = with_changes(planned, suggestion.changes)
        Recipe.model_validate(changed.model_dump())
        assert forecast(changed).total_bytes == suggestion.total_bytes
        assert suggestion.fits == (suggestion.total_bytes <= gigabytes * 1e9)


@pytest.mark.parametrize("gigabytes", [20, 24, 30, 40, 45])
def test_no_part_of_a_suggestion_would_do(gigabytes: float) -> None:
    planned = recipe(**LARGE)
    suggestions = fit(planned, gigabytes).suggestions
    keys = [set(suggestion.changes) for suggestion in suggestions]
    assert not any(one < other for one in keys for other in keys)


def test_what_keeps_the_result_comes_first_and_then_the_price_decides() -> None:
    suggestions = fit(recipe(**LARGE), 30).suggestions
    ranks = [(suggestion.sacrifice, suggestion.slowdown) for suggestion in suggestions]
    assert ranks == sorted(ranks)
    assert suggestions[0].same_result


def test_a_smaller_micro_batch_keeps_the_rows_of_a_step() -> None:
    planned = recipe(**LARGE)
    for suggestion in fit(planned, 40).suggestions:
        if suggestion.same_result:
            changed = with_changes(planned, suggestion.changes).train
            step = changed.micro_batch_size * changed.pack_tokens * changed.gradient_accumulation_steps
            assert step == 4 * 2048


def test_a_pack_is_never_made_shorter_than_the_longest_row() -> None:
    for gigabytes in (20, 24, 40):
        planned = recipe(data={"max_tokens": 2048}, **LARGE)
        for suggestion in fit(planned, gigabytes).suggestions:
            changed = with_changes(planned, suggestion.changes)
            assert changed.train.pack_tokens >= changed.data.max_tokens


def test_quantized_weights_are_never_suggested_for_full_tuning_alone() -> None:
    for suggestion in fit(recipe(adapter={"kind": "none"}), 24).suggestions:
        changed = with_changes(recipe(adapter={"kind": "none"}), suggestion.changes)
        assert changed.model.quantize == "none" or changed.adapter.kind == "lora"


def test_when_nothing_suffices_it_says_how_far_it_still_is() -> None:
    result = fit(recipe(), 2)
    (only,) = result.suggestions
    assert not only.fits
    assert only.total_bytes < forecast(recipe()).total_bytes
    assert only.changes["model.quantize"] == "nf4"


def test_the_scale_of_an_adapter_is_kept_when_its_rank_shrinks() -> None:
    planned = recipe(adapter={"rank": 256, "alpha": 512.0})
    sizes = [s for s in fit(planned, 20.5).suggestions if "adapter.rank" in s.changes]
    assert sizes
    for suggestion in sizes:
        changed = with_changes(planned, suggestion.changes).adapter
        assert changed.alpha / changed.rank == 2.0
