"""Full tuning of a part of the model: layers that train, modules that stay."""

from __future__ import annotations

from torch import nn

from finetune.errors import UserError
from finetune.model.adapter_targets import frozen_module_names, layer_container, layer_prefixes
from finetune.recipe.adapter_section import AdapterSection


def freeze_parts(model: nn.Module, section: AdapterSection) -> int:
    """For adapter.kind none: freeze the layers that are not named and the modules that are; returns the tensors frozen.

    Raises UserError for names and layers that are not there, and when nothing is left to train.
    """
    if section.layers is None and not section.freeze:
        return 0
    named = frozen_module_names(model, section.freeze)
    # By identity: a tied head has no parameter of its own name.
    stay = {id(parameter) for name in named for parameter in model.get_submodule(name).parameters()}
    layers, kept = "", []
    if section.layers is not None:
        layers = f"{layer_container(model)[0]}."
        kept = [f"{prefix}." for prefix in layer_prefixes(model, section.layers)]
    frozen = 0
    for name, parameter in model.named_parameters():
        outside = bool(layers) and name.startswith(layers) and not name.startswith(tuple(kept))
        if outside or id(parameter) in stay:
            parameter.requires_grad_(False)
            frozen += 1
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UserError("nothing is left to train", where="adapter.freeze", fix="freeze fewer modules")
    return frozen
