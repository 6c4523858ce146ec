"""A student cut from its teacher: embeddings, last norm and head as they are, and some of the layers.

Deep models repeat themselves: a student that starts from every third layer of its teacher learns in a fraction of the
steps of one that starts from nothing (Sanh et al. 2019, DistilBERT, arXiv:1910.01108; Shleifer & Rush 2020,
arXiv:2010.13002).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from finetune.errors import UserError
from finetune.model.adapter_targets import layer_container


def cut_layers(model: Any, layers: Sequence[int]) -> Any:
    """`model` with these layers only, in their order; it is changed in place, and its configuration with it.

    layers: counted from 0, ascending. Weights are not copied. Raises UserError for a layer that is not there, and where
    nothing would be cut.
    """
    container, n_layers = layer_container(model)
    outside = [layer for layer in layers if not 0 <= layer < n_layers]
    if outside:
        raise UserError(
            f"the teacher has no layer {outside[0]}; it has {n_layers}",
            where="distil.student.init",
            fix=f"name layers from 0 to {n_layers - 1}",
        )
    if len(layers) == n_layers:
        raise UserError(
            f"the student would have all {n_layers} layers of its teacher and be the same model",
            where="distil.student.init",
            fix="leave some layers out",
        )
    parent, _, name = container.rpartition(".")
    kept: list[Any] = [model.get_submodule(f"{container}.{layer}") for layer in layers]
    setattr(model.get_submodule(parent), name, nn.ModuleList(kept))
    _renumber(kept)
    config = model.config.get_text_config()
    for key, value in config.to_dict().items():
        if (
            isinstance(value, list) and len(value) == n_layers
        ):  # what is said of every layer, such as layer_types
            setattr(config, key, [value[layer] for layer in layers])
    config.num_hidden_layers = len(layers)
    return model


def _renumber(layers: Sequence[nn.Module]) -> None:
    """A layer knows its number, by which it finds its place in the cache of keys and values."""
    for number, layer in enumerate(layers):
        for module in layer.modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx = number  # type: ignore[assignment]
