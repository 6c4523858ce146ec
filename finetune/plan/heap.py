"""What a CPU's heap keeps beside the tensors in use: freed blocks stay with the process, and holes between what stays.

Read off glibc with mallinfo2 while recipes trained on two models of 30 layers, and compared with whole runs by
benchmarks/memory_forecast.py. Blocks of 32 MB and more are mapped by themselves and given back, so they leave no holes.
"""

from __future__ import annotations

from finetune.plan.activations import Tuning, converts_input
from finetune.plan.architecture import Architecture, LinearShape

# Holes over activations in use: 239 MB beside 735 MB where all forward passes have one length; 166 MB beside 130 MB after 40
# forward passes of ever other lengths, where kernels that torch keeps settle in the holes of each length.
ONE_LENGTH, MANY_LENGTHS = 0.32, 1.28


def high_water(moments: dict[str, dict[str, int]], worst: str, tuning: Tuning) -> dict[str, int]:
    """Terms of the heap once every moment of a step has passed; `worst` is the moment with the largest sum.

    The small tensors of the heap's own worst moment and the logits of the loss add up, though they are never there
    together. Of a model that is trained whole most gradients are blocks of their own, so there the moment's sum is it.
    """
    if tuning.kind == "none":
        return moments[worst]
    heap = max(moments.values(), key=lambda one: sum(size for name, size in one.items() if name != "logits"))
    return heap | {"logits": max(one["logits"] for one in moments.values())}


def holes_bytes(activations: int, distinct_lengths: int | None) -> int:
    """Holes beside `activations` bytes that are kept until their backward pass. None lengths: many."""
    return round((ONE_LENGTH if distinct_lengths == 1 else MANY_LENGTHS) * activations)


def recomputed_holes_bytes(
    architecture: Architecture, tuning: Tuning, n_tokens: int, one_layer: int, composed: int = 0
) -> int:
    """Holes where layers are recomputed: the input that a layer keeps settles in what its widest matrix had in passing.

    So the next layer needs new blocks of that size, and each layer leaves them. With DoRA they are the weights that are
    composed for a norm (`composed`, of one matrix). In the holes the backward pass finds room for the `one_layer` bytes of
    the layer that it recomputes.
    """
    widest = max(
        _passing_bytes(architecture, tuning, linear, n_tokens) for linear in architecture.layer_linears
    )
    return max(architecture.n_layers * max(widest, composed), one_layer)


def _passing_bytes(architecture: Architecture, tuning: Tuning, linear: LinearShape, n_tokens: int) -> int:
    """What one matrix builds beside its result: a block of that size where the adapter adds in place.

    PEFT's own forward over a quantized matrix has the input in fp32, the decoded weight, and the base's result, its copy,
    the update and the update scaled.
    """
    result = n_tokens * linear.n_out * tuning.compute_bytes
    if tuning.quantized and converts_input(architecture, tuning):
        decoded = linear.matrix_parameters * tuning.compute_bytes
        return 4 * result + n_tokens * linear.n_in * 4 + decoded
    return result
