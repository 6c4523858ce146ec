"""Weights spread over processes: what was asked for, and whether it can be had here. Asked before a weight is loaded.

accelerate ignores an FSDP plugin on a CPU without a word: every process would hold the whole model.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from typing import Literal

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
    if not on_cuda:
        name = "DeepSpeed" if sharding == "deepspeed" else "FSDP"
        raise UserError(
            f"{name} needs GPUs, and this machine has none",
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
    if sharding == "deepspeed" and importlib.util.find_spec("deepspeed") is None:
        raise UserError("DeepSpeed is not installed", where="the launch config", fix="pip install deepspeed")


def sharding_faults(recipe: Recipe, sharding: Sharding) -> list[Fault]:
    """What of a recipe does not go with weights that are spread over processes."""
    if sharding == "none":
        return []
    faults = []
    if recipe.model.quantize != "none":
        faults.append(
            Fault(
                f"{recipe.model.quantize} weights cannot be spread over processes",
                "model.quantize",
                "they are stored as bytes, which sharding leaves whole in every process or tears apart",
                "start with recipes/launch/ddp_2.yaml, or set model.quantize: none",
            )
        )
    return faults
