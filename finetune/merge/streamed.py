"""A model whose weights stay on disk: each layer's are read for its forward pass and dropped after it.

This lets a merge be proven in the memory of one layer. The modules are transformers' own and, on top, PEFT's own: only
the storage of the frozen parameters is replaced. A parameter at rest is one zero, expanded to its shape, so that code
which looks at shape, dtype and device sees nothing unusual.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch import nn

from finetune.errors import UserError
from finetune.merge.base_weights import WeightReader
from finetune.merge.layout import Layout, row_chunks

_CHUNKED_ELEMENTS = 1 << 23
"""A linear layer with more weights (a head, as a rule) is multiplied in chunks of rows."""


class StreamedModel:
    """`model` computes with the values of `weights`. Call `attach_hooks` when its modules are final (after PEFT)."""

    def __init__(self, config: Any, weights: WeightReader, layout: Layout, dtype: torch.dtype) -> None:
        if layout.missing:
            raise UserError(
                f"{len(layout.missing)} parameters lie in the files under other names, e.g. {layout.missing[0]}",
                why="this architecture is rearranged while it is loaded",
                fix="use a machine with memory for the whole model",
            )
        self.weights = weights
        self.model: Any = _skeleton(config, dtype)
        self._names: dict[int, str] = {}
        self._alive: list[nn.Parameter] = []  # an id stands for its parameter only while that one exists
        self._empty_parameters(layout)
        self._load_buffers(layout)
        self.model.requires_grad_(False).eval()

    def _empty_parameters(self, layout: Layout) -> None:
        """Give every parameter a storage of one element; tied parameters become one object, as transformers has them."""
        made: dict[str, nn.Parameter] = {}
        for name, meta in list(self.model.named_parameters(remove_duplicate=False)):
            canonical = layout.canonical(name)
            if canonical not in made:
                dtype = torch.float32 if name in layout.keep_fp32 else meta.dtype
                made[canonical] = nn.Parameter(_stub(meta.shape, dtype), requires_grad=False)
                self._names[id(made[canonical])] = canonical
                self._alive.append(made[canonical])
            module, _, leaf = name.rpartition(".")
            self.model.get_submodule(module)._parameters[leaf] = made[canonical]

    def _load_buffers(self, layout: Layout) -> None:
        """Persistent buffers are small and stay in memory; the others are computed by the modules themselves."""
        for name, buffer in self.model.named_buffers():
            if name in layout.stored:
                buffer.data = self.weights.rows(name).to(buffer.dtype).reshape(buffer.shape)

    def materialise(self, names: set[str], *, read: bool = False) -> None:
        """Give these parameters storage of their own, filled with zeros or read, so that others may write into them."""
        for parameter in self._parameters(names):
            shape, dtype = parameter.shape, parameter.dtype
            parameter.data = self._read(parameter) if read else torch.zeros(shape, dtype=dtype)

    def keep(self, names: set[str]) -> None:
        """From now on these parameters are what they hold now, and are no longer read."""
        for parameter in self._parameters(names):
            del self._names[id(parameter)]

    def drop(self, names: set[str]) -> None:
        """Empty these parameters again."""
        for parameter in self._parameters(names):
            parameter.data = _stub(parameter.shape, parameter.dtype)

    def _parameters(self, names: set[str]) -> list[nn.Parameter]:
        return [parameter for parameter in self.model.parameters() if self._names.get(id(parameter)) in names]

    def attach_hooks(self) -> None:
        """Make each module read its weights when it runs. An adapter's wrapper reads those of the layer it wraps."""
        # A model that PEFT has wrapped has imported it; for any other model its second and a half would be wasted.
        tuners = sys.modules.get("peft.tuners.tuners_utils")
        kind = getattr(tuners, "BaseTunerLayer", ())
        wrapped: set[nn.Module] = set()
        for module in self.model.modules():
            if isinstance(module, kind) and module not in wrapped:
                wrapped.update(module.modules())
                self._hook(module, self._streamed(module, recurse=True))
        for module in self.model.modules():
            own = [] if module in wrapped else self._streamed(module, recurse=False)
            if not own:
                continue
            if type(module) is nn.Embedding:
                module.forward = functools.partial(self._embed, module)  # type: ignore[method-assign]
            elif type(module) is nn.Linear and module.weight.numel() > _CHUNKED_ELEMENTS:
                module.forward = functools.partial(self._multiply, module)  # type: ignore[method-assign]
            else:
                self._hook(module, own)

    def _streamed(self, module: nn.Module, *, recurse: bool) -> list[nn.Parameter]:
        return [p for p in module.parameters(recurse=recurse) if id(p) in self._names]

    def _hook(self, module: nn.Module, parameters: list[nn.Parameter]) -> None:
        def load(*_: Any) -> None:
            for parameter in parameters:
                parameter.data = self._read(parameter)

        def release(*_: Any) -> None:
            for parameter in parameters:
                parameter.data = _stub(parameter.shape, parameter.dtype)

        if parameters:
            module.register_forward_pre_hook(load)
            module.register_forward_hook(release, always_call=True)

    def _read(self, parameter: nn.Parameter) -> torch.Tensor:
        """The values in the parameter's dtype, converted chunk by chunk: stored and converted never exist whole at once."""
        name, shape = self._names[id(parameter)], parameter.shape
        if len(shape) < 2:
            return self.weights.rows(name).to(parameter.dtype).reshape(shape)
        values = torch.empty(shape, dtype=parameter.dtype)
        for start, stop in row_chunks(shape[0], shape[1:].numel()):
            values[start:stop] = self.weights.rows(name, start, stop)
        return values

    def _embed(self, module: nn.Embedding, tokens: torch.Tensor) -> torch.Tensor:
        """Reads the rows of the tokens present, not the table."""
        rows = self.weights.gather(self._names[id(module.weight)], tokens.reshape(-1))
        return rows.to(module.weight.dtype).reshape(*tokens.shape, -1)

    def _multiply(self, module: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        """x [..., in] times Wᵀ, chunk of rows by chunk of rows -> [..., out]."""
        name = self._names[id(module.weight)]
        result = x.new_empty(*x.shape[:-1], module.out_features)
        bias = (
            self.weights.rows(self._names[id(module.bias)]).to(x.dtype) if module.bias is not None else None
        )
        for start, stop in row_chunks(module.out_features, module.in_features):
            weight = self.weights.rows(name, start, stop).to(module.weight.dtype)
            part = None if bias is None else bias[start:stop]
            result[..., start:stop] = nn.functional.linear(x, weight, part)
        return result


def _skeleton(config: Any, dtype: torch.dtype) -> Any:
    """The model with parameters on the meta device and real buffers (rotary frequencies are computed, not stored)."""
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    with init_empty_weights(include_buffers=False):
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def _stub(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros((), dtype=dtype).expand(shape)
