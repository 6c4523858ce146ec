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


def lora_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scaling: float
) -> tuple[Tensor, Tensor]:
    """(W x + bias + scaling · B A x [N, O], scaling · A x [N, r]), in the type of the weight."""
    out = nn.functional.linear(x, weight, bias)
    reduced = (x @ a.to(weight.dtype).T).mul_(scaling)
    return out.addmm_(reduced, b.to(weight.dtype).T), reduced


def lora_gradients(
    gradient: Tensor, reduced: Tensor, a: Tensor, b: Tensor, x: Tensor, scaling: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(gradient of scaling · A x [N, r], of A, of B) from that of the result [N, O]."""
    gradient_b = (gradient.T @ reduced).to(b.dtype)
    gradient_reduced = (gradient @ b.to(gradient.dtype)).mul_(scaling)
    return gradient_reduced, (gradient_reduced.T @ x).to(a.dtype), gradient_b


class _LoraProduct(torch.autograd.Function):
    """x [N, K], weight [O, K], bias [O] or None, A [r, K], B [O, r] -> [N, O]; the weight is frozen.

    The adapter's matrices are kept as they are, not as copies in the type of the weight: those of a whole model are as
    large as the activations of some thirty tokens.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scaling: float
    ) -> Tensor:
        out, reduced = lora_product(x, weight, bias, a, b, scaling)
        ctx.save_for_backward(x, weight, a, b, reduced)
        ctx.scaling = scaling
        return out

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, a, b, reduced = ctx.saved_tensors
        gradient = upstream[0]
        gradient_reduced, gradient_a, gradient_b = lora_gradients(gradient, reduced, a, b, x, ctx.scaling)
        gradient_x = None
        if ctx.needs_input_grad[0]:
            gradient_x = (gradient @ weight).addmm_(gradient_reduced, a.to(weight.dtype))
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


def active_product(layer: Any) -> tuple[Tensor, Tensor | None, Tensor, Tensor, float] | None:
    """(weight, bias, A, B, scaling) of a layer whose fused pass would be taken now; None where PEFT's own is."""
    if getattr(layer.__dict__.get("forward"), "__func__", None) is not _forward:
        return None
    names = layer.active_adapters
    if layer.disable_adapters or layer.merged or len(names) != 1 or names[0] not in layer.lora_A:
        return None
    base, name = layer.base_layer, names[0]
    return base.weight, base.bias, layer.lora_A[name].weight, layer.lora_B[name].weight, layer.scaling[name]


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
    product = active_product(self)
    if product is None or args or kwargs:
        return type(self).forward(self, x, *args, **kwargs)
    flat = x.reshape(-1, x.shape[-1]).to(product[0].dtype)
    with torch.autocast(x.device.type, enabled=False):
        out = _LoraProduct.apply(flat, *product)  # type: ignore[no-untyped-call]
    return out.view(*x.shape[:-1], -1)
