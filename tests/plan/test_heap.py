"""What a CPU's heap keeps beside the tensors in use, and the moments that a training passes."""

from __future__ import annotations

from typing import Any

from finetune.plan.architecture import read_architecture
from finetune.plan.builtin import BUILTIN_CONFIGS
from finetune.plan.heap import MAPPED_FROM_BYTES
from finetune.plan.memory import forecast_training
from finetune.recipe.resolve import load_recipe

CONFIG = BUILTIN_CONFIGS["smollm2-135m-instruct"]
ARCHITECTURE = read_architecture(CONFIG)
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


def test_an_update_leaves_holes_of_the_small_tensors_of_an_adapter_alone() -> None:
    found = forecast("adapter.rank=32", "train.pack_tokens=1024")
    gradients = 4 * 32 * LAYERS * sum(linear.n_in + linear.n_out for linear in ARCHITECTURE.layer_linears)
    assert gradients == found.terms_bytes["adapters"]
    assert found.terms_bytes["fragmentation"] == gradients  # half of the gradients and of their copies
    assert forecast("adapter.kind=none").terms_bytes["fragmentation"] == 0
    long = forecast("adapter.rank=32", "train.pack_tokens=2048")
    assert long.terms_bytes["fragmentation"] == gradients  # activations are mapped, however long


def test_matrices_from_half_a_megabyte_on_leave_no_holes() -> None:
    found = forecast("adapter.rank=128", "adapter.alpha=256")
    sizes = [4 * 128 * size for linear in ARCHITECTURE.layer_linears for size in (linear.n_in, linear.n_out)]
    small = sum(size for size in sizes if size < MAPPED_FROM_BYTES)
    assert 0 < small < sum(sizes)
    assert found.terms_bytes["fragmentation"] == LAYERS * small


def test_dora_composes_one_matrix_at_a_time() -> None:
    plain, dora = (forecast(f"adapter.kind={kind}", "train.pack_tokens=1024") for kind in ("lora", "dora"))
    largest = 6 * MIDDLE**2 + 14 * MIDDLE * CONFIG["hidden_size"]
    assert dora.terms_bytes["buffers"] - plain.terms_bytes["buffers"] == largest


def test_a_gpu_keeps_no_such_holes() -> None:
    found = forecast("train.gradient_checkpointing=true", device="cuda")
    assert found.terms_bytes["fragmentation"] < 0.1 * found.total_bytes


def test_what_is_never_there_together_does_not_add_up() -> None:
    for checkpointing in ("false", "true"):
        found = forecast(f"train.gradient_checkpointing={checkpointing}", distinct_lengths=1)
        worst = max(found.moments_bytes.values())
        assert found.total_bytes == worst + found.terms_bytes["fragmentation"]


def test_a_validation_keeps_nothing_but_builds_logits_like_the_training() -> None:
    plain = forecast().moments_bytes
    bent = forecast(config={**CONFIG, "logit_scale": 0.5}).moments_bytes
    assert plain["validation"] < plain["loss"]
    vocabulary = CONFIG["vocab_size"]
    whole = 512 * vocabulary * (2 + 8)  # all logits of the pack, in bf16 and twice in fp32
    chunk = 128 * vocabulary * (2 + 4) + 512 * CONFIG["hidden_size"] * 2
    assert bent["validation"] == plain["validation"] + whole - chunk
