"""The weights a merge starts from, row by row: the base as stored, or as the quantized training saw it.

A QLoRA adapter was trained on what the 4-bit codes decode to, not on the base on disk. Merged onto the latter it
answers differently (KL 1.7e-4 against 5e-7 in a measurement where the whole tuning effect was 3.2e-3), and merged
inside 4-bit it is rounded to the same codes again. So each tensor is quantized and decoded again, in memory of its own,
never through a module that ran a forward (on some CPUs that repacks the codes in place).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Protocol

import torch

from finetune.errors import UserError
from finetune.merge.layout import Layout
from finetune.merge.shards import TensorFiles
from finetune.model.load import DTYPES
from finetune.model.quantization import BLOCK_SIZE, FOUR_BIT, dequantise_4bit, quantization_config
from finetune.recipe.schema import ModelSection

Codes = Mapping[str, Any] | None
"""How 4-bit weights are coded ({"quantize", "double_quantization"}), which some adapters belong to; None: not at all."""


class WeightReader(Protocol):
    """Values of a model's parameters by their names in the model."""

    def shape(self, parameter: str) -> tuple[int, ...]: ...

    def rows(self, parameter: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Rows [start, stop) along the first dimension; a scalar or vector counts its elements as rows."""
        ...

    def gather(self, parameter: str, rows: torch.Tensor) -> torch.Tensor:
        """The rows with these indices [n]."""
        ...


class StoredWeights:
    """The parameters as they lie in the files, in the dtype of the files."""

    codes: Codes = None

    def __init__(self, files: TensorFiles, layout: Layout) -> None:
        self.files, self.layout = files, layout

    def _tensor(self, parameter: str) -> str:
        return self.layout.stored[self.layout.canonical(parameter)]

    def shape(self, parameter: str) -> tuple[int, ...]:
        return self.files.entries[self._tensor(parameter)].shape

    def rows(self, parameter: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        return self.files.read(self._tensor(parameter), start, stop)

    def gather(self, parameter: str, rows: torch.Tensor) -> torch.Tensor:
        return self.files.gather(self._tensor(parameter), rows)


class DequantisedWeights(StoredWeights):
    """The parameters as a quantized model computes with them, in fp32.

    `quantized` names the weights that the quantized model holds as codes; all others are cast to the model's dtype, as
    loading it does. The tensor decoded last is kept, so that reading it in chunks decodes it once.
    """

    def __init__(
        self, files: TensorFiles, layout: Layout, section: ModelSection, quantized: dict[str, bool]
    ) -> None:
        """`quantized` maps a parameter to whether its stored orientation is transposed (Conv1D)."""
        super().__init__(files, layout)
        self.section, self.quantized = section, quantized
        if section.quantize in FOUR_BIT:
            self.codes = {
                "quantize": section.quantize,
                "double_quantization": section.double_quantization,
            }
        self._last: tuple[str, torch.Tensor] | None = None

    def rows(self, parameter: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        if parameter not in self.quantized:
            return _as_loaded(super().rows(parameter, start, stop), self.section)
        return self._decoded(parameter)[start:stop]

    def gather(self, parameter: str, rows: torch.Tensor) -> torch.Tensor:
        if parameter not in self.quantized:
            return _as_loaded(super().gather(parameter, rows), self.section)
        return self._decoded(parameter)[rows]

    def _decoded(self, parameter: str) -> torch.Tensor:
        if self._last is None or self._last[0] != parameter:
            self._last = None
            stored = super().rows(parameter).to(DTYPES[self.section.dtype])
            if self.quantized[parameter]:
                decoded = requantised(stored.T, self.section).T.contiguous()
            else:
                decoded = requantised(stored, self.section)
            self._last = (parameter, decoded)
        return self._last[1]


def requantised(weight: torch.Tensor, section: ModelSection) -> torch.Tensor:
    """What `weight` [out, in] decodes to in fp32 after quantization by `section`; `weight` has the model's dtype."""
    import bitsandbytes.functional as bnb

    if section.quantize == "int8":
        codes, scales, _ = bnb.int8_vectorwise_quant(weight.contiguous().to(torch.float16))
        decoded: torch.Tensor = codes.float() * (scales.float() / 127.0).unsqueeze(1)
        return decoded
    packed, state = bnb.quantize_4bit(
        weight.contiguous(),
        blocksize=BLOCK_SIZE,
        compress_statistics=section.double_quantization,
        quant_type=section.quantize,
    )
    wide = copy.copy(state)
    wide.dtype = torch.float32
    return dequantise_4bit(packed, wide)


def quantized_parameters(skeleton: Any, section: ModelSection) -> dict[str, bool]:
    """Weights that transformers would quantize -> whether they are stored transposed. Changes `skeleton` in place."""
    from transformers.pytorch_utils import Conv1D
    from transformers.quantizers.auto import AutoHfQuantizer

    settings = quantization_config(
        section.quantize, dtype=DTYPES[section.dtype], double_quantization=section.double_quantization
    )
    quantizer = AutoHfQuantizer.from_config(settings, pre_quantized=False)
    quantizer.preprocess_model(skeleton, dtype=DTYPES[section.dtype], device_map={"": "cpu"})
    found = {
        f"{name}.weight": issubclass(module.source_cls, Conv1D)
        for name, module in skeleton.named_modules()
        if type(module).__name__ in ("Linear4bit", "Linear8bitLt")
    }
    if not found:
        raise UserError(
            "no layer of this model would be quantized", where=f"model.quantize: {section.quantize}"
        )
    return found


def _as_loaded(stored: torch.Tensor, section: ModelSection) -> torch.Tensor:
    return stored.to(DTYPES[section.dtype]) if stored.is_floating_point() else stored
