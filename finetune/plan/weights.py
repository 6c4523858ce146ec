"""Bytes of a model that is not trained: its weights as they are held, and what a pass without gradients keeps of a token."""

from __future__ import annotations

from finetune.plan.architecture import Architecture
from finetune.plan.states import Quantization, quantized_bytes


def weight_terms(
    architecture: Architecture, weight_bytes: int, quantize: Quantization, double_quantization: bool
) -> dict[str, int]:
    """Weights and quantization constants; embeddings, head, norms and biases are never quantized."""
    if quantize == "none":
        return {"weights": architecture.n_parameters * weight_bytes, "quantization_constants": 0}
    blocks, constants = quantized_bytes(
        architecture.layer_linears, quantize, double_quantization=double_quantization
    )
    left = architecture.n_parameters - architecture.linear_parameters
    return {
        "weights": architecture.n_layers * blocks + left * weight_bytes,
        "quantization_constants": architecture.n_layers * constants,
    }


def forward_bytes(architecture: Architecture, c: int) -> int:
    """Bytes a token alive at once in one layer without gradients: residual, norm in fp32, and the MLP's branches."""
    norm = architecture.hidden * (c + 4 + 4)
    attention = architecture.hidden * c + (3 * architecture.query_width) * c
    mlp = architecture.hidden * 2 * c + (3 if architecture.gated else 2) * architecture.intermediate * c
    return max(norm, attention, mlp)
