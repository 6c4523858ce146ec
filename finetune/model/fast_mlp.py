"""Gated MLPs that keep their two branches alone, in place of these, the activation and the product.

    y = down(activation(gate(x)) · up(x))                      (SwiGLU and GeGLU: Shazeer 2020, arXiv:2002.05202)

The activation and the product are computed again in the backward pass: two passes over memory, where each matrix product
over the same numbers takes a hundred times as long. The results are the model's own to the last bit.

Shapes: N tokens of a flattened batch, I intermediate size, O hidden size, r rank.
"""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from finetune.model.fast_lora import active_product, lora_gradients, lora_product

_aten = torch.ops.aten
_PARTS = {"gate_proj", "up_proj", "down_proj", "act_fn"}


@dataclass(frozen=True)
class _Activation:
    """An activation, and its backward pass: (upstream, input), written over the upstream gradient."""

    apply: Callable[[Tensor], Tensor]
    backward_: Callable[[Tensor, Tensor], Tensor]


def _silu_backward_(upstream: Tensor, x: Tensor) -> Tensor:
    return _aten.silu_backward.grad_input(upstream, x, grad_input=upstream)  # type: ignore[no-any-return]


def _gelu_backward_(upstream: Tensor, x: Tensor, *, approximate: str) -> Tensor:
    return _aten.gelu_backward.grad_input(upstream, x, approximate=approximate, grad_input=upstream)  # type: ignore[no-any-return]


_ACTIVATIONS = {
    "silu": _Activation(nn.functional.silu, _silu_backward_),
    **{
        f"gelu, {kind}": _Activation(
            functools.partial(nn.functional.gelu, approximate=kind),
            functools.partial(_gelu_backward_, approximate=kind),
        )
        for kind in ("tanh", "none")
    },
}


class _Gated(torch.autograd.Function):
    """gate, up [..., I] -> activation(gate) · up."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, activation: str) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        return _ACTIVATIONS[activation].apply(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        activation = _ACTIVATIONS[ctx.activation]
        gradient_up = activation.apply(gate).mul_(upstream[0])
        return activation.backward_(upstream[0] * up, gate), gradient_up, None


class _GatedLoraProduct(torch.autograd.Function):
    """gate, up [N, I], and of the down projection with its adapter weight [O, I], bias, A [r, I], B [O, r] -> [N, O]."""

    @staticmethod
    def forward(
        ctx: Any,
        gate: Tensor,
        up: Tensor,
        activation: str,
        weight: Tensor,
        bias: Tensor | None,
        a: Tensor,
        b: Tensor,
        scaling: float,
    ) -> Tensor:
        middle = _ACTIVATIONS[activation].apply(gate).mul_(up)
        out, reduced = lora_product(middle, weight, bias, a, b, scaling)
        ctx.save_for_backward(gate, up, weight, a, b, reduced)
        ctx.activation, ctx.scaling = activation, scaling
        return out

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        gate, up, weight, a, b, reduced = ctx.saved_tensors
        activation, gradient = _ACTIVATIONS[ctx.activation], upstream[0]
        activated = activation.apply(gate)
        middle = activated * up
        gradient_reduced, gradient_a, gradient_b = lora_gradients(
            gradient, reduced, a, b, middle, ctx.scaling
        )
        gradient_middle = (gradient @ weight).addmm_(gradient_reduced, a.to(weight.dtype))
        gradient_up = activated.mul_(gradient_middle)
        gradient_gate = activation.backward_(torch.mul(gradient_middle, up, out=middle), gate)
        return gradient_gate, gradient_up, None, None, None, gradient_a, gradient_b, None


def slim_gates(model: nn.Module) -> int:
    """Let every gated MLP keep its two branches alone; returns how many.

    A module is taken for one by its parts and by what it does with random numbers: the result has to be the same to the
    last bit, else it is left alone. Only `forward` of the instances changes.
    """
    checked: dict[tuple[Any, ...], str | None] = {}
    count = 0
    for module in model.modules():
        if {name for name, _ in module.named_children()} != _PARTS or "forward" in module.__dict__:
            continue
        key = (type(module), type(module.act_fn), repr(vars(module.act_fn)))
        if key not in checked:
            checked[key] = _activation(module)
        activation = checked[key]
        if activation is not None:
            module.forward = types.MethodType(_forward, module)
            module.slim = activation  # type: ignore[assignment]
            count += 1
    return count


def restore_gates(model: nn.Module) -> None:
    """Give every gated MLP its own forward pass back."""
    for module in model.modules():
        if getattr(module.__dict__.get("forward"), "__func__", None) is _forward:
            del module.__dict__["forward"], module.__dict__["slim"]


@torch.no_grad()
def _activation(module: Any) -> str | None:
    """The activation whose product with the other branch is the module's own; None if there is none.

    The module runs with parts of its input in place of its projections: no weight is read.
    """
    probe = copy.copy(module)
    half = 16
    stand_ins: dict[str, Any] = {
        "gate_proj": lambda x: x[..., :half],
        "up_proj": lambda x: x[..., half:],
        "down_proj": lambda x: x,
    }
    probe._modules = {**module._modules, **stand_ins}
    generator = torch.Generator().manual_seed(0)  # the run's own random numbers stay as they are
    numbers = 4 * torch.randn(8, 2 * half, generator=generator)
    for name, activation in _ACTIVATIONS.items():
        matches = []
        for dtype in (torch.float32, torch.bfloat16):
            x = numbers.to(dtype)
            try:
                with torch.autocast("cpu", enabled=False):
                    own = type(module).forward(probe, x)
            except (TypeError, RuntimeError, ValueError, AttributeError):  # more than a gated MLP
                return None
            matches.append(torch.equal(own, activation.apply(x[..., :half]) * x[..., half:]))
        if all(matches):
            return name
    return None


def _forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    if args or kwargs or not torch.is_grad_enabled():
        return type(self).forward(self, x, *args, **kwargs)
    gate, up, down = self.gate_proj(x), self.up_proj(x), self.down_proj
    if not (gate.requires_grad and up.requires_grad and gate.dtype == up.dtype):
        return down(self.act_fn(gate) * up)
    product = active_product(down)
    if product is None or product[0].dtype != gate.dtype or down._forward_hooks or down._forward_pre_hooks:
        return down(_Gated.apply(gate, up, self.slim))  # type: ignore[no-untyped-call]
    width = gate.shape[-1]
    with torch.autocast(x.device.type, enabled=False):
        out = _GatedLoraProduct.apply(gate.reshape(-1, width), up.reshape(-1, width), self.slim, *product)  # type: ignore[no-untyped-call]
    return out.view(*gate.shape[:-1], -1)
