"""Fewer bytes between forward and backward: what is recomputed, what moves to the host, and the model's own dropout."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from finetune.model.adapters import without_adapters
from finetune.recipe.schema import TrainSection

_aten = torch.ops.aten
# Products and attention: most of the time of a forward pass, and the results of them a small part of what it keeps.
_KEPT = [
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
]
_DROPOUTS = (
    "attention_dropout",
    "attn_pdrop",
    "resid_pdrop",
    "resid_dropout",
    "embd_pdrop",
    "embedding_dropout",
    "hidden_dropout",
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
    "activation_dropout",
    "dropout",
)
# Other random numbers that a model draws in training: experts chosen under noise, layers that are skipped.
_NOISES = ("router_jitter_noise", "input_jitter_noise", "moe_jitter_eps", "layerdrop")
_DROPOUTS_OF_MODULES = ("attn_dropout", "attn_dropout_p", "dropout_p", "dropout_prob", "residual_dropout")


def keep_products() -> Any:
    """Contexts for torch.utils.checkpoint that keep the results of products and recompute the rest."""
    make: Any = create_selective_checkpoint_contexts  # torch leaves it untyped
    return make(_KEPT)


def checkpointing_arguments(settings: TrainSection) -> dict[str, Any]:
    """The two arguments of transformers' trainer that decide what is recomputed."""
    if not settings.gradient_checkpointing:
        return {"gradient_checkpointing": False, "gradient_checkpointing_kwargs": None}
    options: dict[str, Any] = {"use_reentrant": False}
    if settings.gradient_checkpointing == "selective":
        options["context_fn"] = keep_products
    return {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": options}


def keeps_in_place_products(settings: TrainSection) -> bool:
    """Whether a product's result may be added to in place: a kept one must stay what it was when it is used again."""
    return settings.gradient_checkpointing != "selective"


def offload_context(model: nn.Module, settings: TrainSection) -> Any:
    """Around a training step: activations wait in the host's memory (TRL's, with its own streams), or nothing."""
    if not settings.activation_offload:
        return contextlib.nullcontext()
    from trl.models import get_act_offloading_ctx_manager

    return get_act_offloading_ctx_manager(model=model, warn_if_no_head=False)


def set_model_dropout(model: Any, share: float | None) -> dict[str, float]:
    """Set every dropout of the model itself, not of its adapters; returns what its configuration said before, by key. None
    leaves them.

    Models read their share from a module of its own, from an attribute of the module, or from the configuration.
    """
    if share is None:
        return {}
    base = without_adapters(model)
    config = base.config.get_text_config()
    before = {name: float(getattr(config, name)) for name in _DROPOUTS if _is_share(config, name)}
    for name in before:
        setattr(config, name, share)
    for qualified, module in base.named_modules():
        if "lora_dropout" in qualified or "vera_dropout" in qualified:
            continue
        if isinstance(module, nn.Dropout):
            module.p = share
        for name in (*_DROPOUTS, *_DROPOUTS_OF_MODULES):
            if _is_share(module, name):
                setattr(module, name, share)
    return before


def drops_out(model: Any) -> bool:
    """Whether training draws random numbers anywhere in the model, its adapters included: dropout, noise, skipped layers."""
    base = without_adapters(model)
    if config_drops_out(base.config):
        return True
    names = (*_DROPOUTS_OF_MODULES, *_NOISES)
    return any(
        (isinstance(module, nn.Dropout) and module.p > 0) or _any_share(module, names)
        for module in model.modules()
    )


def config_drops_out(config: Any) -> bool:
    """The same as far as a model's configuration says."""
    return _any_share(config.get_text_config(), (*_DROPOUTS, *_NOISES))


@contextlib.contextmanager
def dropout_of_config(model: Any, values: Mapping[str, float]) -> Iterator[None]:
    """The configuration with `values`, as `set_model_dropout` returned them: a saved model is not to keep a training's."""
    base = without_adapters(model)
    config = base.config.get_text_config()
    now = {name: getattr(config, name) for name in values}
    try:
        for name, value in values.items():
            setattr(config, name, value)
        yield
    finally:
        for name, value in now.items():
            setattr(config, name, value)


def _is_share(holder: Any, name: str) -> bool:
    value = getattr(holder, name, None)
    return isinstance(value, float) or (isinstance(value, int) and not isinstance(value, bool))


def _any_share(holder: Any, names: Iterable[str]) -> bool:
    return any(_is_share(holder, name) and getattr(holder, name) > 0 for name in names)
