"""What a recipe asks of the machine, checked before a weight is loaded; all faults at once, each with what to set instead."""

from __future__ import annotations

import os

import torch

from finetune.errors import Fault, UserError
from finetune.recipe.schema import Recipe
from finetune.training.optimizers import check_optimizer


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
    if recipe.train.fp8:
        faults.append(
            Fault(
                "products in 8-bit floats are not part of the training yet",
                "train.fp8",
                "the run would be one in the recipe's other precision under this name",
                "set train.fp8: false; bf16 is the next smaller step",
            )
        )
    if recipe.train.batch_ramp is not None and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        faults.append(
            Fault(
                "the batch ramp counts the windows of one process",
                "train.batch_ramp",
                f"this run has {os.environ['WORLD_SIZE']} processes",
                "leave out train.batch_ramp, or start one process",
            )
        )
    if faults:
        raise UserError(faults)
