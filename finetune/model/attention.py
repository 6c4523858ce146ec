"""Attention of packed rows, document by document, so that no dense block-diagonal mask is ever built.

Shapes: B rows, T tokens in a row, H query heads, K key/value heads (H a multiple of K), D head size.

A packed row holds several documents that must not see each other. transformers expresses this with a dense mask
[B, 1, T, T], built only when no cache and no padding mask is given: with the default `use_cache` the documents see each
other. Here the boundaries come from `cu_seq_lens_q`, which TRL's padding-free collator passes, else from the places
where `position_ids` start anew, whatever the cache and the mask are. Each document is then one causal attention.

On CPUs attention is computed in fp32 even when the model is bf16, because the bf16 backward kernel is slow. Measured
on AVX512-BF16 cores, one layer, 983 tokens in 16 documents, 9 heads of 64, forward + backward, CPU time: dense mask
128 ms, bf16 document by document 37 ms, fp32 document by document 9 ms. From 16 to 2,048 tokens a document fp32 won
every time, its backward by a factor of 2 to 18. Stacking documents of equal length, were it free, would save 5 % at 64
tokens; padding documents to a common length costs more than it saves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional

from finetune.model.documents import Segment, cut_mask, find_segments, is_plain_causal
from finetune.model.varlen import varlen_attention, varlen_usable

ATTENTION_NAME = "document"
# Up to so many tokens of its own a segment with a prefix attends in one call under a mask, which is up to 15 % faster than
# two calls without; of 1,024 it takes a third longer, and the mask of 4,096 has 67 MB.
_LONGEST_MASK = 512
# What layers of transformers' models ask for beside queries, keys, values and a mask, and torch's kernels do not compute.
_LEFT_OUT = {
    "s_aux": "attention sinks",
    "sinks": "attention sinks",
    "softcap": "a soft cap on the scores",
}


class AttentionLeftOutError(ValueError):
    """A layer asks for something that attention document by document would leave out."""


def register_document_attention() -> str:
    """Register the implementation with transformers (idempotent); returns its name for `attn_implementation`."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(ATTENTION_NAME, document_attention)
    AttentionMaskInterface.register(ATTENTION_NAME, document_mask)
    return ATTENTION_NAME


def document_mask(**arguments: Any) -> torch.Tensor | None:
    """The mask transformers hands to every layer: None for plain causal rows, packed or not; else that of SDPA.

    A mask function that is not recognised (sliding windows, image blocks, prefix attention) gets its dense mask, which
    `document_attention` then cuts at the document boundaries: slower, never wrong.
    """
    from transformers.masking_utils import sdpa_mask

    if (
        arguments.get("attention_mask") is None
        and not arguments.get("use_vmap", False)
        and arguments["q_length"] == arguments["kv_length"]
        and is_plain_causal(arguments.get("mask_function"))
    ):
        return None
    mask: torch.Tensor | None = sdpa_mask(**arguments)
    return mask


def document_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_ids: torch.Tensor | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    branches: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention in which no token sees another document; the function transformers calls in every layer.

    `query` [B, H, T, D]; `key`, `value` [B, K, T', D], where T' > T only while decoding from a cache; `branches`: see
    `find_segments`. Returns [B, T, H, D] and no weights. Decoding steps, bidirectional layers and biases go to
    transformers' SDPA. Options that repeat what the mask says (windows, chosen keys) or ask for no other result are not
    looked at. Raises ValueError for branches of a layer that says more than 'causal', e.g. a window, and
    AttentionLeftOutError, a ValueError, for sinks and soft caps.
    """
    _refuse_left_out(options)
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    n_rows, _, n_tokens, head_size = query.shape
    if attention_mask is None and n_tokens > 1 and key.shape[2] > n_tokens:
        # Prefill of a static cache, whose tail is still empty: with no mask only the first T keys count.
        key, value = key[:, :, :n_tokens], value[:, :, :n_tokens]
    if n_tokens == 1 or key.shape[2] != n_tokens or not causal or options.get("position_bias") is not None:
        return _plain(module, query, key, value, attention_mask, dropout, scaling, is_causal, options)
    segments = find_segments(n_rows, n_tokens, position_ids, cu_seq_lens_q, branches)
    if attention_mask is not None:
        if any(segment.prefix_length for segment in segments):
            raise ValueError("a mask that counts places in the row says nothing about branches of one prompt")
        mask = cut_mask(attention_mask, segments, n_rows, position_ids)
        return _plain(module, query, key, value, mask, dropout, scaling, is_causal, options)
    if dropout == 0.0 and head_size == value.shape[-1]:
        if query.device.type == "cpu":
            attended: torch.Tensor = _CpuDocuments.apply(query, key, value, segments, scaling)  # type: ignore[no-untyped-call]
            return attended, None
        if varlen_usable(query) and len(segments) > 1:
            return varlen_attention(query, key, value, segments, scaling), None
    return _each_by_sdpa(query, key, value, segments, dropout, scaling), None


def _refuse_left_out(options: dict[str, Any]) -> None:
    """Raise for an option that changes what attention computes, and that nothing here applies."""
    for name, meaning in _LEFT_OUT.items():
        if options.get(name) is not None:
            raise AttentionLeftOutError(
                f"attention document by document does not compute `{name}`: {meaning}"
            )


class _CpuDocuments(torch.autograd.Function):
    """Flash attention of every segment in fp32, written straight into [B, T, H, D]; only the inputs are kept.

    A segment with a prefix has the prefix's keys and values before its own, and a mask instead of the causal flag; a long one
    attends to both one after the other, and the results are weighed by their sums of exponentials.

    Calling the kernels directly, in place of autograd over slices, avoids fp32 copies of q, k, v and the output living
    until the backward, and a zero-filled gradient of the whole row for every slice.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        segments: tuple[Segment, ...],
        scale: float | None,
    ) -> torch.Tensor:
        n_rows, n_heads, n_tokens, head_size = query.shape
        output = query.new_empty(n_rows, n_tokens, n_heads, head_size)
        log_sums: list[torch.Tensor] = []
        for segment in segments:
            q = _widen(_slice(query, segment))
            k, v = (_widen(_with_prefix(tensor, segment)) for tensor in (key, value))
            parts = [
                torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                    q, k[:, :, keys], v[:, :, keys], 0.0, **causality, scale=scale
                )
                for keys, causality in _calls(segment, q.dtype)
            ]
            attended, log_sum = parts[0] if len(parts) == 1 else _weighed(*parts)
            _slice(output.transpose(1, 2), segment).copy_(attended)
            log_sums.append(log_sum)
        ctx.save_for_backward(query, key, value, output, *log_sums)
        ctx.segments, ctx.scale = segments, scale
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, output, *log_sums = ctx.saved_tensors
        # [B, T, heads, D] in memory: the order of the kernels' results and of the projections before them.
        results = [
            tensor.new_empty(tensor.transpose(1, 2).shape).transpose(1, 2) for tensor in (query, key, value)
        ]
        outward = gradients[0].transpose(1, 2)
        for segment, log_sum in zip(ctx.segments, log_sums, strict=True):
            q = _widen(_slice(query, segment))
            k, v = (_widen(_with_prefix(tensor, segment)) for tensor in (key, value))
            gradient = _widen(_slice(outward, segment))
            attended = _widen(_slice(output.transpose(1, 2), segment))
            # Of the whole result and its sum of exponentials, so that the parts of a long segment only add up.
            parts = [
                torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                    gradient,
                    q,
                    k[:, :, keys],
                    v[:, :, keys],
                    attended,
                    log_sum,
                    0.0,
                    **causality,
                    scale=ctx.scale,
                )
                for keys, causality in _calls(segment, q.dtype)
            ]
            shared = segment.prefix_length
            whole = parts[0] if len(parts) == 1 else _joined(*parts)
            _slice(results[0], segment).copy_(whole[0])
            for result, part in zip(results[1:], whole[1:], strict=True):
                _slice(result, segment).copy_(part[:, :, shared:])
                if shared:  # the prefix's own gradient was written before, for it comes earlier in the row
                    result[:, :, segment.prefix_start : segment.prefix_stop].add_(part[:, :, :shared])
        return (*results, None, None)


def _slice(tensor: torch.Tensor, segment: Segment) -> torch.Tensor:
    """View [rows, heads, tokens, D] of the part of [B, heads, T, D] that the segment covers."""
    return tensor[segment.first_row : segment.last_row, :, segment.start : segment.stop]


def _with_prefix(tensor: torch.Tensor, segment: Segment) -> torch.Tensor:
    """[rows, heads, prefix + tokens, D]: what the segment's tokens may see of keys or values [B, heads, T, D]."""
    own = _slice(tensor, segment)
    if not segment.prefix_length:
        return own
    prefix = tensor[segment.first_row : segment.last_row, :, segment.prefix_start : segment.prefix_stop]
    return torch.cat([prefix, own], dim=2)


def _causality(segment: Segment, dtype: torch.dtype) -> dict[str, Any]:
    """Causal flag or mask for torch's kernels, whose flag counts from the first key and not from the last."""
    if not segment.prefix_length:
        return {"is_causal": True, "attn_mask": None}
    return {"is_causal": False, "attn_mask": segment.visible(dtype)[None, None]}


def _calls(segment: Segment, dtype: torch.dtype) -> list[tuple[slice, dict[str, Any]]]:
    """The kernel calls of a segment: the keys of each, counted from its prefix on, and their causality."""
    own = segment.stop - segment.start
    if not segment.prefix_length or own <= _LONGEST_MASK:
        return [(slice(None), _causality(segment, dtype))]
    return [
        (slice(segment.prefix_length), {"is_causal": False, "attn_mask": None}),
        (slice(segment.prefix_length, None), {"is_causal": True, "attn_mask": None}),
    ]


def _weighed(
    one: tuple[torch.Tensor, torch.Tensor], other: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention to two sets of keys from attention to each: results [B, H, T, D] and logs of sums [B, H, T]."""
    log_sum = torch.logaddexp(one[1], other[1])
    share = (one[1] - log_sum).exp().unsqueeze(-1)
    return torch.lerp(other[0], one[0], share.to(one[0].dtype)), log_sum


def _joined(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Gradients of queries, keys and values from those by the first keys and those by the rest."""
    return [one[0] + other[0], *(torch.cat(pair, dim=2) for pair in zip(one[1:], other[1:], strict=True))]


def _widen(tensor: torch.Tensor) -> torch.Tensor:
    """fp32 for half-precision types; other types stay."""
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def _each_by_sdpa(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    segments: tuple[Segment, ...],
    dropout: float,
    scale: float | None,
) -> torch.Tensor:
    """Segment by segment through torch's public SDPA: for dropout, odd head sizes and devices without varlen kernels."""
    dtype = query.dtype
    if query.device.type == "cpu":
        query, key, value = _widen(query), _widen(key), _widen(value)
    pieces: list[torch.Tensor] = []
    for segment in segments:
        causality = _causality(segment, query.dtype)
        if causality["attn_mask"] is not None:
            causality["attn_mask"] = causality["attn_mask"].to(query.device)
        attended = functional.scaled_dot_product_attention(
            _slice(query, segment),
            _with_prefix(key, segment),
            _with_prefix(value, segment),
            dropout_p=dropout,
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
            **causality,
        )
        pieces.append(attended.transpose(1, 2))
    if all(piece.shape[0] == query.shape[0] for piece in pieces):
        return torch.cat(pieces, dim=1).to(dtype)
    # Segments of single rows come row by row, so that laid end to end they are the batch.
    flat = torch.cat([piece.flatten(0, 1) for piece in pieces])
    return flat.view(query.shape[0], query.shape[2], *flat.shape[1:]).to(dtype)


def _plain(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    scaling: float | None,
    is_causal: bool | None,
    options: dict[str, Any],
) -> tuple[torch.Tensor, None]:
    """transformers' own SDPA, in fp32 on CPUs except for decoding steps, where casting the cache would cost more."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    dtype = query.dtype
    if query.device.type == "cpu" and query.shape[2] > 1:
        query, key, value = _widen(query), _widen(key), _widen(value)
        if mask is not None and mask.dtype != torch.bool:
            mask = mask.to(query.dtype)
    output, _ = sdpa_attention_forward(
        module, query, key, value, mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **options
    )
    return output.to(dtype), None
