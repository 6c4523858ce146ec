"""LoRA's forward and backward pass without needless copies; the numbers are PEFT's.

PEFT adds the update as `result + B(A(x)) * scaling`: two passes over an [N, out] tensor forward and two more
backward, for every adapted layer. Here the scaling is applied to the [N, r] product and the rest is added by the matrix
product itself (Hu et al. 2021, arXiv:2106.09685: h = W x + alpha / r * B A x).

Shapes: N tokens of a flattened batch, K input size, O output size, r rank.
"""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import Tensor, nn


class _LoraProduct(torch.autograd.Function):
    """x [N, K], weight [O, K], bias [O] or None, A [r, K], B [O, r] -> [N, O]; the weight is frozen."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scaling: float
    ) -> Tensor:
        a_cast, b_cast = a.to(weight.dtype), b.to(weight.dtype)
        out = nn.functional.linear(x, weight, bias)
        reduced = (x @ a_cast.T).mul_(scaling)
        out.addmm_(reduced, b_cast.T)
        ctx.save_for_backward(x, weight, a_cast, b_cast, reduced)
        ctx.scaling, ctx.adapter_dtype = scaling, a.dtype
        return out

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, a, b, reduced = ctx.saved_tensors
        gradient = upstream[0]
        gradient_reduced = (gradient @ b).mul_(ctx.scaling)
        gradient_b = (gradient.T @ reduced).to(ctx.adapter_dtype)
        gradient_a = (gradient_reduced.T @ x).to(ctx.adapter_dtype)
        gradient_x = None
        if ctx.needs_input_grad[0]:
            gradient_x = (gradient @ weight).addmm_(gradient_reduced, a)
        return gradient_x, None, None, gradient_a, gradient_b, None


def speed_up_lora(model: nn.Module) -> int:
    """Give every plain LoRA layer over a frozen, unquantized `nn.Linear` the fused pass; returns how many.

    Layers with dropout, DoRA and other variants, several adapters, merged or disabled adapters, or quantized weights
    keep PEFT's own forward. State dicts, saving and merging are untouched: only `forward` of the instances changes.
    """
    from peft.tuners.lora.layer import Linear

    layers = [module for module in model.modules() if type(module) is Linear and _is_plain(module)]
    for layer in layers:
        layer.forward = types.MethodType(_forward, layer)
    return len(layers)


def restore_lora(model: nn.Module) -> None:
    """Give every LoRA layer PEFT's own forward pass back."""
    from peft.tuners.lora.layer import Linear

    for module in model.modules():
        if type(module) is Linear:
            module.__dict__.pop("forward", None)


def _is_plain(layer: Any) -> bool:
    base = layer.base_layer
    names = list(layer.lora_A)
    return (
        type(base) is nn.Linear
        and not base.weight.requires_grad
        and (base.bias is None or not base.bias.requires_grad)
        and len(names) == 1
        and not layer.fan_in_fan_out
        and names[0] not in layer.lora_variant
        and isinstance(layer.lora_dropout[names[0]], nn.Identity)
        and layer.lora_A[names[0]].bias is None
        and layer.lora_B[names[0]].bias is None
    )


def _forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    names = self.active_adapters
    if (
        self.disable_adapters
        or self.merged
        or len(names) != 1
        or args
        or kwargs
        or names[0] not in self.lora_A
    ):
        return type(self).forward(self, x, *args, **kwargs)
    base, name = self.base_layer, names[0]
    flat = x.reshape(-1, x.shape[-1]).to(base.weight.dtype)
    with torch.autocast(x.device.type, enabled=False):
        out = _LoraProduct.apply(  # type: ignore[no-untyped-call]
            flat,
            base.weight,
            base.bias,
            self.lora_A[name].weight,
            self.lora_B[name].weight,
            self.scaling[name],
        )
    return out.view(*x.shape[:-1], -1)
