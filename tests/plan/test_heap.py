"""What a CPU's heap keeps beside the tensors in use, and the moments that a training passes."""

from __future__ import annotations

from typing import Any

import pytest

from finetune.plan.builtin import BUILTIN_CONFIGS
from finetune.plan.memory import forecast_training
from finetune.recipe.resolve import load_recipe

CONFIG = BUILTIN_CONFIGS["smollm2-135m-instruct"]
LAYERS, MIDDLE = CONFIG["num_hidden_layers"], CONFIG["intermediate_size"]


def forecast(*overrides: str, config: Any = CONFIG, **options: Any) -> Any:
    return forecast_training(load_recipe("sft/home_intents_lora", overrides), config, **options)


def test_the_terms_add_up_and_every_moment_is_told() -> None:
    found = forecast()
    assert sum(found.terms_bytes.values()) == found.total_bytes
    told = found.to_dict()["moments_bytes"]
    assert {"loss", "first backward layer", "last backward layer", "optimizer step", "validation"} <= set(
        told
    )
    assert all(0 < size < found.total_bytes for size in told.values())


def test_passes_of_ever_other_lengths_leave_more_holes_than_passes_of_one() -> None:
    one, many = (forecast(distinct_lengths=count) for count in (1, None))
    assert one.terms_bytes["activations"] == many.terms_bytes["activations"]
    assert one.terms_bytes["fragmentation"] < many.terms_bytes["activations"]
    assert many.terms_bytes["fragmentation"] > many.terms_bytes["activations"]


@pytest.mark.parametrize("n_tokens", [1024, 2048])
def test_each_layer_that_is_recomputed_leaves_a_hole_of_its_widest_tensor(n_tokens: int) -> None:
    found = forecast("train.gradient_checkpointing=true", f"train.pack_tokens={n_tokens}")
    assert found.terms_bytes["fragmentation"] == LAYERS * n_tokens * MIDDLE * 2


def test_the_weights_that_dora_composes_leave_larger_holes() -> None:
    plain = forecast("train.gradient_checkpointing=true")
    dora = forecast("train.gradient_checkpointing=true", "adapter.kind=dora")
    largest = 6 * MIDDLE**2 + 14 * MIDDLE * CONFIG["hidden_size"]
    assert dora.terms_bytes["fragmentation"] == LAYERS * largest > plain.terms_bytes["fragmentation"]


def test_a_quantized_matrix_has_more_in_passing() -> None:
    found = forecast("train.gradient_checkpointing=true", "train.pack_tokens=1024", "model.quantize=nf4")
    hidden = CONFIG["hidden_size"]
    of_gate = 4 * 1024 * MIDDLE * 2 + 1024 * hidden * 4 + MIDDLE * hidden * 2
    assert found.terms_bytes["fragmentation"] == LAYERS * of_gate


def test_a_gpu_keeps_no_such_holes() -> None:
    found = forecast("train.gradient_checkpointing=true", device="cuda")
    assert found.terms_bytes["fragmentation"] < 0.1 * found.total_bytes


def test_small_tensors_and_logits_add_up_in_a_heap() -> None:
    """The backward pass of a layer and the logits are never there together, yet the heap has grown to both."""
    found = forecast(distinct_lengths=1)
    kept = found.moments_bytes["first backward layer"] - found.moments_bytes["loss"]
    at_loss = found.total_bytes - found.terms_bytes["fragmentation"] - found.moments_bytes["loss"]
    assert at_loss == kept + found.terms_bytes["logits"] > kept


def test_a_validation_keeps_nothing_but_builds_logits_like_the_training() -> None:
    plain = forecast().moments_bytes
    bent = forecast(config={**CONFIG, "logit_scale": 0.5}).moments_bytes
    assert plain["validation"] < plain["loss"]
    vocabulary = CONFIG["vocab_size"]
    whole = 512 * vocabulary * (2 + 8)  # all logits of the pack, in bf16 and twice in fp32
    chunk = 128 * vocabulary * (2 + 4) + 512 * CONFIG["hidden_size"] * 2
    assert bent["validation"] == plain["validation"] + whole - chunk
