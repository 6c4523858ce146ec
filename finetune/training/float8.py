"""Matrix products of training in 8-bit floats, by torchao, on GPUs that have them.

Inputs, weights and gradients of the layers' linear modules are scaled and rounded to 8 bits for each product (forward e4m3,
gradients e5m2 or e4m3 as torchao's recipe has it; Micikevicius et al. 2022, arXiv:2209.05433). Weights, optimizer and what
is saved stay as they are without it; embeddings, norms and the head do not take part.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import nn

from finetune.errors import Fault
from finetune.recipe.schema import Recipe

_FIRST_CAPABILITY = (8, 9)  # Ada; Hopper is 9.0
_MULTIPLE = 16  # sizes that the hardware multiplies in 8 bits


def float8_fault(recipe: Recipe, *, on_cuda: bool) -> Fault | None:
    """Why this machine cannot train the recipe in 8-bit floats, or None."""
    what, fix = "products in 8-bit floats are not available here", "set train.fp8: false"
    if not on_cuda or torch.cuda.get_device_capability() < _FIRST_CAPABILITY:
        why = "they need a GPU of compute capability 8.9 or more (Ada, Hopper and later)"
        return Fault(what, "train.fp8", why, f"{fix}; bf16 is the next smaller step")
    if importlib.util.find_spec("torchao") is None:
        why = "torchao is not installed, which is no part of a plain installation"
        return Fault(what, "train.fp8", why, f"pip install 'finetune-pipeline[fp8]', or {fix}")
    if recipe.adapter.kind != "none" or recipe.train.method != "sft":
        what = "products in 8-bit floats are for supervised tuning of all weights"
        why = "beside an adapter they would compute the gradient of every frozen weight as well, and throw it away"
        return Fault(what, "train.fp8", why, f"set adapter.kind: none and train.method: sft, or {fix}")
    return None


def use_float8(model: nn.Module) -> int:
    """Let the linear modules of the decoder layers multiply in 8 bits; returns how many do.

    Sizes that are no multiples of 16 stay as they are. Without a GPU the same rounding is emulated, slowly, for tests.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig(emulate=not torch.cuda.is_available(), pad_inner_dim=True)
    head: Any = model.get_output_embeddings()  # type: ignore[operator]
    chosen: list[str] = []

    def takes_part(module: nn.Module, name: str) -> bool:
        if type(module) is not nn.Linear or module is head:
            return False
        if module.in_features % _MULTIPLE or module.out_features % _MULTIPLE:
            return False
        chosen.append(name)
        return True

    convert_to_float8_training(model, module_filter_fn=takes_part, config=config)
    return len(chosen)
