"""Memory forecast, term by term, from a recipe and the model's config.json: before any weight is loaded.

A term is what is held at the worst moment of a step, so the terms add up to the peak. Three moments are compared: the
loss (everything the forward kept, and a tile of logits), the backward pass of one layer, and the optimizer step.
Measured against real runs by benchmarks/memory_forecast.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from finetune.plan.activations import (
    AttentionPattern,
    Tuning,
    checkpoint_bytes,
    fuses_adapters,
    head_bytes,
    layer_backward_bytes,
    layer_saved_bytes,
    outside_saved_bytes,
    unlearnt_head_bytes,
)
from finetune.plan.architecture import Architecture, LinearShape, adapted_linears, read_architecture
from finetune.plan.forecast import TERMS, Device, Forecast, finish
from finetune.plan.heap import generation_holes_bytes, update_holes_bytes
from finetune.plan.kernel_cache import kernel_cache_bytes
from finetune.plan.sharding import Offload, Sharding, shard
from finetune.plan.states import BYTES_PER_ELEMENT, ModelStates, Quantization, model_states
from finetune.plan.teacher import TeacherPlan, loss_bytes, runs_beside
from finetune.plan.trained import DOUBLED_STARTS, trained_elements
from finetune.plan.weights import forward_bytes, weight_terms
from finetune.recipe.adapter_section import LOW_RANK, TARGETED, VIRTUAL_TOKENS
from finetune.recipe.schema import Recipe

# The most that the telemetry copies of the weights in fp32 (finetune/telemetry/updates.py).
WATCHED_BYTES = 4 * 50_000_000
# Prompt tokens that the decoder lets in at once (finetune/evaluation/generate.py).
PREFILL_TOKENS = 2048


def forecast_training(
    recipe: Recipe,
    config: Mapping[str, Any],
    *,
    longest_pack_tokens: int | None = None,
    target_share: float = 1.0,
    distinct_lengths: int | None = None,
    device: Device = "cpu",
    world_size: int = 1,
    sharding: Sharding = "none",
    offload: Offload = "none",
    optimizer: str | None = None,
    teacher: TeacherPlan | None = None,
) -> Forecast:
    """Peak of the training steps on each of `world_size` devices.

    `config` is the parsed config.json. `longest_pack_tokens` is the longest pack (or row, without packing) really in
    the data; without it the recipe's capacity, the upper bound. `target_share` is the share of tokens that carry loss.
    `distinct_lengths` is the number of lengths that forward passes have; None is many, which fills the CPU's cache of
    kernels. `optimizer` defaults to the recipe's. `teacher` counts where it runs beside the
    student; every device then holds it whole. Raises UserError for a model type or target modules that are not known.
    """
    optimizer = optimizer or recipe.train.optimizer
    architecture = read_architecture(config)
    tuning = tuning_of(recipe, architecture, device)
    row_tokens = _row_tokens(recipe, longest_pack_tokens)
    n_tokens = recipe.train.micro_batch_size * row_tokens
    attention = attention_of(recipe, row_tokens)
    states, n_trainable = _states(recipe, architecture, tuning, optimizer)
    buffers = _buffers(recipe, architecture, tuning, n_tokens)
    terms = {**dict.fromkeys(TERMS, 0), **states, "buffers": buffers}
    if device == "cpu" and tuning.compute_bytes < 4:
        terms["kernel_cache"] = kernel_cache_bytes(distinct_lengths)
    terms, host_bytes = shard(terms, architecture, world_size, sharding, offload)
    n_targets = math.ceil(target_share * n_tokens)
    moments = _moments(recipe, architecture, tuning, attention, n_tokens, n_targets, terms)
    if teacher is not None and runs_beside(recipe) is not None:
        teacher.add_to(terms, moments, n_tokens, n_targets)
    moment = max(moments, key=lambda name: sum(moments[name].values()))
    at_worst = moments[moment]
    if device == "cpu":
        at_worst = at_worst | {"fragmentation": update_holes_bytes(architecture, tuning)}
    return finish(
        {**terms, **at_worst},
        device=device,
        moment=moment,
        architecture=architecture,
        n_trainable=n_trainable,
        host_bytes=host_bytes,
        moments=moments,
        assumptions={
            "tokens_per_forward": n_tokens,
            "longest_row_tokens": row_tokens,
            "attention": attention.kind,
            "optimizer": optimizer,
            "world_size": world_size,
            "sharding": sharding,
            "offload": offload,
        },
    )


def forecast_generation(
    config: Mapping[str, Any],
    batch: int,
    prompt_tokens: int,
    new_tokens: int,
    dtype: str,
    *,
    device: Device = "cpu",
    adapter_parameters: int = 0,
    quantize: Quantization = "none",
    double_quantization: bool = True,
    distinct_lengths: int | None = None,
    behind_training: bool = False,
) -> Forecast:
    """Peak of generating up to `new_tokens` after prompts of up to `prompt_tokens`, `batch` sequences at a time.

    `dtype` is 'fp32', 'bf16' or 'fp16', of weights and cache. `adapter_parameters` are held in fp32 beside the base. The
    worst moment is when the last free slots are filled: every slot has its keys and values, and prompts are read, as many
    at once as the decoder lets in; or, on a CPU, when the weights are loaded in another type than they are stored in, and
    their mapped file is still there. `behind_training`: in a process whose training has left its kernels. `distinct_lengths` of prompts: see `forecast_training`. Tokens that all prompts begin with are held once, so the forecast is an upper bound.
    """
    architecture = read_architecture(config)
    c = BYTES_PER_ELEMENT[dtype]
    n_prefill = min(batch * prompt_tokens, max(prompt_tokens, PREFILL_TOKENS))
    terms = dict.fromkeys(TERMS, 0)
    terms |= weight_terms(architecture, c, quantize, double_quantization)
    terms["adapters"] = adapter_parameters * 4
    terms["logits"] = batch * architecture.vocabulary * c
    terms["kv_cache"] = (
        2 * architecture.n_layers * architecture.kv_width * c * batch * (prompt_tokens + new_tokens)
    )
    terms["activations"] = n_prefill * forward_bytes(architecture, c)
    if device == "cpu":
        terms["fragmentation"] = generation_holes_bytes(terms["activations"])
        terms["kernel_cache"] = kernel_cache_bytes(distinct_lengths) if c < 4 or behind_training else 0
    moment, loading = "prefill", terms | dict.fromkeys(_ONLY_WHILE_ANSWERING, 0)
    if device == "cpu" and quantize == "none":
        loading["buffers"] = _stored_bytes(config, architecture, c)
    if sum(loading.values()) > sum(terms.values()):
        moment, terms = "loading", loading
    return finish(
        terms,
        device=device,
        moment=moment,
        architecture=architecture,
        n_trainable=0,
        host_bytes=0,
        assumptions={
            "batch": batch,
            "prompt_tokens": prompt_tokens,
            "new_tokens": new_tokens,
            "dtype": dtype,
        },
    )


_ONLY_WHILE_ANSWERING = ("activations", "logits", "kv_cache", "fragmentation")


def _stored_bytes(config: Mapping[str, Any], architecture: Architecture, weight_bytes: int) -> int:
    """The weight file, while a model is loaded from it in another type; weights of the file's own type are its pages."""
    stored = {"bfloat16": 2, "float16": 2, "float32": 4}.get(
        str(config.get("dtype") or config.get("torch_dtype")), weight_bytes
    )
    return 0 if stored == weight_bytes else architecture.n_parameters * stored


def _row_tokens(recipe: Recipe, longest_pack_tokens: int | None) -> int:
    """Tokens of the longest pack or row, virtual ones in front included."""
    in_front = recipe.adapter.virtual_tokens if recipe.adapter.kind in VIRTUAL_TOKENS else 0
    return (longest_pack_tokens or most_row_tokens(recipe)) + in_front


def most_row_tokens(recipe: Recipe) -> int:
    """Tokens that a pack holds at the most, or a row without packing: `data.max_tokens` limits a prompt with one answer, and
    a pair, or an answer with KTO's mismatched one, has two."""
    train = recipe.train
    return (
        train.pack_tokens
        if train.packing
        else recipe.data.max_tokens * train.preference.answers_of(train.method)
    )


def adapter_parameters(
    architecture: Architecture,
    rank: int,
    *,
    adapted: tuple[LinearShape, ...] | None = None,
    dora: bool = False,
) -> int:
    """Trained elements of an adapter: r·(n_in + n_out) a matrix, and n_out magnitudes with DoRA; over all layers."""
    linears = architecture.layer_linears if adapted is None else adapted
    per_layer = sum(rank * (linear.n_in + linear.n_out) + (linear.n_out if dora else 0) for linear in linears)
    return architecture.n_layers * per_layer


def tuning_of(recipe: Recipe, architecture: Architecture, device: Device = "cpu") -> Tuning:
    """How this recipe trains, in the terms that decide which tensors are kept."""
    section = recipe.adapter
    compute_bytes = BYTES_PER_ELEMENT[recipe.model.dtype]
    fused = recipe.train.gradient_checkpointing != "selective"  # memory_saving.keeps_in_place_products
    if section.kind == "none":
        return Tuning(
            "none",
            compute_bytes,
            autocast=compute_bytes < 4,
            quantized=False,
            on_cpu=device == "cpu",
            fused=fused,
        )
    targeted = section.kind in TARGETED
    # Activations of VeRA and IA3 lie like LoRA's; kinds without matrices of their own keep none for them.
    return Tuning(
        "dora" if section.kind == "dora" else "lora",
        compute_bytes,
        autocast=compute_bytes < 4,
        quantized=recipe.model.quantize != "none",
        rank=section.rank * (2 if section.init in DOUBLED_STARTS else 1) if targeted else 0,
        dropout=section.dropout > 0,
        adapted=adapted_linears(architecture, section.target_modules) if targeted else (),
        on_cpu=device == "cpu",
        fused=fused,
        plain_adapters=section.kind in LOW_RANK,
    )


def attention_of(recipe: Recipe, row_tokens: int) -> AttentionPattern:
    """The attention that the recipe takes. Padded batches and packed rows without `document` attend under a mask."""
    kind = recipe.attention
    by_segment = kind == "document" and recipe.learns_preferences  # rows of a batch, too
    padded = not recipe.train.packing and recipe.train.micro_batch_size > 1 and not by_segment
    masked = padded or (recipe.train.packing and kind == "sdpa")
    # A micro-batch of packs is laid end to end, so a dense mask spans all of it.
    n_tokens = row_tokens * (recipe.train.micro_batch_size if recipe.train.packing else 1)
    return AttentionPattern(kind, n_tokens, masked)


def _moments(
    recipe: Recipe,
    architecture: Architecture,
    tuning: Tuning,
    attention: AttentionPattern,
    n_tokens: int,
    n_targets: int,
    terms: dict[str, int],
) -> dict[str, dict[str, int]]:
    """What differs between the moments of a step: activations, logits, gradients, and buffers."""
    checkpointing = recipe.train.gradient_checkpointing
    layer = layer_saved_bytes(architecture, tuning, attention, n_tokens)
    kept = architecture.n_layers * _kept_bytes(architecture, tuning, n_tokens, layer, checkpointing)
    kept += outside_saved_bytes(architecture, tuning, n_tokens) + _autocast_copies(architecture, tuning)
    one_layer = layer_backward_bytes(architecture, tuning, n_tokens) + (layer if checkpointing else 0)
    head = head_bytes(architecture, tuning, n_targets, n_tokens)
    if recipe.distil is not None and recipe.distil.way != "answers":
        head = loss_bytes(architecture, tuning, n_targets)
    unlearnt = unlearnt_head_bytes(architecture, tuning, n_targets, n_tokens)
    held, buffers = terms["gradients"], terms["buffers"]
    so_far = held if recipe.train.gradient_accumulation_steps > 1 else 0
    # Weights before the step are copied to see how far it moves them (finetune/telemetry/updates.py).
    watched = min(terms["adapters"] + terms["master_copy"] or terms["weights"], WATCHED_BYTES)

    def at(activations: int, logits: int, gradients: int, more: int = 0) -> dict[str, int]:
        return {
            "activations": activations,
            "logits": logits,
            "gradients": gradients,
            "buffers": buffers + more,
        }

    return {
        "loss": at(kept, head, so_far),
        "first backward layer": at(kept + one_layer, 0, so_far),
        "last backward layer": at(one_layer, 0, held),
        "optimizer step": at(0, 0, held, watched),
        # The same packs without gradients: one layer at a time, and the logits of a chunk with what their sum takes.
        "validation": at(n_tokens * forward_bytes(architecture, tuning.compute_bytes), unlearnt, 0),
    }


def _kept_bytes(
    architecture: Architecture,
    tuning: Tuning,
    n_tokens: int,
    layer: int,
    checkpointing: bool | Literal["selective"],
) -> int:
    """What one layer keeps until its backward: all, its input, or its input and the results of its matrix products."""
    if not checkpointing:
        return layer
    kept = checkpoint_bytes(architecture, tuning, n_tokens)
    if checkpointing == "selective":
        kept += n_tokens * tuning.compute_bytes * sum(linear.n_out for linear in architecture.layer_linears)
    return min(kept, layer)


def _states(
    recipe: Recipe, architecture: Architecture, tuning: Tuning, optimizer: str
) -> tuple[dict[str, int], int]:
    """Bytes of the long-lived terms, and the number of trained parameters."""
    weight_bytes = BYTES_PER_ELEMENT[recipe.model.dtype]
    terms = {"weights": 0, "quantization_constants": 0, "master_copy": 0, "adapters": 0}
    if tuning.kind == "none":
        n_trainable = trained_elements(recipe.adapter, architecture).trained
        states = model_states(
            n_trainable, weight_bytes=4, master_copy=False, gradient_bytes=4, optimizer=optimizer
        )
        terms["master_copy" if tuning.autocast else "weights"] = states.weights
        terms["weights"] += (
            architecture.n_parameters - n_trainable
        ) * weight_bytes  # frozen layers and modules
        return terms | _trainable_terms(states), n_trainable
    elements = trained_elements(recipe.adapter, architecture)
    n_trainable = elements.trained
    states = model_states(
        n_trainable, weight_bytes=4, master_copy=False, gradient_bytes=4, optimizer=optimizer
    )
    terms["adapters"] = states.weights + 4 * elements.held
    terms |= weight_terms(architecture, weight_bytes, recipe.model.quantize, recipe.model.double_quantization)
    return terms | _trainable_terms(states), n_trainable


def _autocast_copies(architecture: Architecture, tuning: Tuning) -> int:
    """Copies in the compute type that autocast makes of fp32 matrices, kept until their backward pass is through.

    The fused passes of LoRA make them anew.
    """
    if not tuning.autocast or fuses_adapters(architecture, tuning):
        return 0
    if tuning.kind == "none":
        return architecture.linear_parameters * tuning.compute_bytes
    return tuning.compute_bytes * adapter_parameters(architecture, tuning.rank, adapted=tuning.adapted)


def _trainable_terms(states: ModelStates) -> dict[str, int]:
    return {"gradients": states.gradients, "optimizer": states.optimizer + states.optimizer_constants}


def _buffers(recipe: Recipe, architecture: Architecture, tuning: Tuning, n_tokens: int) -> int:
    """Dequantized or composed weights of one matrix, and the dense mask."""
    total = 0
    if tuning.quantized:
        total += architecture.largest_linear * tuning.compute_bytes
    if tuning.kind == "dora":
        total += _composed_bytes(tuning)
    if recipe.train.packing and recipe.model.attention in ("sdpa", "eager"):
        total += n_tokens * n_tokens * tuning.compute_bytes
    return total


def _composed_bytes(tuning: Tuning) -> int:
    """What DoRA builds to take the norm of a matrix's weights, one matrix at a time: an identity in fp32 and cast, and per
    element the update in two types, the weight, their sum and its parts."""
    return max((6 * linear.n_in**2 + 14 * linear.matrix_parameters for linear in tuning.adapted), default=0)


__all__ = [
    "Forecast",
    "adapter_parameters",
    "attention_of",
    "forecast_generation",
    "forecast_training",
    "tuning_of",
]
