"""Shapes of a decoder-only model, read from its `config.json`: no weight is loaded and torch is not imported.

Covered exactly: the Llama family and its relatives (Mistral, Qwen2, Qwen3, Gemma, Gemma 2, Gemma 3 text, Phi-3, OLMo 2,
Granite, SmolLM3), and GPT-2. The parameter counts are compared with built models in the tests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from finetune.errors import UserError, did_you_mean

MEASURE_INSTEAD = "`finetune run` trains it all the same; `finetune doctor` runs one step on its longest batch and tells what that takes"

QkNorm = Literal["none", "per_head", "full_width"]


class NoMemoryModelError(UserError):
    """Nothing can be forecast for this configuration; training it is another matter."""


@dataclass(frozen=True, slots=True)
class LinearShape:
    """One weight matrix of a layer. `reads` names the tensor it multiplies: matrices that read the same one share it."""

    name: str
    n_in: int
    n_out: int
    bias: bool
    reads: Literal["attention_input", "attention_output", "mlp_input", "mlp_middle"]

    @property
    def matrix_parameters(self) -> int:
        return self.n_in * self.n_out

    @property
    def parameters(self) -> int:
        return self.matrix_parameters + (self.n_out if self.bias else 0)


@dataclass(frozen=True, slots=True)
class Architecture:
    """A decoder: `n_layers` equal layers between an embedding and a language-model head. Sizes are element counts.

    `fused_activation` is false where the activation is written out in elementary operations, each of which keeps a
    tensor; `fp32_norm_weight` is true where the norm's weight multiplies in fp32 before the cast (Gemma); `bent_logits`
    where something follows the head's product, so that the loss needs whole logits; `transposed_matrices` where they are Conv1D modules.
    """

    model_type: str
    hidden: int
    intermediate: int
    n_heads: int
    n_kv_heads: int
    head_size: int
    n_layers: int
    vocabulary: int
    max_positions: int
    learned_positions: bool
    tied: bool
    gated: bool
    fused_activation: bool
    layer_linears: tuple[LinearShape, ...]
    norms_per_layer: int
    norm_has_bias: bool
    qk_norm: QkNorm
    residual_dropouts: int
    attention_dropout: bool
    fp32_norm_weight: bool = False
    bent_logits: bool = False
    transposed_matrices: bool = False
    fused_projections: bool = False

    @property
    def query_width(self) -> int:
        return self.n_heads * self.head_size

    @property
    def kv_width(self) -> int:
        return self.n_kv_heads * self.head_size

    @property
    def embedding_parameters(self) -> int:
        """Token and learned position embeddings, and the head when it has its own matrix."""
        positions = self.max_positions if self.learned_positions else 0
        return self.hidden * (self.vocabulary * (1 if self.tied else 2) + positions)

    @property
    def head_parameters(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def linear_parameters(self) -> int:
        """Elements of the layers' matrices: what quantization replaces and what `all-linear` adapts."""
        return self.n_layers * sum(linear.matrix_parameters for linear in self.layer_linears)

    @property
    def norm_parameters(self) -> int:
        width = self.hidden * (2 if self.norm_has_bias else 1)
        per_layer = self.norms_per_layer * width
        if self.qk_norm == "per_head":
            per_layer += 2 * self.head_size
        elif self.qk_norm == "full_width":
            per_layer += self.query_width + self.kv_width
        return self.n_layers * per_layer + width

    @property
    def bias_parameters(self) -> int:
        return self.n_layers * sum(linear.n_out for linear in self.layer_linears if linear.bias)

    @property
    def n_parameters(self) -> int:
        """All parameters, a tied head counted once."""
        return (
            self.linear_parameters + self.bias_parameters + self.norm_parameters + self.embedding_parameters
        )

    @property
    def largest_linear(self) -> int:
        return max(linear.matrix_parameters for linear in self.layer_linears)


@dataclass(frozen=True, slots=True)
class _Family:
    """What the modelling code of a family fixes and its config.json does not say."""

    tied_by_default: bool = False
    default_head_size: int | None = None
    attention_bias: Literal["from_config", "qkv", "none"] = "none"
    mlp_bias_from_config: bool = False
    norms_per_layer: int = 2
    qk_norm: QkNorm = "none"
    fused_projections: bool = False
    defaults: Mapping[str, float] = field(default_factory=dict)  # of what a file may leave out


_FAMILIES: dict[str, _Family] = {
    "llama": _Family(attention_bias="from_config", mlp_bias_from_config=True),
    "mistral": _Family(defaults={"num_key_value_heads": 8}),
    "qwen2": _Family(attention_bias="qkv", defaults={"num_key_value_heads": 32}),
    "qwen3": _Family(
        attention_bias="from_config",
        qk_norm="per_head",
        default_head_size=128,
        defaults={"num_key_value_heads": 32},
    ),
    "gemma": _Family(
        attention_bias="from_config",
        tied_by_default=True,
        default_head_size=256,
        defaults={"num_key_value_heads": 16},
    ),
    "gemma2": _Family(
        attention_bias="from_config",
        tied_by_default=True,
        default_head_size=256,
        norms_per_layer=4,
        defaults={"num_key_value_heads": 4, "final_logit_softcapping": 30.0},
    ),
    "gemma3_text": _Family(
        attention_bias="from_config",
        tied_by_default=True,
        default_head_size=256,
        norms_per_layer=4,
        qk_norm="per_head",
        defaults={"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 262_208},
    ),
    "phi3": _Family(fused_projections=True),
    "olmo2": _Family(attention_bias="from_config", qk_norm="full_width"),
    "granite": _Family(attention_bias="from_config", mlp_bias_from_config=True),
    "smollm3": _Family(
        attention_bias="from_config",
        mlp_bias_from_config=True,
        tied_by_default=True,
        defaults={"num_key_value_heads": 4},
    ),
}
_LOGIT_BENDERS = ("final_logit_softcapping", "logit_scale", "logits_scaling")
KNOWN_MODEL_TYPES = tuple(sorted([*_FAMILIES, "gpt2"]))


def read_architecture(config: Mapping[str, Any], *, where: str = "config.json") -> Architecture:
    """Shapes from a parsed config.json; a multimodal one is read by its `text_config`.

    Raises NoMemoryModelError for a model type that is not covered (a wrong forecast is worse than none), and for a missing key.
    """
    if not isinstance(config, Mapping):
        raise NoMemoryModelError(
            "it holds no keys with values", where=where, fix="take config.json from the model's own folder"
        )
    text = config.get("text_config")
    if isinstance(text, Mapping):
        config = text
    model_type = str(config.get("model_type") or "")
    if not model_type:
        raise UserError(
            "it names no model_type", where=where, fix="take config.json from the model's own folder"
        )
    if model_type == "gpt2":
        return _read_gpt2(config, where)
    if model_type not in _FAMILIES:
        raise NoMemoryModelError(
            f"no memory model for model_type '{model_type}'",
            where=where,
            why="its layers would have to be guessed, and a guessed forecast is worse than none; "
            f"known: {', '.join(KNOWN_MODEL_TYPES)}",
            fix=MEASURE_INSTEAD,
        )
    return _read_llama_like(config, model_type, _FAMILIES[model_type], where)


def _read_llama_like(config: Mapping[str, Any], model_type: str, family: _Family, where: str) -> Architecture:
    config = {**family.defaults, **config}
    hidden = _size(config, "hidden_size", where)
    intermediate = _size(config, "intermediate_size", where)
    n_heads = _size(config, "num_attention_heads", where)
    n_kv_heads = _size_or(config, "num_key_value_heads", n_heads, where)
    head_size = _size_or(config, "head_dim", family.default_head_size or hidden // n_heads, where)
    qkv_bias = family.attention_bias == "qkv" or (
        family.attention_bias == "from_config" and bool(config.get("attention_bias", False))
    )
    out_bias = qkv_bias and family.attention_bias == "from_config"
    mlp_bias = family.mlp_bias_from_config and bool(config.get("mlp_bias", False))
    query, kv = n_heads * head_size, n_kv_heads * head_size
    linears: tuple[LinearShape, ...]
    if family.fused_projections:
        linears = (
            LinearShape("qkv_proj", hidden, query + 2 * kv, qkv_bias, "attention_input"),
            LinearShape("o_proj", query, hidden, out_bias, "attention_output"),
            LinearShape("gate_up_proj", hidden, 2 * intermediate, mlp_bias, "mlp_input"),
            LinearShape("down_proj", intermediate, hidden, mlp_bias, "mlp_middle"),
        )
    else:
        linears = (
            LinearShape("q_proj", hidden, query, qkv_bias, "attention_input"),
            LinearShape("k_proj", hidden, kv, qkv_bias, "attention_input"),
            LinearShape("v_proj", hidden, kv, qkv_bias, "attention_input"),
            LinearShape("o_proj", query, hidden, out_bias, "attention_output"),
            LinearShape("gate_proj", hidden, intermediate, mlp_bias, "mlp_input"),
            LinearShape("up_proj", hidden, intermediate, mlp_bias, "mlp_input"),
            LinearShape("down_proj", intermediate, hidden, mlp_bias, "mlp_middle"),
        )
    return Architecture(
        model_type=model_type,
        hidden=hidden,
        intermediate=intermediate,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_size=head_size,
        n_layers=_size(config, "num_hidden_layers", where),
        vocabulary=_size(config, "vocab_size", where),
        max_positions=_size_or(config, "max_position_embeddings", 2048, where),
        learned_positions=False,
        tied=bool(config.get("tie_word_embeddings", family.tied_by_default)),
        gated=True,
        fused_activation=True,
        layer_linears=linears,
        norms_per_layer=family.norms_per_layer,
        norm_has_bias=False,
        qk_norm=family.qk_norm,
        residual_dropouts=0,
        attention_dropout=float(config.get("attention_dropout") or 0.0) > 0,
        fused_projections=family.fused_projections,
        fp32_norm_weight=model_type.startswith("gemma"),
        bent_logits=any(config.get(name) not in (None, 1, 1.0) for name in _LOGIT_BENDERS),
    )


def _read_gpt2(config: Mapping[str, Any], where: str) -> Architecture:
    hidden = _size(config, "n_embd", where)
    intermediate = _size_or(config, "n_inner", 4 * hidden, where)
    n_heads = _size(config, "n_head", where)
    # The original activation is written out in elementary operations, each of which keeps a tensor for the backward.
    activation = str(config.get("activation_function", "gelu_new"))
    return Architecture(
        model_type="gpt2",
        hidden=hidden,
        intermediate=intermediate,
        n_heads=n_heads,
        n_kv_heads=n_heads,
        head_size=hidden // n_heads,
        n_layers=_size(config, "n_layer", where),
        vocabulary=_size(config, "vocab_size", where),
        max_positions=_size_or(config, "n_positions", 1024, where),
        learned_positions=True,
        tied=bool(config.get("tie_word_embeddings", True)),
        gated=False,
        fused_activation=activation != "gelu_new",
        layer_linears=(
            LinearShape("c_attn", hidden, 3 * hidden, True, "attention_input"),
            LinearShape("attn.c_proj", hidden, hidden, True, "attention_output"),
            LinearShape("c_fc", hidden, intermediate, True, "mlp_input"),
            LinearShape("mlp.c_proj", intermediate, hidden, True, "mlp_middle"),
        ),
        norms_per_layer=2,
        norm_has_bias=True,
        qk_norm="none",
        residual_dropouts=2 if float(config.get("resid_pdrop", 0.1)) > 0 else 0,
        attention_dropout=float(config.get("attn_pdrop", 0.1)) > 0,
        transposed_matrices=True,
    )


def _size(config: Mapping[str, Any], key: str, where: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise NoMemoryModelError(
            f"'{key}' is {'missing' if value is None else f'{value!r}, not a positive integer'}",
            where=where,
            fix="take config.json from the model's own folder",
        )
    return value


def _size_or(config: Mapping[str, Any], key: str, default: int, where: str) -> int:
    """A size that a file may leave out or set to null; then the model's own default holds."""
    return default if config.get(key) is None else _size(config, key, where)


def adapted_linears(architecture: Architecture, target_modules: str | list[str]) -> tuple[LinearShape, ...]:
    """The matrices of one layer that an adapter with these `target_modules` sits on.

    A name matches a matrix like PEFT does: the whole name or its last dotted parts. Raises UserError for a name that
    matches nothing.
    """
    if target_modules == "all-linear":
        return architecture.layer_linears
    wanted = [target_modules] if isinstance(target_modules, str) else target_modules
    known = [linear.name for linear in architecture.layer_linears]
    for name in wanted:
        if not any(_matches(name, linear) for linear in known):
            raise UserError(
                f"no module of {architecture.model_type} is called '{name}'",
                where="adapter.target_modules",
                fix=did_you_mean(name, {linear.rsplit(".", 1)[-1] for linear in known}),
            )
    return tuple(
        linear for linear in architecture.layer_linears if any(_matches(name, linear.name) for name in wanted)
    )


def _matches(wanted: str, name: str) -> bool:
    return name == wanted or name.endswith(f".{wanted}") or wanted.endswith(f".{name}")
