"""Bytes that the forward pass keeps for the backward pass, tensor by tensor, and the transient tiles of the loss.

Legend: T tokens of one forward pass, S length that attends (one document, or the padded row), H hidden, I intermediate,
Q query width, K key/value width, V vocabulary, r adapter rank, c bytes of the compute type, s bytes of the residual
stream. Every line is compared with the tensors that autograd really saves in tests/plan/test_activations.py.

What is kept follows from what is trained. A frozen matrix keeps no input; an adapter beside it does, and under autocast
it keeps a cast copy of its own, because the adapter is fp32 and its input was converted for it. A 4-bit layer hands its
input on unchanged, so all adapters that read one tensor share it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from finetune.plan.architecture import Architecture, LinearShape

Attention = Literal["document", "sdpa", "eager"]

# The fused language-model head works on tiles of this many tokens by this many vocabulary entries.
HEAD_TILE_TOKENS = 4096
HEAD_TILE_VOCABULARY = 32768

# Bytes an element of a tile, counted over the tensors alive at the worst line. In plain torch (CPU), backward: the tile
# in the compute type, then in fp32 the scaled logits before and after temperature, log-probabilities, probabilities, the
# gradient, and the one-hot target with its difference, plus one byte for the comparison. Forward: logits, shifted
# logits and their exponential, plus one byte. With Triton (CUDA) the tile alone exists.
_TILE_FP32_TENSORS_BACKWARD = 7
_TILE_FP32_TENSORS_FORWARD = 3
_TILE_MASK_BYTES = 1


@dataclass(frozen=True, slots=True)
class Tuning:
    """What decides which tensors are kept.

    `kind` is what is trained, `autocast` whether fp32 trainables compute in a smaller type, `quantized` whether the base
    matrices are quantized, `adapted` the matrices with an adapter (empty for full tuning).
    """

    kind: Literal["lora", "dora", "none"]
    compute_bytes: int
    autocast: bool
    quantized: bool
    rank: int = 0
    dropout: bool = False
    adapted: tuple[LinearShape, ...] = ()

    @property
    def stream_bytes(self) -> int:
        """Bytes an element of the residual stream: that of the embedding, which full tuning keeps in fp32."""
        return 4 if self.kind == "none" and self.autocast else self.compute_bytes


@dataclass(frozen=True, slots=True)
class AttentionPattern:
    """How tokens attend: the kind, and how long the sequences are. `masked` means that an explicit mask is passed."""

    kind: Attention
    sequence_tokens: int
    masked: bool


def layer_saved_bytes(
    architecture: Architecture, tuning: Tuning, attention: AttentionPattern, n_tokens: int
) -> int:
    """Bytes that one layer keeps between forward and backward, for `n_tokens` tokens."""
    per_token = (
        _norm_bytes(architecture, tuning)
        + _attention_bytes(architecture, tuning, attention)
        + _mlp_bytes(architecture, tuning)
        + _input_bytes(architecture, tuning, attention)
        + _adapter_bytes(tuning)
        + architecture.dropout_per_layer * architecture.hidden
    )
    return n_tokens * per_token


def outside_saved_bytes(architecture: Architecture, tuning: Tuning, n_tokens: int) -> int:
    """Bytes kept outside the layers: the final norm, the last hidden state and the rotary tables."""
    rotary = 0 if architecture.learned_positions else 2 * architecture.head_size * tuning.stream_bytes
    norm = _one_norm_bytes(architecture, tuning)
    return n_tokens * (norm + rotary + architecture.hidden * tuning.stream_bytes)


def checkpoint_bytes(architecture: Architecture, tuning: Tuning, n_tokens: int) -> int:
    """Bytes kept for one layer when it is recomputed: its input."""
    return n_tokens * architecture.hidden * tuning.stream_bytes


def head_tile_bytes(
    architecture: Architecture, n_positions: int, *, compute_bytes: int, triton: bool, backward: bool
) -> int:
    """Transient bytes of the fused head: one tile of logits, never the full T x V."""
    tokens = min(n_positions, HEAD_TILE_TOKENS)
    columns = min(architecture.vocabulary, HEAD_TILE_VOCABULARY)
    per_element = compute_bytes
    if not triton:
        n_fp32 = _TILE_FP32_TENSORS_BACKWARD if backward else _TILE_FP32_TENSORS_FORWARD
        per_element += 4 * n_fp32 + _TILE_MASK_BYTES
    hidden_gradient = 4 * n_positions * architecture.hidden if backward else 0
    return tokens * columns * per_element + hidden_gradient


def layer_backward_bytes(architecture: Architecture, tuning: Tuning, n_tokens: int) -> int:
    """Transient bytes of the backward pass of one layer: gradients of the MLP's middle and of the norm, in fp32."""
    middle = 3 * architecture.intermediate * tuning.compute_bytes
    norm = 3 * architecture.hidden * 4
    return n_tokens * max(middle, norm)


def _one_norm_bytes(architecture: Architecture, tuning: Tuning) -> int:
    """A norm computes in fp32 and keeps its input so; when its weight is trained, also the normalised value."""
    if architecture.norm_has_bias:  # LayerNorm is one kernel that keeps its input as it came
        return architecture.hidden * (4 if tuning.autocast else tuning.stream_bytes)
    trained = tuning.stream_bytes if tuning.kind == "none" else 0
    return architecture.hidden * (4 + trained)


def _norm_bytes(architecture: Architecture, tuning: Tuning) -> int:
    total = architecture.norms_per_layer * _one_norm_bytes(architecture, tuning)
    if architecture.qk_norm != "none":
        trained = tuning.compute_bytes if tuning.kind == "none" else 0
        total += (architecture.query_width + architecture.kv_width) * (4 + trained)
    return total


def _attention_bytes(architecture: Architecture, tuning: Tuning, attention: AttentionPattern) -> int:
    c, query, kv = tuning.compute_bytes, architecture.query_width, architecture.kv_width
    if attention.kind == "eager":
        # Keys and values are repeated to the query heads; the probabilities exist in fp32 and in the compute type.
        probabilities = architecture.n_heads * attention.sequence_tokens * (4 + (c if c != 4 else 0))
        return 3 * query * c + probabilities
    kept_kv = query if attention.masked else kv
    logsumexp = 4 * architecture.n_heads
    return 2 * query * c + 2 * kept_kv * c + logsumexp


def _mlp_bytes(architecture: Architecture, tuning: Tuning) -> int:
    """Gate before and after the activation, and the other branch; without a gate the activation's input."""
    width = architecture.intermediate * tuning.compute_bytes
    if architecture.gated:
        return 3 * width
    return width if architecture.fused_activation else 4 * width


def _input_bytes(architecture: Architecture, tuning: Tuning, attention: AttentionPattern) -> int:
    """Inputs of the matrices that need them for a weight gradient."""
    trained = architecture.layer_linears if tuning.kind == "none" else tuning.adapted
    c = tuning.compute_bytes
    own_copy = tuning.autocast and (tuning.kind != "none" and not tuning.quantized)
    total = 0
    seen: set[str] = set()
    for linear in trained:
        copies = own_copy
        if tuning.kind == "none" and tuning.autocast:
            # The norms of full tuning hand on fp32, which each matrix casts for itself; the two others are cast already.
            copies = linear.reads in ("attention_input", "mlp_input")
        if copies:
            total += linear.n_in * c
            continue
        if linear.reads in seen:
            continue
        seen.add(linear.reads)
        already_kept = linear.reads == "attention_output" and attention.kind == "sdpa"
        if not already_kept:
            total += linear.n_in * c
    return total


def _adapter_bytes(tuning: Tuning) -> int:
    """Per matrix: the rank-r middle; DoRA keeps its two outputs for the magnitude; dropout keeps a mask of bytes."""
    c = tuning.compute_bytes
    total = 0
    for linear in tuning.adapted:
        total += tuning.rank * c
        if tuning.kind == "dora":
            total += 2 * linear.n_out * c
        if tuning.dropout:
            total += linear.n_in
    return total
