"""DeepSpeed's ZeRO-2 and ZeRO-3 as this project trains: fp32 trained weights, one clip, a stop before a bad step, no pickle.

ZeRO-2 spreads gradients and optimizer states over the processes, ZeRO-3 the weights too (Rajbhandari et al. 2020,
arXiv:1910.02054). Three things are changed from what accelerate makes of it:

- bf16 is that of autocast around frozen bf16 and trained fp32 weights; DeepSpeed's own would cast the trained ones to bf16;
- the optimizer steps when the trainer says so, not inside the last backward pass, so that what has to be done before a
  step is done before it;
- checkpoints are whole tensors, the same as without DeepSpeed, in place of pickled shards: any number of processes, with
  or without DeepSpeed, continues them.

Written against the version that the extra `deepspeed` of this package pins.
"""

from __future__ import annotations

import copy
import types
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from accelerate.utils.deepspeed import DeepSpeedEngineWrapper
from torch import Tensor, nn


def leave_exchange_to_gloo() -> None:
    """On a machine without GPUs DeepSpeed would first compile kernels of its own for what gloo does as well."""
    import deepspeed

    warnings.filterwarnings("ignore", r"`torch.distributed.\w+_tensor` is deprecated", FutureWarning)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def settle_zero(plugin: Any, compute: torch.dtype, max_grad_norm: float) -> None:
    """Write the recipe's precision and clip into accelerate's DeepSpeed plugin. Call before the engine is built."""
    config = plugin.deepspeed_config
    config["bf16"] = config["fp16"] = {"enabled": False}
    config["gradient_clipping"] = max_grad_norm
    # With the default modules, gradients of every linear layer would be added up in bf16.
    config["torch_autocast"] = {
        "enabled": compute == torch.bfloat16,
        "dtype": "bfloat16",
        "lower_precision_safe_modules": [],
    }
    # The recipe's own optimizer steps also where its state lies in the host's memory.
    config["zero_force_ds_cpu_optimizer"] = False
    if plugin.zero_stage == 3:
        # Small weights that stay gathered are gathered together, which fails where fp32 and bf16 are among them.
        config["zero_optimization"]["stage3_param_persistence_threshold"] = 0


class _BackwardOnly(DeepSpeedEngineWrapper):
    """accelerate's wrapper steps in the last backward pass of a step; here that pass only adds up the gradients."""

    def backward(self, loss: Tensor, sync_gradients: bool = True, **kwargs: Any) -> None:
        self.engine.set_gradient_accumulation_boundary(is_boundary=sync_gradients)
        self.engine.backward(loss, **kwargs)


def take_over_step(accelerator: Any, optimizer: Any, check_norm: Callable[[float], None]) -> None:
    """Let `optimizer.step()` do the engine's step, with its clip. Call after accelerate has built the engine.

    `check_norm` gets the norm of the whole gradient before the clip; of one that is not finite DeepSpeed takes no step.
    """
    engine = accelerator.deepspeed_engine_wrapped.engine
    accelerator.deepspeed_engine_wrapped = _BackwardOnly(engine)

    def step(self: Any, closure: Any = None) -> None:
        engine.step()
        check_norm(float(engine.get_global_grad_norm()))

    optimizer.step = types.MethodType(step, optimizer)


def is_spread(parameter: Tensor) -> bool:
    """Whether ZeRO-3 holds a part of this weight in each process."""
    return hasattr(parameter, "ds_id")


def whole_gradient(parameter: nn.Parameter) -> Tensor | None:
    """The gradient of a parameter between the last backward pass of a step and the step. Collective."""
    from deepspeed.utils import safe_get_full_grad

    gradient: Tensor | None = safe_get_full_grad(parameter)
    return gradient


def whole_weights(model: nn.Module) -> dict[str, Tensor]:
    """What is trained, gathered by all to the CPU of the first process: of an adapter that only, else the whole model.

    The other processes get an empty dict.
    """
    import deepspeed

    adapts = hasattr(model, "peft_config")
    keeps = torch.distributed.get_rank() == 0
    found: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad or not adapts:
            with deepspeed.zero.GatheredParameters([parameter], enabled=is_spread(parameter)):
                if keeps:
                    found[name] = parameter.detach().cpu().clone()
    return found


def whole_optimizer_state(optimizer: Any, groups: Sequence[Sequence[Tensor]]) -> dict[str, Any]:
    """A ZeRO optimizer's state as that of the optimizer inside it would be without DeepSpeed, every tensor whole.

    `groups`: the parameters of each group, as the optimizer was built. Gathered by all; the first process has the result.
    """
    from deepspeed.utils import safe_get_full_optimizer_state

    keeps = torch.distributed.get_rank() == 0
    inner, flat_of = optimizer.optimizer, _flat_of(optimizer)
    state: dict[int, Any] = {}
    whole_groups, number = [], 0
    for group, parameters in zip(inner.param_groups, groups, strict=True):
        options = {name: value for name, value in group.items() if name != "params"}
        whole_groups.append({**options, "params": list(range(number, number + len(parameters)))})
        for parameter in parameters:
            flat = flat_of[id(parameter)]
            for name, value in inner.state.get(flat, {}).items():
                if isinstance(value, Tensor) and value.shape == flat.shape:
                    value = safe_get_full_optimizer_state(parameter, name)
                    value = value.cpu() if keeps else None
                if keeps:
                    state.setdefault(number, {})[name] = copy.deepcopy(value)
            number += 1
    return {"state": state, "param_groups": whole_groups}


def spread_optimizer_state(optimizer: Any, groups: Sequence[Sequence[Tensor]], state: dict[str, Any]) -> None:
    """Put a whole state dict into a ZeRO optimizer, each process its part."""
    from deepspeed.utils import safe_set_full_optimizer_state

    inner, flat_of = optimizer.optimizer, _flat_of(optimizer)
    for group, saved in zip(inner.param_groups, state["param_groups"], strict=True):
        group.update({name: value for name, value in saved.items() if name != "params"})
    per_element: list[tuple[Tensor, str, Tensor]] = []
    numbers = [number for saved in state["param_groups"] for number in saved["params"]]
    fused = any(
        group.get("fused") for group in inner.param_groups
    )  # its count of steps lies where its weights do
    for number, parameter in zip(numbers, (p for group in groups for p in group), strict=True):
        flat = flat_of[id(parameter)]
        for name, value in state["state"].get(number, {}).items():
            if isinstance(value, Tensor) and value.shape == _shape(parameter):
                inner.state[flat].setdefault(name, torch.zeros_like(flat))
                per_element.append((parameter, name, value))
            else:
                own = copy.deepcopy(value)
                inner.state[flat][name] = own.to(flat.device) if fused and isinstance(own, Tensor) else own
    if per_element and not any(is_spread(parameter) for parameter, _, _ in per_element):
        optimizer._lazy_init_hp_params_optimizer_state()  # makes the weights know where in it their part lies
    for parameter, name, value in per_element:
        safe_set_full_optimizer_state(parameter, value.to(parameter.device, torch.float32), name)


def _flat_of(optimizer: Any) -> dict[int, Tensor]:
    """The flat part of a group that holds this process's elements of a parameter, by the parameter's id."""
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):  # ZeRO-3
        flats, groups = optimizer.fp32_partitioned_groups_flat, optimizer.fp16_groups
    else:
        flats, groups = optimizer.single_partition_of_fp32_groups, optimizer.bit16_groups
    return {id(p): flat for flat, group in zip(flats, groups, strict=True) for p in group}


def _shape(parameter: Any) -> torch.Size:
    return torch.Size(parameter.ds_shape if is_spread(parameter) else parameter.shape)
