"""The model as it is before a run's training: what its baseline answers come from."""

from __future__ import annotations

from typing import Any

from finetune.model.adapter_files import load_adapter
from finetune.model.load import load_model, load_tokenizer
from finetune.model.source import ModelSource
from finetune.pipeline.inputs import RunInputs
from finetune.pipeline.starts import AdapterStart


def tokenizer_before(inputs: RunInputs) -> Any:
    """The base's tokenizer, or that saved with the adapter training goes on from where it brought new tokens."""
    return tokenizer_at_start(inputs.source, inputs.start)


def tokenizer_at_start(source: ModelSource, start: AdapterStart | None) -> Any:
    """As `tokenizer_before`, of a base and the adapter that training goes on from, if any."""
    tokenizer = load_tokenizer(source)
    if start is None or not (start.folder / "tokenizer_config.json").is_file():
        return tokenizer
    from transformers import AutoTokenizer

    saved = AutoTokenizer.from_pretrained(str(start.folder), local_files_only=True)
    return saved if len(saved) > len(tokenizer) else tokenizer


def load_before(inputs: RunInputs, *, dtype: str, attention: str) -> Any:
    """The base, with the adapter that training goes on from, if any; frozen."""
    if inputs.start is None:
        return load_model(inputs.source, dtype=dtype, attention=attention)
    section = inputs.recipe.model
    base = load_model(
        inputs.source,
        dtype=dtype,
        quantize=section.quantize,
        double_quantization=section.double_quantization,
        attention=attention,
        trust_remote_code=section.trust_remote_code,
    )
    return load_adapter(base, inputs.start.folder, source=inputs.source)
