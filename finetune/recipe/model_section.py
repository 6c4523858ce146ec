"""The base model of a recipe."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from finetune.recipe.section import Section


class ModelSection(Section):
    """The base model and how its weights are held."""

    id: str = Field(description="`builtin:smollm2-135m-instruct`, a folder, or a hub id.")
    revision: str | None = Field(None, description="Commit or tag of a hub id.")
    dtype: Literal["bf16", "fp16", "fp32"] = Field(
        "bf16",
        description="Type of the frozen base weights and of the compute; trained weights are fp32. `fp16` scales the loss and "
        "needs CUDA.",
    )
    quantize: Literal["none", "nf4", "fp4", "int8"] = Field(
        "none", description="Quantization of the frozen weights; `nf4` is QLoRA."
    )
    double_quantization: bool = Field(
        True, description="Quantize the 4-bit constants too (0.37 bits a parameter less)."
    )
    attention: Literal["auto", "document", "sdpa", "eager"] = Field(
        "auto",
        description="`document` attends each packed document by itself; `auto` takes it when packing or comparing answers, else "
        "`sdpa`, and `eager` for models with an attention of their own (Gemma 2, GPT-OSS).",
    )
    trust_remote_code: Literal[False] | str = Field(
        False, description="Off, or the pinned commit whose code may run."
    )
    new_tokens: list[str] = Field(
        default_factory=list,
        description="Tokens added to the tokenizer, e.g. `[<tool>, </tool>]`. Their rows start as the mean of the text's former "
        "tokens, are trained, and are saved with the adapter.",
    )
