"""What a recipe asks of the machine, checked before a weight is loaded; all faults at once, each with what to set instead."""

from __future__ import annotations

import os

import torch

from finetune.errors import Fault, UserError
from finetune.recipe.schema import Recipe
from finetune.telemetry.trackers import missing_trackers
from finetune.training.float8 import float8_fault
from finetune.training.optimizers import check_optimizer
from finetune.training.processes import n_processes
from finetune.training.sharding import sharding_faults, sharding_of
from finetune.training.shares import micro_batches_of_process


def check_training(recipe: Recipe, *, on_cuda: bool | None = None) -> None:
    """Raise UserError when this machine cannot run the recipe's precision, memory savings or optimizer as written."""
    on_cuda = torch.cuda.is_available() if on_cuda is None else on_cuda
    faults: list[Fault] = []
    try:
        check_optimizer(recipe.train, on_cuda=on_cuda)
    except UserError as error:
        faults += error.faults
    if recipe.model.dtype == "fp16" and not on_cuda:
        faults.append(
            Fault(
                "fp16 needs CUDA",
                "model.dtype",
                "its products are emulated on the CPU, and its losses are scaled to fit a range that bf16 does not have",
                "set model.dtype: bf16",
            )
        )
    if recipe.train.activation_offload and not on_cuda:
        faults.append(
            Fault(
                "there is no GPU to offload activations from",
                "train.activation_offload",
                "on the CPU they are in the host's memory already",
                "set train.gradient_checkpointing: true to keep fewer of them",
            )
        )
    if recipe.train.fp8 and (fault := float8_fault(recipe, on_cuda=on_cuda)) is not None:
        faults.append(fault)
    for name in missing_trackers(recipe.train.report_to):
        faults.append(
            Fault(
                f"the tracker {name} is not installed",
                "train.report_to",
                "trackers are extras of this package",
                f"pip install 'finetune-pipeline[{name}]', or take {name} out of train.report_to; events.jsonl is written either way",
            )
        )
    faults += _several_processes(recipe)
    if faults:
        raise UserError(faults)


def _several_processes(recipe: Recipe) -> list[Fault]:
    """What does not go with several processes, or with weights that are spread over them."""
    count, settings = n_processes(), recipe.train
    if count == 1:
        return []
    faults = sharding_faults(recipe, sharding_of(os.environ))
    if settings.on_divergence == "rewind":
        faults.append(
            Fault(
                "a divergence that one process sees would leave the others waiting",
                "train.on_divergence",
                f"this run has {count} processes",
                "set train.on_divergence: stop, or start one process",
            )
        )
    if settings.auto:
        faults.append(
            Fault(
                "the fastest batching is measured with one process",
                "train.auto",
                f"this run has {count} processes",
                "run it once with one process, and set what its auto.json says was chosen",
            )
        )
    try:
        micro_batches_of_process(settings, count)
    except UserError as error:
        faults += error.faults
    return faults
