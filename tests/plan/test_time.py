"""Steps and seconds from tokens and rates."""

from __future__ import annotations

from typing import Any

import pytest

from finetune.errors import UserError
from finetune.plan.architecture import read_architecture
from finetune.plan.time import (
    DEVICES,
    device_rate,
    device_spec,
    flops_per_token,
    probe_rate,
    training_time,
)
from finetune.recipe.schema import Recipe

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 1000,
}


def recipe(**sections: dict[str, Any]) -> Recipe:
    return Recipe.model_validate(
        {
            "name": "timed",
            "model": {"id": "m", **sections.pop("model", {})},
            "data": {"spec": "d"},
            "eval": {"suites": ["s"]},
            **sections,
        }
    )


def test_packs_are_counted_as_the_trainer_counts_them() -> None:
    train = {"pack_tokens": 1000, "epochs": 2, "micro_batch_size": 2, "gradient_accumulation_steps": 3}
    planned = training_time(recipe(train=train), 60_500, 250.0)
    # 61 packs, 31 batches, 11 steps an epoch
    assert planned.steps == 22
    assert planned.tokens == 121_000
    assert planned.seconds == 121_000 / 250


def test_devices_share_the_packs() -> None:
    planned = training_time(recipe(train={"pack_tokens": 1000, "epochs": 1}), 64_000, 100.0, n_devices=4)
    assert planned.steps == 16
    assert planned.seconds == 64_000 / 400


def test_max_steps_cuts_steps_and_tokens() -> None:
    planned = training_time(recipe(train={"pack_tokens": 1000, "epochs": 2, "max_steps": 5}), 10_000, 100.0)
    assert planned.steps == 5
    assert planned.tokens == 5_000


def test_without_packing_the_rows_are_needed() -> None:
    unpacked = recipe(train={"packing": False, "micro_batch_size": 4, "epochs": 1})
    with pytest.raises(UserError, match="rows"):
        training_time(unpacked, 1000, 10.0)
    assert training_time(unpacked, 1000, 10.0, n_rows=10).steps == 3


@pytest.mark.parametrize(
    ("tokens", "rate"), [(0, 10.0), (100, 0.0), (100, float("nan")), (100, float("inf"))]
)
def test_a_time_without_tokens_or_rate_is_refused(tokens: int, rate: float) -> None:
    with pytest.raises(UserError, match="tokens and a finite rate"):
        training_time(recipe(), tokens, rate)


def test_a_probe_is_the_median_without_its_first_step() -> None:
    assert probe_rate([1000, 1000, 1000, 1000], [50.0, 4.0, 5.0, 2.0]) == 250.0
    with pytest.raises(ValueError, match="two steps"):
        probe_rate([1000], [5.0])


def test_work_is_six_operations_a_trained_parameter_and_four_a_frozen_one() -> None:
    architecture = read_architecture(CONFIG)
    matrices = architecture.linear_parameters + architecture.head_parameters
    attention = 6 * 2 * 64 * 10
    full = flops_per_token(architecture, recipe(adapter={"kind": "none"}), 10, architecture.n_parameters)
    assert full == 6 * matrices + attention
    lora = flops_per_token(architecture, recipe(), 10, 500)
    assert lora == 4 * matrices + 6 * 500 + attention
    again = recipe(train={"gradient_checkpointing": True})
    assert flops_per_token(architecture, again, 10, 500) == lora + 2 * (matrices + 500) + attention / 3


def test_quantized_and_dora_steps_are_slower_on_every_device() -> None:
    architecture = read_architecture(CONFIG)
    plain = device_rate(DEVICES["l4"], architecture, recipe(), 10, 500)
    assert device_rate(DEVICES["l4"], architecture, recipe(model={"quantize": "nf4"}), 10, 500) < plain
    assert device_rate(DEVICES["l4"], architecture, recipe(adapter={"kind": "dora"}), 10, 500) < plain
    assert device_rate(DEVICES["h100"], architecture, recipe(), 10, 500) > plain


def test_an_unknown_device_is_refused_with_the_nearest() -> None:
    assert device_spec("H100").memory_bytes == 80_000_000_000
    with pytest.raises(UserError, match="did you mean 'a100-80gb'"):
        device_spec("a100-80")
