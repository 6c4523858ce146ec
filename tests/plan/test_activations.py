"""The list of kept tensors, against what autograd really saves on built models."""

from __future__ import annotations

import contextlib
import weakref
from pathlib import Path
from typing import Any

import pytest

from finetune.plan.activations import (
    AttentionPattern,
    Tuning,
    fuses_adapters,
    layer_saved_bytes,
    outside_saved_bytes,
)
from finetune.plan.architecture import adapted_linears, read_architecture

N_TOKENS = 96
RANK = 8
# What the list leaves out: rows of one number a token, cast adapters, and the vectors of DoRA.
SMALL_TENSOR_BYTES = 16_000


def built(model_type: str, **dropouts: float) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    if model_type == "gpt2":
        config = AutoConfig.for_model(
            "gpt2", n_embd=128, n_head=4, n_layer=2, vocab_size=311, n_positions=256, **dropouts
        )
    else:
        config = AutoConfig.for_model(
            model_type,
            hidden_size=128,
            intermediate_size=320,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            vocab_size=311,
            pad_token_id=0,
        )
    return AutoModelForCausalLM.from_config(config)


def adapt(model: Any, kind: str, dropout: float = 0.0, *, fused: bool = True) -> Any:
    from peft import LoraConfig, get_peft_model

    from finetune.model.fast import speed_up

    if kind == "none":
        speed_up(model)
        return model
    config = LoraConfig(
        r=RANK,
        lora_alpha=16,
        lora_dropout=dropout,
        target_modules="all-linear",
        use_dora=kind == "dora",
        task_type="CAUSAL_LM",
    )
    adapted = get_peft_model(model, config)
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    if fused:
        speed_up(adapted)
    return adapted.get_base_model()


def plain_row() -> dict[str, Any]:
    import torch

    ids = torch.randint(0, 311, (1, N_TOKENS), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "position_ids": torch.arange(N_TOKENS)[None]}


def saved_bytes(model: Any, *, autocast: bool, inputs: dict[str, Any] | None = None) -> int:
    """Bytes of distinct storages that the graph holds after the forward pass of the body, parameters left out."""
    import torch

    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: list[tuple[int, int, Any]] = []

    def pack(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept.append((storage.data_ptr(), storage.nbytes(), weakref.ref(tensor)))
        return tensor

    model.train()
    context = torch.autocast("cpu", dtype=torch.bfloat16) if autocast else contextlib.nullcontext()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), context:
        output = model.base_model(**(inputs or plain_row()), use_cache=False).last_hidden_state
    alive = {pointer: size for pointer, size, reference in kept if reference() is not None}
    assert output.requires_grad
    # The body's output is kept by the loss, which is not part of the body.
    own = output.untyped_storage()
    return sum(alive.values()) + (0 if own.data_ptr() in alive else own.nbytes())


def forecast_bytes(model: Any, tuning: Tuning, attention: str | AttentionPattern) -> int:
    architecture = read_architecture(model.config.to_dict())
    pattern = (
        AttentionPattern(attention, N_TOKENS)  # type: ignore[arg-type]
        if isinstance(attention, str)
        else attention
    )
    return architecture.n_layers * layer_saved_bytes(
        architecture, tuning, pattern, N_TOKENS
    ) + outside_saved_bytes(architecture, tuning, N_TOKENS)


def copies_bytes(model: Any, tuning: Tuning) -> int:
    """What autocast's copies of fp32 parameters occupy: a term of its own in the forecast."""
    if not tuning.autocast or fuses_adapters(read_architecture(model.config.to_dict()), tuning):
        return 0
    trained = [
        p
        for n, p in model.named_parameters()
        if p.requires_grad and p.dim() == 2 and "wte" not in n and "wpe" not in n
    ]
    return sum(2 * p.numel() for p in trained if p.shape[0] != 311)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("kind", ["lora", "dora", "none"])
@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gemma3_text", "gpt2"])
def test_kept_tensors_are_those_that_autograd_saves(
    model_type: str, kind: str, dtype: str, attention: str
) -> None:
    import torch

    if model_type == "gpt2" and (kind == "dora" or attention == "eager"):
        pytest.skip(
            "GPT-2's own eager attention, and composed weights of its transposed matrices: not forecast"
        )
    off = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0} if model_type == "gpt2" else {}
    model = built(model_type, **off)
    model.set_attn_implementation(attention)
    compute = torch.bfloat16 if dtype == "bf16" else torch.float32
    autocast = dtype == "bf16"
    model = adapt(model.to(compute) if kind != "none" else model, kind)
    architecture = read_architecture(model.config.to_dict())
    tuning = Tuning(
        kind,  # type: ignore[arg-type]
        2 if autocast else 4,
        autocast=autocast,
        quantized=False,
        rank=RANK if kind != "none" else 0,
        adapted=adapted_linears(architecture, "all-linear") if kind != "none" else (),
    )
    measured = saved_bytes(model, autocast=autocast) - copies_bytes(model, tuning)
    assert forecast_bytes(model, tuning, attention) == pytest.approx(
        measured, rel=0.02, abs=SMALL_TENSOR_BYTES
    )


def lora_bf16(architecture: Any, *, quantized: bool = False) -> Tuning:
    return Tuning(
        "lora", 2, autocast=True, quantized=quantized, rank=RANK, adapted=architecture.layer_linears
    )


def test_packed_documents_keep_what_one_row_keeps() -> None:
    import torch

    from finetune.model.attention import register_document_attention

    model = adapt(built("llama").to(torch.bfloat16), "lora")
    model.set_attn_implementation(register_document_attention())
    inputs = plain_row()
    inputs["position_ids"] = torch.cat([torch.arange(40), torch.arange(N_TOKENS - 40)])[None]
    tuning = lora_bf16(read_architecture(model.config.to_dict()))
    measured = saved_bytes(model, autocast=True, inputs=inputs) - copies_bytes(model, tuning)
    assert forecast_bytes(model, tuning, "document") == pytest.approx(
        measured, rel=0.02, abs=SMALL_TENSOR_BYTES
    )


def test_a_padded_batch_keeps_repeated_keys() -> None:
    import torch

    from finetune.model.attention import register_document_attention

    model = adapt(built("llama").to(torch.bfloat16), "lora")
    model.set_attn_implementation(register_document_attention())
    n_half = N_TOKENS // 2
    mask = torch.ones(2, n_half, dtype=torch.long)
    mask[1, -7:] = 0
    inputs = {"input_ids": plain_row()["input_ids"].view(2, n_half), "attention_mask": mask}
    tuning = lora_bf16(read_architecture(model.config.to_dict()))
    measured = saved_bytes(model, autocast=True, inputs=inputs) - copies_bytes(model, tuning)
    pattern = AttentionPattern("document", n_half, masked=True)
    assert forecast_bytes(model, tuning, pattern) == pytest.approx(measured, rel=0.04, abs=SMALL_TENSOR_BYTES)


def test_adapters_on_4_bit_weights_keep_their_own_inputs_on_cpus(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    built("llama").to(torch.bfloat16).save_pretrained(tmp_path)
    four_bit = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
    )
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=four_bit, dtype=torch.bfloat16
    )
    model = adapt(loaded, "lora")
    tuning = lora_bf16(read_architecture(model.config.to_dict()), quantized=True)
    measured = saved_bytes(model, autocast=True) - copies_bytes(model, tuning)
    assert forecast_bytes(model, tuning, "sdpa") == pytest.approx(measured, rel=0.03, abs=SMALL_TENSOR_BYTES)


def test_residual_and_attention_dropout_keep_their_noise() -> None:
    model = built("gpt2")
    tuning = Tuning("none", 2, autocast=True, quantized=False)
    measured = saved_bytes(model, autocast=True) - copies_bytes(model, tuning)
    assert forecast_bytes(model, tuning, "sdpa") == pytest.approx(measured, rel=0.03, abs=SMALL_TENSOR_BYTES)


def test_adapter_dropout_keeps_its_noise_and_an_input_for_each_matrix() -> None:
    model = adapt(built("llama"), "lora", dropout=0.1)
    architecture = read_architecture(model.config.to_dict())
    tuning = Tuning(
        "lora",
        4,
        autocast=False,
        quantized=False,
        rank=RANK,
        dropout=True,
        adapted=architecture.layer_linears,
    )
    assert forecast_bytes(model, tuning, "sdpa") == pytest.approx(
        saved_bytes(model, autocast=False), rel=0.02, abs=SMALL_TENSOR_BYTES
    )


def layer_bytes_per_token(recipe_keys: tuple[str, ...]) -> float:
    from finetune.plan.builtin import BUILTIN_CONFIGS
    from finetune.plan.memory import tuning_of
    from finetune.recipe.resolve import load_recipe

    architecture = read_architecture(BUILTIN_CONFIGS["smollm2-135m-instruct"])
    tuning = tuning_of(load_recipe("sft/home_intents_lora", recipe_keys), architecture)
    return layer_saved_bytes(architecture, tuning, AttentionPattern("document", 100), 100) / 100


def test_without_the_fused_passes_the_models_own_tensors_are_counted() -> None:
    hidden, middle, scales = 576, 1536, 2 * 4
    fused = layer_bytes_per_token(())
    own = layer_bytes_per_token(("train.gradient_checkpointing=selective",))
    # Norms in fp32 in place of bf16, the activation of the gate, and the input of the down projection.
    assert own - fused == 2 * hidden * 2 + 2 * middle * 2 - scales


@pytest.mark.parametrize("kind", ["lora", "dora"])
@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gemma3_text"])
def test_models_whose_passes_are_their_own_keep_what_the_unfused_list_says(
    model_type: str, kind: str
) -> None:
    import torch

    from finetune.model.fast_lora import speed_up_lora

    model = adapt(built(model_type).to(torch.bfloat16), kind, fused=False)
    speed_up_lora(model)
    architecture = read_architecture(model.config.to_dict())
    tuning = Tuning(
        kind,  # type: ignore[arg-type]
        2,
        autocast=True,
        quantized=False,
        rank=RANK,
        adapted=architecture.layer_linears,
        fused=False,
    )
    copies = copies_bytes(model, tuning) if kind == "dora" else 0  # LoRA's own pass makes none that stay
    measured = saved_bytes(model, autocast=True) - copies
    assert forecast_bytes(model, tuning, "sdpa") == pytest.approx(measured, rel=0.02, abs=SMALL_TENSOR_BYTES)
