"""Attention document by document in packed rows."""

from __future__ import annotations

from typing import Any

import torch

NAME = "document"


def register_document_attention() -> str:
    """Register the implementation with transformers (idempotent) and return its name for `attn_implementation`."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, document_attention_forward)
    AttentionMaskInterface.register(NAME, document_mask)
    return NAME


def document_mask(**arguments: Any) -> torch.Tensor | None:
    from transformers.masking_utils import sdpa_mask

    mask: torch.Tensor | None = sdpa_mask(**arguments)
    return mask


def document_attention_forward(
    module: torch.nn.Module, *arguments: Any, **options: Any
) -> tuple[torch.Tensor, None]:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    result: tuple[torch.Tensor, None] = sdpa_attention_forward(module, *arguments, **options)
    return result
