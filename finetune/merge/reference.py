"""The models that a merge compares: base, base plus adapter by PEFT, the quantized model that was trained, and the result.

Each is a context manager, so that one is gone before the next is built. Models with plain weights are streamed
(streamed.py); a quantized one is loaded whole, as it was for training, for it is small. Architectures that transformers
rearranges while loading are loaded whole too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch

from finetune.merge.adapter_file import AdapterFile
from finetune.merge.adapter_plan import MergePlan
from finetune.merge.base_weights import Codes, StoredWeights, requantised
from finetune.merge.layout import Layout, read_layout
from finetune.merge.shards import open_model
from finetune.merge.streamed import StreamedModel
from finetune.model.adapter_files import load_adapter, read_origin
from finetune.model.load import DTYPES, load_model
from finetune.model.memory import release_memory
from finetune.model.quantization import dequantised_weight
from finetune.model.source import ModelSource
from finetune.recipe.schema import ModelSection

_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
P = ParamSpec("P")
T = TypeVar("T")


def _then_release(build: Callable[P, Iterator[T]]) -> Callable[P, AbstractContextManager[T]]:
    """A context manager that finds the memory of the last model free, and leaves its own free, as far as it is let go."""

    @contextmanager
    @functools.wraps(build)
    def manager(*args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
        release_memory()
        try:
            yield from build(*args, **kwargs)
        finally:
            release_memory()

    return manager


def _in_type(model: Any, dtype: torch.dtype) -> Any:
    """Adapters are loaded in fp32, and PEFT computes in their type."""
    if dtype == torch.float64:
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if any(part in name for part in ("lora_", "vera_", "ia3_")):
                tensor.data = tensor.data.to(dtype)
    return model


@dataclass(frozen=True, slots=True)
class Models:
    """Builds the models around one base and one adapter. `layout` is the base's; `plan` knows a resized vocabulary."""

    source: ModelSource
    layout: Layout
    adapter: AdapterFile
    plan: MergePlan
    other_base: bool = False

    @property
    def needs_codes(self) -> bool:
        """Whether the adapter fits only the 4-bit codes it was trained on (init loftq)."""
        return bool(read_origin(self.adapter.folder).get("codes"))

    @property
    def streamable(self) -> bool:
        return not self.layout.missing

    def _compute(self, dtype: str) -> torch.dtype:
        """What a comparison computes in. fp32 weights are compared in fp64: sums over thirty layers in fp32 differ by
        more than a faulty merge might, and only the weights are on trial. Torch multiplies experts in fp32 at most.
        """
        config = self._config(resized=False).get_text_config()
        has_experts = any(getattr(config, name, None) for name in _EXPERT_COUNTS)
        return torch.float64 if dtype == "fp32" and not has_experts else DTYPES[dtype]

    @_then_release
    def plain_base(self, weights: StoredWeights, dtype: str) -> Iterator[Any]:
        """The base alone, with its own vocabulary."""
        if not self.streamable:
            yield load_model(self.source, dtype=dtype, device="cpu").to(self._compute(dtype))
            return
        streamed = StreamedModel(self._config(resized=False), weights, self.layout, self._compute(dtype))
        streamed.attach_hooks()
        yield streamed.model

    @_then_release
    def with_adapter(self, weights: StoredWeights, dtype: str) -> Iterator[Any]:
        """Base plus adapter, by PEFT. Raises UserError when PEFT would not load every tensor of the adapter."""
        if not self.streamable:
            base = load_model(self.source, dtype=dtype, device="cpu").to(self._compute(dtype))
            yield _in_type(self._adapted(base, weights.codes), self._compute(dtype))
            return
        streamed = StreamedModel(self._config(resized=True), weights, self.layout, self._compute(dtype))
        canonical = self.layout.canonical
        kept = {canonical(name) for name in self.adapter.base_values}
        trained = {canonical(name) for name in self.adapter.replaced}
        tokens = {canonical(f"{module}.weight") for module in self.adapter.token_rows}
        streamed.materialise(kept | trained)
        streamed.materialise(tokens - kept, read=True)
        model = _in_type(self._load(streamed.model, weights.codes), self._compute(dtype))
        streamed.drop((trained | tokens) - kept)
        streamed.keep(kept)
        streamed.attach_hooks()
        yield model.eval()

    @_then_release
    def quantized(self, section: ModelSection) -> Iterator[QuantizedModel]:
        """The model that was trained: base quantized by `section`, plus adapter, by bitsandbytes and PEFT."""
        base = load_model(
            self.source,
            dtype=section.dtype,
            quantize=section.quantize,
            double_quantization=section.double_quantization,
            device="cpu",
        )
        yield QuantizedModel(self._adapted(base))

    @_then_release
    def merged(self, folder: Path, dtype: str) -> Iterator[Any]:
        """The written model, read from its own files and its own configuration."""
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.from_pretrained(str(folder), local_files_only=True)
        if not self.streamable:
            model = AutoModelForCausalLM.from_pretrained(
                str(folder), dtype=DTYPES[dtype], local_files_only=True
            )
            yield model.to(self._compute(dtype)).eval()
            return
        with open_model(folder) as files:
            layout = read_layout(_skeleton_of(config), files)
            streamed = StreamedModel(config, StoredWeights(files, layout), layout, self._compute(dtype))
            streamed.attach_hooks()
            yield streamed.model

    def _adapted(self, base: Any, codes: Codes = None) -> Any:
        if self.plan.n_vocabulary is not None:
            base.resize_token_embeddings(self.plan.n_vocabulary, mean_resizing=False)
        return self._load(base, codes).eval()

    def _load(self, base: Any, codes: Codes) -> Any:
        source = None if self.other_base else self.source
        return load_adapter(base, self.adapter.folder, source=source, codes=codes)

    def _config(self, *, resized: bool) -> Any:
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(self.source.path, local_files_only=True)
        if resized and self.plan.n_vocabulary is not None:
            config.get_text_config().vocab_size = self.plan.n_vocabulary
        return config


class QuantizedModel:
    """A quantized model with its adapter, whose compute type can be switched between fp32 and bf16."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def compute_in(self, dtype: torch.dtype) -> Any:
        """Everything that is not a code computes in `dtype`, as in training or in an fp32 evaluation.

        Eight-bit layers use the decoded weight with the input as it is, as they do in training on CPUs; in evaluation
        they would round their input to eight bits too, which no merged model can imitate. (Their own training path
        cannot be used: under DoRA on CPUs it loses its scales after the first forward pass.)
        """
        from bitsandbytes.nn import Linear4bit, Linear8bitLt

        for name, module in self.model.named_modules():
            coded = isinstance(module, (Linear4bit, Linear8bitLt))
            if isinstance(module, Linear4bit):
                # DoRA's norms are taken from decoded weights: they must be those that the product uses.
                module.weight.quant_state.dtype = dtype
                module.compute_dtype, module.compute_type_is_set = dtype, True
            elif isinstance(module, Linear8bitLt):
                module.forward = functools.partial(
                    _multiply_decoded, module, module.weight.data, _scales(module)
                )
            for key, parameter in module.named_parameters(recurse=False):
                is_code = coded and key == "weight"
                if parameter.is_floating_point() and not is_code and "lora_" not in name:
                    parameter.data = parameter.data.to(dtype)
        return self.model

    def check_decoded(self, weights: StoredWeights, section: ModelSection) -> int:
        """Number of layers, each proven: the weight it computes with is bit by bit the one we decode from the base's file.

        A layer whose codes were repacked by an earlier forward pass would be caught here.
        """
        from bitsandbytes.nn import Linear4bit, Linear8bitLt
        from transformers.pytorch_utils import Conv1D

        n_layers = 0
        for name, module in self.model.named_modules():
            if not isinstance(module, (Linear4bit, Linear8bitLt)):
                continue
            parameter = name.removeprefix("base_model.model.").removesuffix(".base_layer") + ".weight"
            stored = StoredWeights.rows(weights, parameter).to(DTYPES[section.dtype])
            source_class: type = getattr(module, "source_cls", torch.nn.Linear)
            ours = requantised(stored.T if issubclass(source_class, Conv1D) else stored, section)
            theirs = dequantised_weight(module)
            if not torch.equal(ours.to(theirs.dtype), theirs):
                raise RuntimeError(
                    f"{parameter} decodes to other values in the loaded model than from its file"
                )
            n_layers += 1
        return n_layers


def _scales(layer: Any) -> torch.Tensor:
    scales: torch.Tensor = layer.state.SCB if layer.state.SCB is not None else layer.weight.SCB
    return scales.float() / 127.0


def _multiply_decoded(layer: Any, codes: torch.Tensor, scales: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """x [..., in] times the decoded eight-bit weight, codes [out, in] and one scale [out] a row -> [..., out]."""
    return torch.nn.functional.linear(x, (codes.float() * scales.unsqueeze(1)).to(x.dtype), layer.bias)


def _skeleton_of(config: Any) -> Any:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)
