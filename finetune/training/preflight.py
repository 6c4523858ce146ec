"""What a recipe asks of the machine, checked before a weight is loaded; all faults at once, each with what to set instead."""

from __future__ import annotations

import importlib.util

import torch

from finetune.errors import Fault, UserError
from finetune.recipe.schema import Recipe
from finetune.training.optimizers import check_optimizer

# NVIDIA Ada and Hopper are the first with products of 8-bit floats.
_FP8_CAPABILITY = (8, 9)


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
        faults += _fp8_faults(on_cuda)
    if faults:
        raise UserError(faults)


def _fp8_faults(on_cuda: bool) -> list[Fault]:
    where, instead = "train.fp8", "set train.fp8: false; bf16 is the next smaller step"
    if not on_cuda:
        return [Fault("8-bit floats need a GPU that multiplies them", where, "there is no GPU", instead)]
    capability = torch.cuda.get_device_capability()
    if capability < _FP8_CAPABILITY:
        why = f"this one has compute capability {capability[0]}.{capability[1]}, 8.9 is the first with such products"
        return [Fault("8-bit floats need a GPU that multiplies them", where, why, instead)]
    if importlib.util.find_spec("torchao") is None:
        return [
            Fault("8-bit floats need the package torchao", where, "", "pip install 'finetune-pipeline[fp8]'")
        ]
    return []
