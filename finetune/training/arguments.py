"""The recipe in the terms of transformers' trainer: what every method has in common."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import torch

from finetune.recipe.schema import Recipe, TrainSection
from finetune.training.memory_saving import checkpointing_arguments
from finetune.training.processes import n_processes
from finetune.training.sharding import sharding_of
from finetune.training.shares import micro_batches_of_process


def count_steps(n_examples: int, settings: TrainSection) -> int:
    """Optimizer steps of the whole run, as many whatever the number of processes (the last window may be short)."""
    batches = math.ceil(n_examples / settings.micro_batch_size)
    per_epoch = max(math.ceil(batches / settings.gradient_accumulation_steps), 1)
    steps = math.ceil(settings.epochs * per_epoch)
    return min(steps, settings.max_steps) if settings.max_steps else steps


def shared_arguments(
    recipe: Recipe, total_steps: int, output: Path, *, validates: bool = True
) -> dict[str, Any]:
    """Arguments of every trainer: steps, batch, precision, checkpoints, trackers.

    Optimizer and schedule are not among them: ExactTrainer builds the recipe's own. `validates`: whether there are rows
    to validate on.
    """
    settings = recipe.train
    return {
        "output_dir": str(output),
        "max_steps": total_steps,
        "per_device_train_batch_size": settings.micro_batch_size,
        "per_device_eval_batch_size": settings.micro_batch_size,
        # With a batch ramp an item of the loader is a whole step already (batch_ramp.py).
        "gradient_accumulation_steps": 1
        if settings.batch_ramp
        else micro_batches_of_process(settings, n_processes()),
        "learning_rate": settings.learning_rate,
        "weight_decay": settings.weight_decay,
        "max_grad_norm": settings.max_grad_norm,
        "bf16": recipe.model.dtype == "bf16" and sharding_of(os.environ) != "deepspeed",  # see zero.py
        "fp16": recipe.model.dtype == "fp16",
        **_device_arguments(),
        **checkpointing_arguments(settings),
        "seed": recipe.seed,
        "data_seed": recipe.seed,
        "save_strategy": "steps",
        "save_steps": settings.checkpoint_every_steps,
        "eval_strategy": "steps" if settings.validate_every_steps and validates else "no",
        "eval_steps": settings.validate_every_steps,
        "logging_strategy": "steps" if settings.report_to else "no",
        "logging_steps": 1,
        "logging_nan_inf_filter": False,
        "report_to": list(settings.report_to) or "none",
        "run_name": recipe.name,  # as trackers show it
        "disable_tqdm": True,
    }


def _device_arguments() -> dict[str, Any]:
    """Where to train. accelerate leaves DeepSpeed out in silence if it is told to use the CPU; without a GPU it does anyway."""
    if torch.cuda.is_available():
        return {"use_cpu": False}
    spread = sharding_of(os.environ) == "deepspeed"
    return {"use_cpu": not spread, "ddp_backend": "gloo" if spread else None}
