"""Weights and optimizer states that FSDP2 spread over processes, as whole tensors on disk and back.

torch's and accelerate's own formats for them hold pickle. Here every tensor is gathered to the first process and written as
it would be without sharding, so that a run can go on with another number of processes, or with DDP, and the other way
round. Every function is collective: all processes call it, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor


def whole(value: Any) -> Any:
    """A nested state with every sharded tensor gathered, on the CPU."""
    if isinstance(value, dict):
        return {key: whole(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(whole(inner) for inner in value)
    if isinstance(value, DTensor):
        return value.full_tensor().detach().cpu()
    return value.detach().cpu() if isinstance(value, Tensor) else value


def whole_weights(model: nn.Module) -> dict[str, Tensor]:
    """The state dict of what is trained: of an adapter that only, of a whole model all of it."""
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    adapts = hasattr(model, "peft_config")
    return {
        name: whole(tensor) for name, tensor in model.state_dict().items() if not adapts or name in trained
    }


def like(parameter: Tensor, tensor: Tensor) -> Tensor:
    """A whole tensor spread as `parameter` is, if it has its shape; on its device in any case."""
    placed = tensor.to(parameter.device)
    if isinstance(parameter, DTensor) and tensor.shape == parameter.shape:
        return distribute_tensor(placed, parameter.device_mesh, parameter.placements)
    return placed


def spread_optimizer_state(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's whole state dict with the tensors of each parameter spread as the parameter is."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    by_number = dict(zip(numbers, parameters, strict=True))

    def placed(number: int, one: dict[str, Any]) -> dict[str, Any]:
        convert: Callable[[Any], Any] = lambda value: (  # noqa: E731
            like(by_number[number], value) if isinstance(value, Tensor) and value.dim() else value
        )
        return {name: convert(value) for name, value in one.items()}

    return {**state, "state": {number: placed(number, one) for number, one in state["state"].items()}}
