"""Quantized base weights through bitsandbytes, and the guards that keep them exact on CPUs.

Three faults of bitsandbytes 0.50 on CPUs are closed here:

* On CPUs with AVX512-BF16 the first no-grad forward in eval mode rewrites a Linear4bit's weight in another byte order.
  A later backward then yields no gradient through that layer, and dequantising or merging yields garbage, without any
  error. `disable_cpu_repacking` must run before the first forward; `load_model` does.
* Dequantising a 4-bit weight is wrong when its row length is even but no multiple of the block of 64.
  `check_row_lengths` refuses such a model before its weights are read; `dequantise_4bit` is right for every shape.
* An int8 layer under DoRA loses its scales after the first forward: `keep_int8_scales`.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from torch import nn

from finetune.errors import UserError
from finetune.model.source import ModelSource, read_config

BLOCK_SIZE = 64  # weights that share one scale, the bitsandbytes default that transformers uses
FOUR_BIT = ("nf4", "fp4")


def quantization_config(quantize: str, *, dtype: torch.dtype, double_quantization: bool = True) -> Any | None:
    """The transformers quantization configuration for `quantize` (none, nf4, fp4, int8); None for none.

    Compute runs in `dtype`. The 4-bit storage type is `dtype` too, so that FSDP2, which skips uint8 tensors, shards it.
    On CPU storage stays uint8. Tied and output embeddings are left out by transformers itself.
    """
    if quantize == "none":
        return None
    from transformers import BitsAndBytesConfig

    if quantize == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    if quantize not in FOUR_BIT:
        raise UserError(
            f"unknown quantization '{quantize}'", where="model.quantize", fix="none, nf4, fp4 or int8"
        )
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=quantize,
        bnb_4bit_use_double_quant=double_quantization,
        bnb_4bit_compute_dtype=dtype,
        bnb_4bit_quant_storage=dtype if torch.cuda.is_available() else torch.uint8,
    )


def check_stored_whole(source: ModelSource) -> None:
    """Refuse to train on a model whose file holds quantized weights: which base its adapter belongs to, and what merging
    writes, is known of weights that are quantized here."""
    found = read_config(source).get("quantization_config")
    if not found:
        return
    method = found.get("quant_method") or "unknown method" if isinstance(found, dict) else "unknown method"
    raise UserError(
        f"{source.id} is stored with quantized weights ({method})",
        where="model.id",
        why="training starts from the weights as they were released, and quantizes them by model.quantize while loading",
        fix="set model.id to the model this one was made from, and model.quantize: nf4 for as little memory",
    )


def disable_cpu_repacking(model: nn.Module) -> int:
    """Forbid the in-place repacking of every Linear4bit; returns how many layers there are. Call before any forward."""
    layers = linear_4bit_modules(model)
    for name, module in layers.items():
        state = getattr(module.weight, "quant_state", None)
        if getattr(state, "packing_format_for_cpu", False):
            raise RuntimeError(
                f"{name} was repacked already: disable_cpu_repacking must run before a forward"
            )
        module.support_avx512bf16_for_cpu = False
    return len(layers)


def keep_int8_scales(model: nn.Module) -> int:
    """Keep the scales of int8 layers that PEFT's DoRA loses on CPUs; returns how many layers there are.

    After the first forward bitsandbytes holds a layer's scales in its state, no longer on its weight. DoRA then moves the
    weight "to its device", which marks it as freshly quantized without scales, and the second forward fails.
    """
    layers = [module for module in model.modules() if type(module).__name__ == "Linear8bitLt"]
    for module in layers:
        module.register_forward_pre_hook(_restore_scales)
    return len(layers)


def _restore_scales(module: Any, inputs: Any) -> None:
    if module.weight.CB is not None and module.weight.SCB is None:
        module.weight.SCB = module.state.SCB


def linear_4bit_modules(model: nn.Module) -> dict[str, Any]:
    """Qualified name -> Linear4bit, those wrapped by an adapter included."""
    return {name: module for name, module in model.named_modules() if type(module).__name__ == "Linear4bit"}


def codes_of(model: nn.Module) -> dict[str, Any] | None:
    """How the 4-bit weights of `model` are coded: {"quantize", "double_quantization"}; None without such weights.

    An adapter that starts from the error of these codes (init loftq) fits no others.
    """
    for module in linear_4bit_modules(model).values():
        weight = module.weight
        return {"quantize": str(weight.quant_type), "double_quantization": bool(weight.compress_statistics)}
    return None


def check_row_lengths(skeleton: nn.Module, quantize: str, *, device: str = "cpu") -> None:
    """Refuse a model whose rows this machine would dequantise wrongly. `skeleton` may live on the meta device.

    Each row length that occurs is tried with the installed library, so a repaired one refuses nothing.
    """
    if quantize not in FOUR_BIT or not device.startswith("cpu"):
        return
    head = getattr(skeleton, "get_output_embeddings", lambda: None)()
    by_length: dict[int, list[str]] = {}
    for name, module in skeleton.named_modules():
        if isinstance(module, nn.Linear) and module is not head:
            by_length.setdefault(module.in_features, []).append(name)
    wrong = {
        length: names for length, names in by_length.items() if not row_length_is_exact(length, quantize)
    }
    if wrong:
        length, names = next(iter(wrong.items()))
        raise UserError(
            f"the 4-bit library decodes rows of {length} weights wrongly on this CPU ({len(names)} layers, e.g. {names[0]})",
            where="model.quantize",
            why=f"the row length is even but no multiple of {BLOCK_SIZE}; the model would train on garbage",
            fix="set model.quantize: none or int8, or run on a GPU",
        )


@functools.cache
def row_length_is_exact(n_columns: int, quantize: str) -> bool:
    """Whether a matrix with rows of `n_columns` decodes to the same values as the same weights in one long row."""
    import bitsandbytes.functional as bnb

    weights = torch.randn(8, n_columns, generator=torch.Generator().manual_seed(0))
    packed, state = bnb.quantize_4bit(weights, blocksize=BLOCK_SIZE, quant_type=quantize)
    return bool(torch.equal(bnb.dequantize_4bit(packed, state), dequantise_4bit(packed, state)))


def dequantise_4bit(packed: torch.Tensor, state: Any) -> torch.Tensor:
    """The weight [rows, columns] that a 4-bit tensor stands for, in its original dtype; exact for every shape.

    Decoding it as one row avoids the library's fault with rows that end inside a block.
    """
    import bitsandbytes.functional as bnb

    if getattr(state, "packing_format_for_cpu", False):
        raise RuntimeError(
            "this 4-bit weight was repacked by a forward pass; it no longer decodes to its values"
        )
    flat = copy.copy(state)
    shape = torch.Size(state.shape)
    flat.shape = torch.Size([shape.numel()])
    decoded: torch.Tensor = bnb.dequantize_4bit(packed, flat)
    return decoded.reshape(shape)


def dequantised_weight(module: nn.Module) -> torch.Tensor:
    """The weight [out_features, in_features] that a linear layer computes with, quantized or not, as a new tensor."""
    weight: Any = module.weight
    kind = type(module).__name__
    if kind == "Linear4bit":
        return dequantise_4bit(weight.data, weight.quant_state)
    if kind == "Linear8bitLt":
        layer: Any = module
        codes = layer.state.CB if layer.state.CB is not None else weight.CB
        scales = layer.state.SCB if layer.state.SCB is not None else weight.SCB
        decoded: torch.Tensor = codes.to(torch.float32) * (scales.to(torch.float32) / 127.0).unsqueeze(1)
        return decoded
    result: torch.Tensor = weight.detach().clone()
    return result


def dequantised_state(model: Any, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    """The base's parameters by their original names, quantized layers decoded exactly, adapters left out.

    This is what an adapter trained on a quantized base has to be merged into: the weights it was trained on. `dtype`
    casts the result. Tied tensors appear once.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    quantized = {
        name: module
        for name, module in base.named_modules()
        if type(module).__name__ in ("Linear4bit", "Linear8bitLt")
    }
    state: dict[str, torch.Tensor] = {}
    for name, parameter in base.named_parameters():
        if "lora_" in name:
            continue
        owner, _, leaf = name.rpartition(".")
        tensor = (
            dequantised_weight(quantized[owner])
            if leaf == "weight" and owner in quantized
            else parameter.detach()
        )
        state[name.replace(".base_layer.", ".")] = tensor.to(dtype) if dtype is not None else tensor
    return state
