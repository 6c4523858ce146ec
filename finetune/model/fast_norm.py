"""RMSNorm with a frozen weight that keeps its input as it came, in place of transformers' copies in fp32.

    y = x / sqrt(mean(x²) + ε) · w                              (Zhang & Sennrich 2019, arXiv:1910.07467)

The forward pass takes the model's own operations in their order, so its result is the same to the last bit. What is kept
for the backward pass is x, in its own type, and one number a token. With u the upstream gradient times w, s = 1 / rms and
D the width, the gradient of x is s·u - x · s³ · (u·x) / D.
"""

from __future__ import annotations

import types
from typing import Any, Literal

import torch
from torch import Tensor, nn

# Where the weight comes in: after the cast to the input's type (Llama, Mistral, Qwen), before it (OLMo 2), or before it
# as 1 + w (Gemma).
Form = Literal["cast, scaled", "scaled, cast", "scaled by 1 + w, cast"]
FORMS: tuple[Form, ...] = ("cast, scaled", "scaled, cast", "scaled by 1 + w, cast")
_EPSILONS = ("variance_epsilon", "eps")
_HALF = (torch.bfloat16, torch.float16)


class _RmsNorm(torch.autograd.Function):
    """x [..., D], weight [D] (frozen) -> [..., D]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float, form: Form) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
        ctx.save_for_backward(x, weight, scale)
        ctx.form = form
        normalised = wide * scale
        if form == "cast, scaled":
            return weight * normalised.to(x.dtype)
        factor = weight if form == "scaled, cast" else 1.0 + weight.float()
        return (normalised * factor).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        factor = 1.0 + weight.float() if ctx.form == "scaled by 1 + w, cast" else weight.float()
        gradient = upstream[0].float() * factor
        wide = x.float()
        along = torch.linalg.vecdot(gradient, wide).unsqueeze(-1)
        along.mul_(scale.pow(3)).div_(-x.shape[-1])
        return gradient.mul_(scale).addcmul_(wide, along).to(x.dtype), None, None, None


def slim_norms(model: nn.Module) -> int:
    """Let every RMSNorm with a frozen weight keep less; returns how many.

    A module is taken for one by what it does: on random numbers the result has to be the same to the last bit, else it is
    left alone. Only `forward` of the instances changes.
    """
    checked: dict[tuple[Any, ...], Form | None] = {}
    count = 0
    for module in model.modules():
        epsilon = _epsilon(module)
        if epsilon is None or "forward" in module.__dict__ or module.weight.requires_grad:
            continue
        key = (type(module), epsilon, module.weight.dtype, module.weight.shape)
        if key not in checked:
            checked[key] = _form(module, epsilon)
        form = checked[key]
        if form is not None:
            module.forward = types.MethodType(_forward, module)
            module.slim = (epsilon, form)  # type: ignore[assignment]
            count += 1
    return count


def restore_norms(model: nn.Module) -> None:
    """Give every norm its own forward pass back."""
    for module in model.modules():
        if getattr(module.__dict__.get("forward"), "__func__", None) is _forward:  # gated MLPs are slim too
            del module.__dict__["forward"], module.__dict__["slim"]


def _epsilon(module: nn.Module) -> float | None:
    """The ε of a module that may be an RMSNorm: one vector called `weight`, and nothing else."""
    parameters = dict(module.named_parameters())
    if list(parameters) != ["weight"] or parameters["weight"].dim() != 1 or list(module.buffers()):
        return None
    values = [getattr(module, name) for name in _EPSILONS if isinstance(getattr(module, name, None), float)]
    return values[0] if len(values) == 1 else None


@torch.no_grad()
def _form(module: Any, epsilon: float) -> Form | None:
    """The form whose results are the module's own, on rows from far below ε to far above it; None if there is none."""
    weight = module.weight
    if weight.is_meta or not weight.numel():  # not here, or spread over processes
        return None
    generator = torch.Generator().manual_seed(0)  # the run's own random numbers stay as they are
    factor = torch.rand(weight.shape, generator=generator) + 0.5
    rows = torch.randn(4, len(weight), generator=generator) * torch.tensor([[1e-4], [1e-2], [1.0], [50.0]])
    for form in FORMS:
        matches = []
        for dtype in {weight.dtype, torch.bfloat16}:
            x, w = rows.to(weight.device, dtype), factor.to(weight.device, weight.dtype)
            try:
                with torch.autocast(x.device.type, enabled=False):
                    own = torch.func.functional_call(module, {"weight": w}, (x,))
                    matches.append(torch.equal(own, _RmsNorm.apply(x, w, epsilon, form)))  # type: ignore[no-untyped-call]
            except (TypeError, RuntimeError, ValueError):  # another signature, or an operation it lacks
                return None
        if all(matches):
            return form
    return None


def _forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    if args or kwargs or not torch.is_grad_enabled() or not x.requires_grad or self.weight.requires_grad:
        return type(self).forward(self, x, *args, **kwargs)
    return _RmsNorm.apply(x, self.weight, *self.slim)  # type: ignore[no-untyped-call]
