"""How many elements a recipe trains, by kind of adapter, from shapes alone.

Counts of the methods: LoRA r·(in + out) a matrix; DoRA one magnitude an output more; VeRA one scale a rank and one an
output, over shared random matrices that are held but not trained (Kopiczko et al. 2024, arXiv:2310.11454); IA3 one scale
an input of the MLP's last matrix and an output of keys and values (Liu et al. 2022, arXiv:2205.05638); prompt tuning one
embedding a virtual token; prefix tuning a key and a value a virtual token and layer; BitFit the model's biases.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from finetune.plan.architecture import Architecture, LinearShape, adapted_linears
from finetune.recipe.schema import AdapterSection

# Starts that keep their first matrices beside the trained ones, so that the base stays as it is on disk.
DOUBLED_STARTS = ("pissa", "olora")
_HEADS = ("lm_head", "embed_out")
_EMBEDDINGS = ("embed_tokens", "wte", "embed_in")


@dataclass(frozen=True, slots=True)
class TrainedElements:
    """`trained` elements have a gradient and optimizer state; `held` live beside them in fp32 without either."""

    trained: int
    held: int = 0


def trained_elements(section: AdapterSection, architecture: Architecture) -> TrainedElements:
    """Elements of the adapter of `section`, modules to save included. For kind `none`: what layers and freeze leave."""
    if section.kind == "none":
        return TrainedElements(_full(section, architecture))
    n_layers = len(section.layers) if section.layers is not None else architecture.n_layers
    whole = sum(_module_elements(name, architecture) for name in section.modules_to_save)
    if section.kind == "bitfit":
        return TrainedElements(architecture.bias_parameters + _norm_biases(architecture))
    if section.kind == "prompt":
        return TrainedElements(section.virtual_tokens * architecture.hidden)
    if section.kind == "prefix":
        return TrainedElements(section.virtual_tokens * architecture.n_layers * 2 * architecture.kv_width)
    linears = adapted_linears(architecture, section.target_modules)
    if section.kind == "ia3":
        scales = sum(scaled_elements(linear) for linear in linears)
        return TrainedElements(n_layers * scales + whole)
    if section.kind == "vera":
        vectors = sum(section.rank + linear.n_out for linear in linears)
        shared = section.rank * (max(lin.n_in for lin in linears) + max(lin.n_out for lin in linears))
        return TrainedElements(n_layers * vectors + whole, shared)
    per_layer = sum(
        rank_of(section.rank_pattern, linear.name, section.rank) * (linear.n_in + linear.n_out)
        for linear in linears
    )
    magnitudes = sum(linear.n_out for linear in linears) if section.kind == "dora" else 0
    # Both halves of a doubled start lie in one tensor, and the optimizer's state is as large as that.
    doubled = 2 if section.init in DOUBLED_STARTS else 1
    return TrainedElements(n_layers * (doubled * per_layer + magnitudes) + whole)


def rank_of(pattern: Mapping[str, int], module: str, default: int) -> int:
    """The rank of a module by its short name: an entry of the pattern that ends in it, else the default."""
    short = module.rpartition(".")[2]
    return next((rank for name, rank in pattern.items() if name.rpartition(".")[2] == short), default)


def scaled_elements(linear: LinearShape) -> int:
    """Elements of an IA3 scale: inputs where the matrix reads the MLP's middle, outputs elsewhere."""
    return linear.n_in if linear.reads == "mlp_middle" else linear.n_out


def _full(section: AdapterSection, architecture: Architecture) -> int:
    """All parameters, less the layers that are not named and the modules that are frozen by a plain name."""
    total = architecture.n_parameters
    layers = architecture.linear_parameters + architecture.bias_parameters
    if section.layers is not None:
        total -= layers * (architecture.n_layers - len(section.layers)) // architecture.n_layers
    for name in section.freeze:
        total -= _module_elements(name, architecture)
    return max(total, 0)


def _module_elements(name: str, architecture: Architecture) -> int:
    """Elements of a module by its short name: embedding, head, or one matrix in every layer."""
    short = name.rpartition(".")[2]
    if short in _EMBEDDINGS:
        return architecture.head_parameters
    if short in _HEADS:
        return 0 if architecture.tied else architecture.head_parameters
    return architecture.n_layers * sum(
        linear.parameters for linear in architecture.layer_linears if linear.name.rpartition(".")[2] == short
    )


def _norm_biases(architecture: Architecture) -> int:
    if not architecture.norm_has_bias:
        return 0
    return architecture.hidden * (architecture.n_layers * architecture.norms_per_layer + 1)
