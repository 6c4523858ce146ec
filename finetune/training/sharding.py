"""Weights spread over processes: what was asked for, and whether it can be had here. Asked before a weight is loaded.

accelerate ignores an FSDP plugin on a CPU without a word: every process would hold the whole model.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
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


def is_deepspeed_installed() -> bool:
    """Whether the extra `deepspeed` is there."""
    return importlib.util.find_spec("deepspeed") is not None


def load_deepspeed() -> None:
    """Import DeepSpeed, if it is there, so that what it logs goes to standard error: standard output belongs to answers.

    accelerate imports it in every training where it is installed, whether it is asked for or not.
    """
    if is_deepspeed_installed():
        with contextlib.redirect_stdout(sys.stderr):
            importlib.import_module("deepspeed")


def check_sharding(sharding: Sharding, on_cuda: bool) -> None:
    """Raise UserError where weights cannot be spread as asked."""
    if sharding == "none":
        return
    if sharding == "deepspeed":
        if not is_deepspeed_installed():
            raise UserError(
                "DeepSpeed is not installed",
                where="the launch config",
                why="it is no part of a plain installation",
                fix="pip install 'finetune-pipeline[deepspeed]', or use recipes/launch/fsdp2_8.yaml, which spreads as much",
            )
        return
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


# Keys of accelerate's deepspeed_config, the variables that its launcher makes of them, and the values that are proven here.
_ZERO_KEYS: dict[str, tuple[str, tuple[str, ...], str]] = {
    "zero_stage": ("ZERO_STAGE", ("2", "3"), "2"),
    "offload_optimizer_device": ("OFFLOAD_OPTIMIZER_DEVICE", ("none", "cpu"), "none"),
    "offload_param_device": ("OFFLOAD_PARAM_DEVICE", ("none", "cpu"), "none"),
    "zero3_init_flag": ("ZERO3_INIT", ("false",), "false"),
    "deepspeed_config_file": ("CONFIG_FILE", ("none",), "none"),
    "gradient_accumulation_steps": ("", ("auto",), "auto"),
    "gradient_clipping": ("", ("auto",), "auto"),
    "deepspeed_multinode_launcher": ("", ("standard",), "standard"),
}
_ZERO_REASONS = {
    "zero_stage": "stage 2 spreads gradients and optimizer states, 3 weights too; without either use recipes/launch/ddp_8.yaml",
    "zero3_init_flag": "the model is read whole, checked, and spread then",
    "deepspeed_config_file": "its keys could change the loss, the precision or the step",
    "gradient_accumulation_steps": "the recipe says it",
    "gradient_clipping": "the recipe says it (train.max_grad_norm)",
}


def zero_of_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The deepspeed_config that accelerate's launcher put into variables."""
    found = {}
    for key, (variable, _, _) in _ZERO_KEYS.items():
        if variable and (value := environment.get(f"ACCELERATE_DEEPSPEED_{variable}")) is not None:
            found[key] = value
    return found


def check_zero(config: Mapping[str, Any]) -> None:
    """Raise UserError for keys and values of a deepspeed_config that change what is trained, or are not proven here."""
    values = {key: str(value).lower() for key, value in config.items() if value is not None}
    if values.get("zero_stage") == "3":
        values.setdefault("zero3_init_flag", "true")  # accelerate's default
    faults = []
    for key, value in values.items():
        _, allowed, usual = _ZERO_KEYS.get(key, ("", (), ""))
        if value not in allowed:
            fix = f"set {key}: {usual}" if allowed else f"leave out {key}"
            faults.append(
                Fault(
                    f"{key}: {value} is not supported",
                    f"deepspeed_config.{key}",
                    _ZERO_REASONS.get(key, ""),
                    fix,
                )
            )
    if faults:
        raise UserError(faults)


def has_experts(config: Any) -> bool:
    """Whether tokens choose among experts, so that some weights may have no part in a step."""
    text = config.get_text_config()
    return any(getattr(text, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts"))


# Optimizers that treat every number by itself, so that a part of a matrix is stepped as it is in the whole one.
_ELEMENTWISE = ("adamw", "adamw_fused", "sgd", "momentum", "lion", "ademamix")
# DeepSpeed flattens a group into one vector: of these the state is known to be one number for each of its elements.
_FLATTENED = ("adamw", "adamw_fused", "sgd", "momentum", "lion")


def sharding_faults(recipe: Recipe, sharding: Sharding) -> list[Fault]:
    """What of a recipe does not go with weights that are spread over processes: supervised LoRA and full tuning do."""
    if sharding == "none":
        return []
    model, adapter, train = recipe.model, recipe.adapter, recipe.train
    optimizers = _FLATTENED if sharding == "deepspeed" else _ELEMENTWISE
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
            train.optimizer not in optimizers,
            "train.optimizer",
            f"{train.optimizer} needs whole matrices or a state of its own; {' and '.join(optimizers[:2])} do not",
        ),
        (
            sharding == "deepspeed" and train.gradient_checkpointing == "selective",
            "train.gradient_checkpointing",
            "DeepSpeed gathers weights for whole layers, which are recomputed whole",
        ),
        (
            train.result == "best" or train.early_stopping is not None,
            "train.result",
            "the weights of an earlier step are read into a whole model",
        ),
        (
            train.batch_ramp is not None,
            "train.batch_ramp",
            "a step's gradients are spread once, not batch by batch",
        ),
        (train.fp8, "train.fp8", "products in 8 bits read whole weights"),
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
