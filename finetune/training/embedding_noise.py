"""NEFTune: noise on the embeddings of the rows that are learnt from (Jain et al. 2023, arXiv:2310.05914).

The noise of a row of L tokens is uniform in ±alpha / √(L·D). transformers takes for L the length of the batch, padding
and all, so that a row's noise depends on its neighbours, and in a pack of many rows is too small; here L is the row's own.

Shapes: B rows of the batch, T tokens, D width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class EmbeddingNoise:
    """Adds noise to the output of `embedding` between `begin(inputs)` and `end()`, and never otherwise."""

    def __init__(self, embedding: nn.Module, alpha: float) -> None:
        self.alpha = alpha
        self._lengths: Tensor | None = None
        self._handle = embedding.register_forward_hook(self._add)

    def begin(self, inputs: dict[str, Any]) -> None:
        """Switch on for a batch; its rows' lengths are read from it."""
        self._lengths = token_lengths(inputs) if self.alpha > 0 else None

    def end(self) -> None:
        self._lengths = None

    def remove(self) -> None:
        """Take the hook off the embedding."""
        self._handle.remove()

    def _add(self, module: nn.Module, arguments: Any, embedded: Tensor) -> Tensor:
        if self._lengths is None:
            return embedded
        width = embedded.shape[-1]
        size = self.alpha / (self._lengths.to(embedded.device) * width).sqrt().unsqueeze(-1)
        noise = torch.rand(embedded.shape, device=embedded.device) * 2.0 - 1.0
        noisy: Tensor = embedded + (noise * size).to(embedded.dtype)
        return noisy


def token_lengths(inputs: dict[str, Any]) -> Tensor:
    """For every token [B, T] the length of its row; padding counts for nothing."""
    if "cu_seq_lens_q" in inputs:
        lengths: Tensor = inputs["cu_seq_lens_q"].diff().long()
        return lengths.repeat_interleave(lengths)[None]
    mask: Tensor = inputs["attention_mask"]
    return mask.sum(dim=1, keepdim=True).expand_as(mask)
