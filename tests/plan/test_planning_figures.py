"""The published figures that every planner is compared with. GB is 1e9 bytes."""

from __future__ import annotations

from typing import Any

import pytest

from finetune.errors import UserError
from finetune.plan.architecture import read_architecture
from finetune.plan.memory import Forecast, adapter_parameters, forecast_training
from finetune.plan.states import model_states, quantized_bytes
from finetune.recipe.schema import Recipe

LLAMA_8B: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "vocab_size": 128256,
}
LLAMA_70B = LLAMA_8B | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
}
GB = 1e9


def recipe(**sections: dict[str, Any]) -> Recipe:
    return Recipe.model_validate(
        {
            "name": "planned",
            "model": {"id": "m", **sections.pop("model", {})},
            "data": {"spec": "d", **sections.pop("data", {})},
            "eval": {"suites": ["s"], **sections.pop("eval", {})},
            **sections,
        }
    )


def test_mixed_precision_adamw_is_16_bytes_a_parameter() -> None:
    states = model_states(8_000_000_000)
    assert states.weights == 16 * GB
    assert states.master == 32 * GB
    assert states.gradients == 16 * GB
    assert states.optimizer == 64 * GB
    assert states.total == 128 * GB
    assert states.bytes_per_parameter == 16
    assert model_states(13_000_000_000).total == 208 * GB


def test_8_bit_adam_saves_three_quarters_of_the_states() -> None:
    small = model_states(8_000_000_000, optimizer="adamw_8bit")
    assert model_states(8_000_000_000).optimizer - small.optimizer == 48 * GB
    assert small.optimizer_constants == 8_000_000_000 * 2 * 4 / 256


def test_all_fp32() -> None:
    states = model_states(7_000_000_000, weight_bytes=4, master_copy=False, gradient_bytes=4)
    assert (states.weights, states.gradients, states.optimizer) == (28 * GB, 28 * GB, 56 * GB)
    assert states.total == 112 * GB


def test_adapter_of_rank_32_on_an_8b_model() -> None:
    n = adapter_parameters(read_architecture(LLAMA_8B), 32)
    assert n == 83_886_080
    assert n * 2 / 1e6 == pytest.approx(167.8, abs=0.05)


def test_qlora_of_a_70b_model() -> None:
    planned = recipe(model={"quantize": "nf4"}, train={"pack_tokens": 1024, "gradient_checkpointing": True})
    assert forecast_training(planned, LLAMA_70B, device="cuda").total_bytes / GB == pytest.approx(
        48.2, rel=0.05
    )


@pytest.mark.parametrize(
    ("config", "sections", "low", "high"),
    [
        (LLAMA_8B, {"adapter": {"kind": "none"}}, 120, 160),
        (LLAMA_8B, {}, 18, 24),
        (LLAMA_8B, {"model": {"quantize": "nf4"}}, 8, 10),
        (LLAMA_70B, {"adapter": {"kind": "none"}}, 1000, 1400),
        (LLAMA_70B, {}, 150, 175),
        (LLAMA_70B, {"model": {"quantize": "nf4"}}, 46, 50),
    ],
)
def test_reference_ranges_for_short_texts(
    config: dict[str, Any], sections: dict[str, Any], low: float, high: float
) -> None:
    # How many tokens 'short' means is not said: 1,900 in a forward pass.
    planned = recipe(train={"pack_tokens": 1900, "gradient_checkpointing": True}, **sections)
    assert low <= forecast_training(planned, config, device="cuda").total_bytes / GB <= high


def test_double_quantization_saves_0_37_bits_a_parameter() -> None:
    linears = read_architecture(LLAMA_8B).layer_linears
    n = sum(linear.matrix_parameters for linear in linears)
    blocks, once = quantized_bytes(linears, "nf4", double_quantization=False)
    same_blocks, twice = quantized_bytes(linears, "nf4", double_quantization=True)
    assert blocks == same_blocks == n / 2
    assert once * 8 / n == 0.5
    assert (once - twice) * 8 / n == pytest.approx(0.373, abs=0.001)
    assert quantized_bytes(linears, "int8", double_quantization=False)[0] == n


def test_unknown_optimizer_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(UserError, match="did you mean 'adamw_8bit'"):
        model_states(1, optimizer="adamw8bit")


def full(**options: Any) -> Forecast:
    """Accumulation, so that gradients are held at every moment."""
    planned = recipe(adapter={"kind": "none"}, train={"gradient_accumulation_steps": 2})
    return forecast_training(planned, LLAMA_8B, device="cuda", **options)


def lora(**options: Any) -> Forecast:
    return forecast_training(recipe(), LLAMA_8B, device="cuda", **options)


def test_sharding_divides_what_each_stage_says() -> None:
    alone = full().terms_bytes
    sharded = {
        name: full(world_size=8, sharding=name).terms_bytes
        for name in ("ddp", "zero1", "zero2", "zero3", "fsdp2")
    }
    held = "optimizer", "master_copy", "gradients"
    assert all(sharded["ddp"][name] == alone[name] for name in held)
    assert sharded["zero1"]["optimizer"] == alone["optimizer"] // 8
    assert sharded["zero1"]["gradients"] == alone["gradients"]
    assert sharded["zero2"]["gradients"] == alone["gradients"] // 8
    assert sharded["zero3"]["master_copy"] == sharded["zero2"]["master_copy"] == alone["master_copy"] // 8
    differ = {name for name in alone if sharded["zero3"][name] != sharded["fsdp2"][name]}
    assert differ == {"buffers", "fragmentation"}  # what lies in the exchange


def test_what_is_computed_with_is_whole_on_every_rank_below_stage_3() -> None:
    """The trained fp32 weights are those that the passes read: DeepSpeed keeps a copy of a rank's own part beside them."""
    for stage in ("zero1", "zero2"):
        terms = full(world_size=8, sharding=stage).terms_bytes
        assert terms["weights"] + terms["master_copy"] == full().terms_bytes["master_copy"] * 9 // 8
    for stage in ("zero3", "fsdp2"):
        terms = full(world_size=8, sharding=stage).terms_bytes
        assert terms["weights"] == 0 and terms["buffers"] > 0  # layers are gathered one by one
    adapter = {stage: lora(world_size=8, sharding=stage).terms_bytes for stage in ("ddp", "zero2", "zero3")}
    assert adapter["zero2"]["adapters"] == adapter["ddp"]["adapters"] == 8 * adapter["zero2"]["master_copy"]
    assert adapter["zero3"]["adapters"] == adapter["ddp"]["adapters"] // 8


def test_a_sharded_frozen_base_is_divided_only_in_stage_3() -> None:
    planned = recipe()
    alone = forecast_training(planned, LLAMA_8B, device="cuda").terms_bytes["weights"]
    for stage, divisor in (("zero1", 1), ("zero2", 1), ("zero3", 4)):
        terms = forecast_training(planned, LLAMA_8B, device="cuda", world_size=4, sharding=stage).terms_bytes
        assert terms["weights"] == pytest.approx(alone / divisor)
        assert terms["buffers"] > 0


@pytest.mark.parametrize(
    ("sharding", "offload", "moved"),
    [
        ("zero1", "optimizer", ["optimizer", "master_copy"]),
        ("zero2", "optimizer", ["optimizer", "master_copy", "gradients"]),
        ("zero3", "optimizer", ["optimizer", "gradients"]),
        ("zero3", "all", ["optimizer", "gradients", "master_copy", "weights"]),
        ("fsdp2", "all", ["optimizer", "gradients", "master_copy", "weights"]),
    ],
)
def test_offloading_moves_bytes_to_the_host_and_loses_none(
    sharding: Any, offload: Any, moved: list[str]
) -> None:
    kept = full(world_size=4, sharding=sharding)
    without = full(world_size=4, sharding=sharding, offload=offload)
    assert all(without.terms_bytes[name] == 0 for name in moved)
    copied = kept.terms_bytes["master_copy"] if sharding == "zero3" else 0  # the part that is stepped there
    assert without.host_bytes == sum(kept.terms_bytes[name] for name in moved) + copied
    assert without.total_bytes < kept.total_bytes


@pytest.mark.parametrize(
    ("sharding", "offload"),
    [("none", "optimizer"), ("ddp", "all"), ("zero1", "all"), ("zero2", "all"), ("fsdp2", "optimizer")],
)
def test_what_nothing_can_offload_is_refused(sharding: Any, offload: Any) -> None:
    with pytest.raises(UserError, match="--offload"):
        full(world_size=4, sharding=sharding, offload=offload)


def test_terms_add_up_to_the_total() -> None:
    for sections in ({}, {"model": {"quantize": "nf4"}}, {"adapter": {"kind": "dora"}}):
        forecast = forecast_training(recipe(**sections), LLAMA_8B)
        assert sum(forecast.terms_bytes.values()) == forecast.total_bytes
        assert sum(forecast.to_dict()["terms_bytes"].values()) == forecast.total_bytes
