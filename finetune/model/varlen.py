"""torch's own variable-length flash attention on CUDA: all documents of a packed batch in one kernel call.

Shapes: B rows, T tokens in a row, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from finetune.model.documents import Segment


def varlen_usable(query: torch.Tensor) -> bool:
    """Whether the kernel takes these tensors: CUDA from compute capability 8.0, half precision, D <= 256."""
    return (
        query.device.type == "cuda"
        and query.dtype in (torch.bfloat16, torch.float16)
        and query.shape[-1] <= 256
        and query.shape[-1] % 8 == 0
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
    )


def varlen_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    segments: tuple[Segment, ...],
    scale: float | None,
) -> torch.Tensor:
    """Causal attention of query [B, H, T, D] over key, value [B, K, T, D], segment by segment. Returns [B, T, H, D].

    The rows are laid end to end. Keys and values of a prefix are laid before those of every segment that sees it; the
    kernel's causal window counts from the last key, so that a query sees all of them.
    """
    from torch.nn.attention.varlen import varlen_attn

    n_rows, n_heads, n_tokens, head_size = query.shape
    # Segments that rows share come once; each row needs its own.
    layout = _layout(segments, segments[0].last_row - segments[0].first_row, query.device)
    q, k, v = (
        tensor.transpose(1, 2).reshape(n_rows * n_tokens, -1, head_size) for tensor in (query, key, value)
    )
    if layout.key_places is not None:
        k, v = k.index_select(0, layout.key_places), v.index_select(0, layout.key_places)
    output: Any = varlen_attn(
        q,
        k,
        v,
        layout.offsets,
        layout.key_offsets,
        layout.longest,
        layout.longest_key,
        scale=scale,
        window_size=(-1, 0),
        enable_gqa=n_heads != key.shape[1],
    )
    result: torch.Tensor = output.view(n_rows, n_tokens, n_heads, head_size)
    return result


@dataclass(frozen=True)
class _Layout:
    """Where segments begin among the queries and among the keys; `key_places` repeats the keys of prefixes."""

    offsets: torch.Tensor
    key_offsets: torch.Tensor
    longest: int
    longest_key: int
    key_places: torch.Tensor | None


@functools.lru_cache(maxsize=4)
def _layout(segments: tuple[Segment, ...], n_repeats: int, device: torch.device) -> _Layout:
    """Made once a batch: every layer has the same segments, and each copy to the device would wait for it."""
    lengths = [s.stop - s.start for s in segments] * n_repeats
    key_lengths = [s.prefix_length + s.stop - s.start for s in segments] * n_repeats
    offsets = _offsets(lengths, device)
    if key_lengths == lengths:
        return _Layout(offsets, offsets, max(lengths), max(lengths), None)
    places = [
        place
        for s in segments
        for part in ((s.prefix_start, s.prefix_stop), (s.start, s.stop))
        for place in range(*part)
    ]
    return _Layout(
        offsets,
        _offsets(key_lengths, device),
        max(lengths),
        max(key_lengths),
        torch.tensor(places, device=device),
    )


def _offsets(lengths: list[int], device: torch.device) -> torch.Tensor:
    """Cumulative lengths from 0, as the kernel takes them."""
    return torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)
