"""Bytes that the forward pass keeps for the backward pass, tensor by tensor, and the transient tiles of the loss.

Legend: T tokens of one forward pass, S length that attends (one document, or the padded row), H hidden, I intermediate,
Q query width, K key/value width, V vocabulary, r adapter rank, c bytes of the compute type, s bytes of the residual
stream. Every line is compared with the tensors that autograd really saves in tests/plan/test_activations.py.

What is kept follows from what is trained. A frozen matrix keeps no input; an adapter beside it does. Plain LoRA shares the
input with whoever reads the same tensor. With DoRA, dropout, or (on CPUs) 4-bit weights each adapter keeps a cast copy of
its own under autocast, because PEFT converts the input to the adapter's fp32 first. Norms with a frozen weight and gated
MLPs keep what finetune/model/fast_norm.py and fast_mlp.py say, where these run: not with selective checkpointing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from finetune.plan.architecture import Architecture, LinearShape

Attention = Literal["document", "sdpa", "eager"]

# The head is applied to this many targets at a time (finetune/training/losses.py), so logits never outlive a chunk: over a
# frozen head on CPUs, and elsewhere.
HEAD_CHUNK_TARGETS_ON_CPU, HEAD_CHUNK_TARGETS = 128, 512

# fp32 tensors of a chunk's logits that are alive together. A trained head is recomputed: log-probabilities, their gradient
# and that of the logits. Logits that the model bends after the head (soft capping, scaling) are built whole, and likewise.
# A frozen head takes its gradient in the forward pass, over one tensor in fp32 and one in the compute type.
_TRAINED_HEAD_TENSORS = 3


@dataclass(frozen=True, slots=True)
class Tuning:
    """What decides which tensors are kept.

    `kind` is what is trained, `autocast` whether fp32 trainables compute in a smaller type, `quantized` whether the base
    matrices are quantized, `adapted` the matrices with an adapter (empty for full tuning). Dropout keeps a byte an element
    on CUDA; on CPU it keeps its scaled noise in the type of its input, and attention with dropout is not fused there.
    `fused` is whether the passes of finetune/model/fast.py run where they can, `plain_adapters` whether the adapters are
    LoRA's and not another kind whose activations only lie like them.
    """

    kind: Literal["lora", "dora", "none"]
    compute_bytes: int
    autocast: bool
    quantized: bool
    rank: int = 0
    dropout: bool = False
    adapted: tuple[LinearShape, ...] = ()
    on_cpu: bool = True
    fused: bool = True
    plain_adapters: bool = True

    @property
    def stream_bytes(self) -> int:
        """Bytes an element of the residual stream: that of the embedding, which full tuning keeps in fp32."""
        return 4 if self.kind == "none" and self.autocast else self.compute_bytes


@dataclass(frozen=True, slots=True)
class AttentionPattern:
    """How tokens attend: the kind, and how long the sequences are.

    `masked` means that an explicit mask is passed, for which keys and values are repeated to the query heads.
    """

    kind: Attention
    sequence_tokens: int
    masked: bool = False


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
        + architecture.residual_dropouts
        * architecture.hidden
        * (tuning.compute_bytes if tuning.on_cpu else 1)
    )
    return n_tokens * per_token


def outside_saved_bytes(architecture: Architecture, tuning: Tuning, n_tokens: int) -> int:
    """Bytes kept outside the layers: the final norm, the last hidden state and the rotary tables."""
    rotary = 0 if architecture.learned_positions else 2 * architecture.head_size * tuning.stream_bytes
    # The very first norm of a frozen model keeps nothing, for no gradient goes on to the embedding: it cancels the last.
    norm = _one_norm_bytes(architecture, tuning) if tuning.kind == "none" else 0
    if tuning.dropout:  # nor does the dropout before its first matrices
        first = sum(x.n_in for x in tuning.adapted if x.reads == "attention_input")
        norm -= first * _adapter_noise_bytes(tuning)
    embedding_dropout = architecture.residual_dropouts > 0 and tuning.kind == "none"
    noise = (tuning.stream_bytes if tuning.on_cpu else 1) * architecture.hidden if embedding_dropout else 0
    return n_tokens * (norm + rotary + noise + architecture.hidden * tuning.stream_bytes)


def checkpoint_bytes(architecture: Architecture, tuning: Tuning, n_tokens: int) -> int:
    """Bytes kept for one layer when it is recomputed: its input."""
    return n_tokens * architecture.hidden * tuning.stream_bytes


def head_bytes(architecture: Architecture, tuning: Tuning, n_targets: int, n_tokens: int) -> int:
    """Transient bytes of the head and the loss: logits of one chunk of targets, and gradients."""
    c, vocabulary, hidden = tuning.compute_bytes, architecture.vocabulary, architecture.hidden
    if architecture.bent_logits:
        whole = n_tokens * vocabulary * c
        return whole + n_targets * vocabulary * (4 * _TRAINED_HEAD_TENSORS + c)
    if tuning.kind == "none":
        n_chunk = min(n_targets, HEAD_CHUNK_TARGETS)
        n_gradients = 2 if n_targets > HEAD_CHUNK_TARGETS else 1  # the sum so far and the chunk's own
        weight_gradient = n_gradients * 4 * architecture.head_parameters
        return n_chunk * vocabulary * 4 * _TRAINED_HEAD_TENSORS + weight_gradient + n_targets * hidden * 4
    return _frozen_chunk_bytes(architecture, tuning, n_targets) + 2 * n_targets * hidden * c


def unlearnt_head_bytes(architecture: Architecture, tuning: Tuning, n_targets: int, n_tokens: int) -> int:
    """Transient bytes of the head and the loss without gradients: a chunk's logits in fp32 and in the compute type.

    Those of a head that is trained are there with their log-softmax. Logits that the model bends are built whole, once in
    the compute type and twice in fp32.
    """
    if architecture.bent_logits:
        return (
            n_tokens * architecture.vocabulary * tuning.compute_bytes
            + n_targets * architecture.vocabulary * 8
        )
    hidden = n_targets * architecture.hidden * tuning.compute_bytes
    if tuning.kind == "none":
        return min(n_targets, HEAD_CHUNK_TARGETS) * architecture.vocabulary * 8 + hidden
    return _frozen_chunk_bytes(architecture, tuning, n_targets) + hidden


def _frozen_chunk_bytes(architecture: Architecture, tuning: Tuning, n_targets: int) -> int:
    """Logits of a chunk over a frozen head: in fp32, and in the compute type before and after."""
    chunk = HEAD_CHUNK_TARGETS_ON_CPU if tuning.on_cpu else HEAD_CHUNK_TARGETS
    each = 4 if tuning.compute_bytes == 4 else 4 + tuning.compute_bytes
    return min(n_targets, chunk) * architecture.vocabulary * each


def layer_backward_bytes(architecture: Architecture, tuning: Tuning, n_tokens: int) -> int:
    """Transient bytes of the backward pass of one layer: gradients of the MLP's middle and of the norm, in fp32."""
    middle = 3 * architecture.intermediate * tuning.compute_bytes
    norm = 3 * architecture.hidden * 4
    return n_tokens * max(middle, norm)


def _one_norm_bytes(architecture: Architecture, tuning: Tuning) -> int:
    """A frozen norm keeps its input as it came and a number a token; else its input in fp32, and if its weight is trained
    also the normalised value."""
    if architecture.norm_has_bias:  # LayerNorm is one kernel that keeps its input as it came
        on_cuda_fp32 = (
            tuning.autocast and not tuning.on_cpu
        )  # CUDA's autocast runs it in fp32, the CPU's does not
        return architecture.hidden * (4 if on_cuda_fp32 else tuning.stream_bytes)
    if _slim_norms(tuning):
        return architecture.hidden * tuning.stream_bytes + 4
    trained = tuning.stream_bytes if tuning.kind == "none" else 0
    return architecture.hidden * (4 + trained)


def _slim_norms(tuning: Tuning) -> bool:
    return tuning.fused and tuning.kind != "none"


def _norm_bytes(architecture: Architecture, tuning: Tuning) -> int:
    total = architecture.norms_per_layer * _one_norm_bytes(architecture, tuning)
    if architecture.qk_norm != "none" and _slim_norms(tuning):
        n_scales = architecture.n_heads + architecture.n_kv_heads if architecture.qk_norm == "per_head" else 2
        total += (architecture.query_width + architecture.kv_width) * tuning.compute_bytes + 4 * n_scales
    elif architecture.qk_norm != "none":
        kept = 4 if architecture.fp32_norm_weight else tuning.compute_bytes
        trained = kept if tuning.kind == "none" else 0
        total += (architecture.query_width + architecture.kv_width) * (4 + trained)
    return total


def _attention_bytes(architecture: Architecture, tuning: Tuning, attention: AttentionPattern) -> int:
    c, query, kv = tuning.compute_bytes, architecture.query_width, architecture.kv_width
    if attention.kind == "eager":
        # Keys and values are repeated to the query heads; the probabilities exist in fp32 and in the compute type.
        probabilities = architecture.n_heads * attention.sequence_tokens * (c if c == 4 else 4 + c)
        return 3 * query * c + probabilities
    if architecture.attention_dropout and tuning.on_cpu:
        # Not fused: probabilities, noise and their product, and the three operands, all in fp32.
        return 3 * architecture.n_heads * attention.sequence_tokens * 4 + 3 * query * 4
    kept_kv = query if attention.masked else kv
    logsumexp = 4 * architecture.n_heads
    fused = (
        query + kv if architecture.fused_projections else 0
    )  # the value is a view that keeps queries and keys too
    return 2 * query * c + 2 * kept_kv * c + fused * c + logsumexp


def _mlp_bytes(architecture: Architecture, tuning: Tuning) -> int:
    """The gate and the other branch, and the activation where it is not fused; without a gate the activation's input."""
    width = architecture.intermediate * tuning.compute_bytes
    if architecture.gated:
        return 2 * width if _slim_gates(architecture, tuning) else 3 * width
    return width if architecture.fused_activation else 4 * width


def _slim_gates(architecture: Architecture, tuning: Tuning) -> bool:
    """Whether finetune/model/fast_mlp.py takes the MLP over: not one whose branches are one matrix."""
    return tuning.fused and architecture.gated and not architecture.fused_projections


def fuses_adapters(architecture: Architecture, tuning: Tuning) -> bool:
    """Whether finetune/model/fast_lora.py takes the adapters over: plain LoRA on plain matrices, without dropout."""
    return (
        tuning.fused
        and tuning.plain_adapters
        and tuning.kind == "lora"
        and not (tuning.dropout or tuning.quantized or architecture.transposed_matrices)
    )


def _input_bytes(architecture: Architecture, tuning: Tuning, attention: AttentionPattern) -> int:
    """Inputs of the matrices that need them for a weight gradient."""
    trained = architecture.layer_linears if tuning.kind == "none" else tuning.adapted
    c = tuning.compute_bytes
    own_copy = tuning.kind != "none" and (tuning.dropout or converts_input(architecture, tuning))
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
        already_kept = linear.reads == "attention_output" and attention.kind != "eager"
        if linear.reads == "mlp_middle" and fuses_adapters(architecture, tuning):
            already_kept = _slim_gates(architecture, tuning)  # made again from the two branches
        if not already_kept:
            total += linear.n_in * c
    return total


def converts_input(architecture: Architecture, tuning: Tuning) -> bool:
    """Whether PEFT's own forward runs and converts: not for plain LoRA, which finetune/model/fast_lora.py takes over."""
    if tuning.quantized:
        return tuning.autocast and tuning.on_cpu
    return tuning.autocast and (tuning.kind == "dora" or tuning.dropout or architecture.transposed_matrices)


def _adapter_bytes(tuning: Tuning) -> int:
    """Per matrix: the rank-r middle; DoRA keeps its two outputs for the magnitude; dropout keeps its noise."""
    c = tuning.compute_bytes
    noise = _adapter_noise_bytes(tuning)
    total = 0
    for linear in tuning.adapted:
        total += tuning.rank * c
        if tuning.kind == "dora":
            total += 2 * linear.n_out * c
        if tuning.dropout:
            total += linear.n_in * noise
    return total


def _adapter_noise_bytes(tuning: Tuning) -> int:
    """On CPUs the noise is kept in fp32, to which an adapter converts its input first; on CUDA as a mask."""
    return 4 if tuning.on_cpu else 1
