"""Weights spread over processes: what was asked for, and whether it can be had here. Asked before a weight is loaded.

accelerate ignores an FSDP plugin on a CPU without a word: every process would hold the whole model.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Literal

from finetune.errors import Fault, UserError
from finetune.recipe.schema import Recipe

Sharding = Literal["none", "fsdp1", "fsdp2", "deepspeed"]


def asked_sharding() -> tuple[Sharding, bool]:
    """What accelerate's launcher put into the environment of this process, and whether there is a GPU."""
    import torch

    return sharding_of(os.environ), torch.cuda.is_available()


def sharding_of(environment: Mapping[str, str]) -> Sharding:
    """The kind of sharding that accelerate's variables ask for."""
    if environment.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true":
        return "deepspeed"
    if environment.get("ACCELERATE_USE_FSDP", "false").lower() == "true":
        return "fsdp2" if environment.get("FSDP_VERSION", "1") == "2" else "fsdp1"
    return "none"


def check_sharding(sharding: Sharding, on_cuda: bool) -> None:
    """Raise UserError where weights cannot be spread as asked."""
    if sharding == "none":
        return
    if sharding == "deepspeed":
        raise UserError(
            "DeepSpeed is not supported",
            where="the launch config",
            why="its checkpoints are pickle, which is neither written nor read here",
            fix="use recipes/launch/fsdp2_8.yaml, which spreads weights, gradients and optimizer states as ZeRO-3 does",
        )
    if not on_cuda:
        raise UserError(
            "FSDP needs GPUs, and this machine has none",
            where="the launch config",
            why="on a CPU accelerate would leave it out in silence, and every process would hold the whole model",
            fix="use recipes/launch/ddp_2.yaml, which shares out the rows only",
        )
    if sharding == "fsdp1":
        raise UserError(
            "the first version of FSDP is not supported",
            where="fsdp_config.fsdp_version",
            why="it saves weights and optimizer states as pickle",
            fix="set fsdp_version: 2, as in recipes/launch/fsdp2_8.yaml",
        )


def has_experts(config: Any) -> bool:
    """Whether tokens choose among experts, so that some weights may have no part in a step."""
    text = config.get_text_config()
    return any(getattr(text, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts"))


# Optimizers that treat every number by itself, so that a part of a matrix is stepped as it is in the whole one.
_ELEMENTWISE = ("adamw", "adamw_fused", "sgd", "momentum", "lion", "ademamix")


def sharding_faults(recipe: Recipe, sharding: Sharding) -> list[Fault]:
    """What of a recipe does not go with weights that are spread over processes: supervised LoRA and full tuning do."""
    if sharding == "none":
        return []
    model, adapter, train = recipe.model, recipe.adapter, recipe.train
    rules = [
        (
            model.quantize != "none",
            "model.quantize",
            f"{model.quantize} weights are stored as bytes, which cannot be spread",
        ),
        (model.dtype == "fp16", "model.dtype", "the scale of fp16 losses is not shared; bf16 needs none"),
        (bool(model.new_tokens), "model.new_tokens", "new rows of an embedding cannot be trained alone"),
        (adapter.kind not in ("lora", "none"), "adapter.kind", f"{adapter.kind} computes with whole weights"),
        (
            adapter.init not in ("default", "gaussian"),
            "adapter.init",
            f"{adapter.init} computes with whole weights",
        ),
        (train.method != "sft", "train.method", f"{train.method} scores with the model before it is spread"),
        (
            train.optimizer not in _ELEMENTWISE,
            "train.optimizer",
            f"{train.optimizer} needs whole matrices or a state of its own; {' and '.join(_ELEMENTWISE[:2])} do not",
        ),
        (
            train.result == "best" or train.early_stopping is not None,
            "train.result",
            "the weights of an earlier step are read into a whole model",
        ),
        (train.samples is not None, "train.samples", "answers are generated with a whole model"),
    ]
    return [
        Fault(
            "it does not go with weights that are spread over processes",
            key,
            why,
            f"change {key}, or start with recipes/launch/ddp_8.yaml, where every process has the whole model",
        )
        for applies, key, why in rules
        if applies
    ]


def refuse_spread_weights(trainer: Any, *, where: str, fix: str) -> None:
    """Raise UserError, at the key that asks a model in training for answers, where no process holds all of its weights."""
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        raise UserError(
            "no process holds the whole model, so none can write an answer while it trains",
            where=where,
            why="its weights are spread over the processes",
            fix=fix,
        )
