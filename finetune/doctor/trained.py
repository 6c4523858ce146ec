"""Whether what trains is what the recipe names: no more, no less, and in fp32."""

from __future__ import annotations

from typing import Any

import torch

from finetune.doctor.finding import Finding, fault, ok
from finetune.model.adapters import adapted_modules, trainable_parameters
from finetune.recipe.schema import Recipe
from finetune.units import format_count

# Parts of the names of trained tensors, by kind of adapter; what a recipe adds to them is in `_also_trained`.
_MARKS: dict[str, tuple[str, ...]] = {
    "lora": ("lora_",),
    "dora": ("lora_",),
    "vera": ("vera_",),
    "ia3": ("ia3_",),
    "prompt": ("prompt_encoder",),
    "prefix": ("prompt_encoder",),
    "bitfit": (".bias",),
}
_FORECAST_TOLERANCE = 0.01
_SHOWN = 3


def check_weights(model: Any) -> Finding:
    """Values of the weights that are no finite numbers: every loss would be none, whatever the learning rate."""
    name = "weights"
    damaged = [
        key for key, one in model.named_parameters() if one.is_floating_point() and not _is_finite(one)
    ]
    if damaged:
        return fault(
            name,
            f"{len(damaged)} tensors of the model hold values that are not finite, e.g. {damaged[0]}",
            "copy or download the model again, or take a checkpoint from before its training broke",
            where="model.id",
        )
    return ok(name, "all values are finite")


def _is_finite(tensor: torch.Tensor) -> bool:
    """Sums are finite only where every value is; a sum that overflows is looked at value by value."""
    with torch.no_grad():
        return bool(torch.isfinite(tensor.sum(dtype=torch.float32))) or bool(torch.isfinite(tensor).all())


def gradients_cut(how: str) -> Finding:
    """The graph is cut between the loss and what trains, or a part of it; `how`: what the training said."""
    return fault(
        "gradients",
        how,
        "look for a detach or no_grad in the model's own code, and try train.gradient_checkpointing: false; parts that take no "
        "part in an answer (a vision tower, say) are left out by adapter.target_modules, adapter.layers or adapter.freeze",
        where="model.id",
    )


def check_trained(recipe: Recipe, model: Any, forecast_elements: int | None) -> Finding:
    """The trainable parameters of `model` against the adapter section and the number that the forecast counts on, if any."""
    name, section = "trained part", recipe.adapter
    trained = trainable_parameters(model)
    n_trained = sum(parameter.numel() for parameter in trained.values())
    n_all = sum(parameter.numel() for parameter in model.parameters())
    if not n_trained:
        return fault(name, "nothing trains", "look at adapter.layers and adapter.freeze", where="adapter")
    marks = (*_MARKS.get(section.kind, ()), *_also_trained(recipe))
    strange = (
        [] if section.kind == "none" else [one for one in trained if not any(mark in one for mark in marks)]
    )
    if strange:
        return fault(
            name,
            f"{len(strange)} tensors train that adapter.kind {section.kind} does not name, e.g. {', '.join(strange[:_SHOWN])}",
            "this is a fault of the adapter's attachment: name the modules in adapter.target_modules",
            where="adapter",
        )
    if missing := _targets_without(recipe, model):
        return fault(
            name,
            f"no adapter sits on {', '.join(missing)}",
            "correct adapter.target_modules; `finetune plan` lists the modules",
            where="adapter.target_modules",
        )
    halves = [one for one, parameter in trained.items() if parameter.dtype != torch.float32]
    if halves and section.kind != "none":
        return fault(
            name,
            f"{len(halves)} trained tensors are in half precision, where most updates round to nothing",
            "leave the trained part in fp32",
            where="adapter",
        )
    said = f"{format_count(n_trained)} of {format_count(n_all)} parameters ({n_trained / n_all:.2%})"
    if section.kind in ("lora", "dora", "vera", "ia3"):
        said += " in " + ", ".join(f"{module} × {times}" for module, times in adapted_modules(model).items())
    if (
        forecast_elements is not None
        and _is_counted(recipe)
        and abs(n_trained - forecast_elements) > _FORECAST_TOLERANCE * forecast_elements
    ):
        return fault(
            name,
            f"{said}; the recipe's shapes make {format_count(forecast_elements)}",
            "an adapter that trains another number of parameters than its rank says is attached wrongly",
            where="adapter",
        )
    return ok(name, said)


def _is_counted(recipe: Recipe) -> bool:
    """Whether shapes alone say how much trains: not with a head or tokens that are new, nor with ranks that are measured,
    nor where another run chose the modules."""
    section = recipe.adapter
    if section.kind == "none":
        return section.layers is None and not section.freeze
    added = recipe.model.new_tokens or recipe.train.method == "reward"
    return not added and section.init != "eva" and section.start is None


def _also_trained(recipe: Recipe) -> tuple[str, ...]:
    section = recipe.adapter
    saved = section.modules_to_save or section.start is not None or recipe.train.method == "reward"
    added = ["modules_to_save"] if saved else []
    return (*added, "trainable_tokens") if recipe.model.new_tokens else tuple(added)


def _targets_without(recipe: Recipe, model: Any) -> list[str]:
    """Named targets that no adapted module ends in."""
    targets = recipe.adapter.target_modules
    if (
        isinstance(targets, str)
        or recipe.adapter.start
        or recipe.adapter.kind not in ("lora", "dora", "vera", "ia3")
    ):
        return []
    adapted = adapted_modules(model)
    return [target for target in targets if target.rpartition(".")[2] not in adapted]
