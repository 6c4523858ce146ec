"""Which modules of a model a recipe's adapter section means; every name is checked before a weight is loaded.

PEFT ignores a misspelt target as long as another one matches, an unmatched rank pattern, and a module to save that does not
exist. Here each is a fault with the nearest name. All functions work on a skeleton without weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn

from finetune.errors import Fault, UserError, did_you_mean
from finetune.model.reward import SCORE_HEAD
from finetune.recipe.adapter_section import TARGETED, AdapterSection

ALL_LINEAR = "all-linear"
# Layers of state-space models whose weights are read past whatever is wrapped around them: `out_proj` by fused kernels (what
# PEFT refuses), `dt_proj` of the first Mamba by the model's own code. By config.json's model_type.
_READ_PAST = {
    "mamba": ("out_proj", "dt_proj"),
    "falcon_mamba": ("out_proj", "dt_proj"),
    "mamba2": ("out_proj",),
    "falcon_h1": ("out_proj",),
    "nemotron_h": ("out_proj",),
}
_FROM_COMPONENTS = ("pissa", "olora", "loftq", "eva")

# What a module is that no adapter can be on, and why.
_NOT_LINEAR = ("which is not a linear layer", "")
_HEAD = (
    "the output head",
    "the loss never builds the head's full output, so an adapter there would not be trained",
)
_PAST = (
    "a part of a state-space layer",
    "its weights are read past an adapter, which would not be trained, or not be used",
)


def target_module_names(model: nn.Module, targets: str | list[str]) -> dict[str, list[str]]:
    """Target -> qualified names of the linear layers it selects.

    A target selects the modules whose name is it or ends in '.' and it. 'all-linear' is every linear layer but the
    output head and those whose weights a state-space model reads by itself. Raises UserError with all faults: targets that select
    nothing (with the nearest name), that select something that is not a linear layer, one of those that 'all-linear' leaves out.
    """
    head = _head_of(model)
    modules = dict(model.named_modules())
    past = _read_past_adapters(model)
    linear = {
        name: module
        for name, module in modules.items()
        if _is_linear(module) and module is not head and name not in past
    }
    if isinstance(targets, str):
        if targets != ALL_LINEAR:
            targets = [targets]
        elif not linear:
            raise UserError("the model has no linear layer to adapt", where="adapter.target_modules")
        else:
            selected: dict[str, list[str]] = {}
            for name in linear:
                selected.setdefault(name.rpartition(".")[2], []).append(name)
            return selected
    known = sorted({name.rpartition(".")[2] for name in linear})
    faults: list[Fault] = []
    chosen: dict[str, list[str]] = {}
    for target in targets:
        names = named_by(target, modules)
        wrong = [name for name in names if name not in linear]
        if not names:
            faults.append(
                Fault(
                    f"'{target}' matches no module of the model",
                    "adapter.target_modules",
                    "PEFT ignores such a name as long as another one matches",
                    did_you_mean(target, known),
                )
            )
        elif wrong:
            what, why = _PAST if wrong[0] in past else _HEAD if modules[wrong[0]] is head else _NOT_LINEAR
            faults.append(
                Fault(
                    f"'{target}' selects {wrong[0]}, {what}",
                    "adapter.target_modules",
                    why,
                    f"choose among: {', '.join(known)}",
                )
            )
        else:
            chosen[target] = names
    if not targets:
        faults.append(Fault("no target modules are named", "adapter.target_modules", "", f"use {ALL_LINEAR}"))
    if faults:
        raise UserError(faults)
    return chosen


def _read_past_adapters(model: nn.Module) -> set[str]:
    """Linear layers whose output no adapter changes."""
    names = [name for name, _ in model.named_modules()]
    own = _READ_PAST.get(str(getattr(getattr(model, "config", None), "model_type", "")), ())
    return {name for part in own for name in named_by(part, names)}


def selected_modules(model: nn.Module, section: AdapterSection) -> dict[str, list[str]]:
    """`target_module_names` of a section, restricted to its `layers`. Raises UserError when nothing is left."""
    chosen = target_module_names(model, section.target_modules)
    if section.layers is None:
        return chosen
    prefixes = tuple(f"{prefix}." for prefix in layer_prefixes(model, section.layers))
    inside = {
        target: [name for name in names if name.startswith(prefixes)] for target, names in chosen.items()
    }
    empty = [target for target, names in inside.items() if not names]
    if empty:
        raise UserError(
            f"'{empty[0]}' has no module in layers {section.layers}",
            where="adapter.layers",
            fix="name layers that hold it, or leave the target out",
        )
    return inside


def check_adapter(model: nn.Module, section: AdapterSection, *, quantized: bool = False) -> None:
    """Every name and index of the section against the model; raises UserError with all faults at once.

    `quantized` says that the layers of a skeleton will be loaded as codes.
    """
    faults: list[Fault] = []

    def attempt(check: Callable[[], Any]) -> None:
        try:
            check()
        except UserError as error:
            faults.extend(error.faults)

    if section.kind in TARGETED:
        attempt(lambda: target_module_names(model, section.target_modules))
        attempt(lambda: _check_patterns(model, section))
        attempt(lambda: saved_module_names(model, section.modules_to_save, quantized=quantized))
    if section.layers is not None:
        attempt(lambda: layer_prefixes(model, section.layers or []))
    if section.kind == "none":
        attempt(lambda: frozen_module_names(model, section.freeze))
    if section.kind == "bitfit" and not any(name.endswith(".bias") for name, _ in model.named_parameters()):
        faults.append(
            Fault(
                "the model has no biases, so bitfit would train nothing",
                "adapter.kind",
                "models of the Llama family have none",
                "use adapter.kind: ia3 or vera for as small an adapter",
            )
        )
    if section.init == "orthogonal":
        ranks = {section.rank, *section.rank_pattern.values()}
        if odd := sorted(rank for rank in ranks if rank % 2):
            faults.append(
                Fault(
                    f"init orthogonal needs even ranks, not {odd[0]}", "adapter.rank", "", "use an even rank"
                )
            )
    if faults:
        raise UserError(faults)
    if section.init in _FROM_COMPONENTS:
        _check_components(model, section)
    if section.kind in TARGETED:
        _check_left_to_adapt(model, section, quantized=quantized)


def sizes_and_ranks(model: nn.Module, section: AdapterSection) -> dict[str, tuple[int, int, int]]:
    """Qualified name of every adapted module -> its inputs, its outputs, and its rank in the recipe's terms."""
    modules = dict(model.named_modules())
    found = {}
    for name in [name for names in selected_modules(model, section).values() for name in names]:
        layer: Any = modules[name]
        n_in, n_out = (
            (layer.in_features, layer.out_features) if hasattr(layer, "in_features") else layer.weight.shape
        )
        own = [rank for pattern, rank in section.rank_pattern.items() if named_by(pattern, [name])]
        found[name] = (int(n_in), int(n_out), own[0] if own else section.rank)
    return found


def _check_components(model: nn.Module, section: AdapterSection) -> None:
    """A start from components of a matrix, or of a layer's inputs, needs as many as the rank."""
    for name, (n_in, n_out, rank) in sizes_and_ranks(model, section).items():
        # The search for directions of inputs looks at twice as many as it takes.
        there = n_in // 2 if section.init == "eva" else min(n_in, n_out)
        if rank > there:
            raise UserError(
                f"init {section.init} finds {there} components for {name}, a {n_out} x {n_in} matrix, and the rank is {rank}",
                where="adapter.rank_pattern" if rank != section.rank else "adapter.rank",
                fix="lower adapter.rank, or set adapter.rank_pattern for the small modules",
            )


def _check_left_to_adapt(model: nn.Module, section: AdapterSection, *, quantized: bool) -> None:
    """Modules inside one that is trained whole carry no adapter; of every target that is named one has to be left."""
    whole = saved_module_names(model, section.modules_to_save, quantized=quantized)
    chosen = selected_modules(model, section)

    def holder(name: str) -> str:
        return next((one for one in whole if name == one or name.startswith(f"{one}.")), "")

    lost = {target: holder(names[0]) for target, names in chosen.items() if all(map(holder, names))}
    if section.target_modules != ALL_LINEAR and lost:
        why = "PEFT puts no adapter inside of a module that is trained whole"
        fix = "take it out of adapter.target_modules, or the module out of adapter.modules_to_save"
        raise UserError(
            [
                Fault(
                    f"'{target}' is or lies inside {one}, which is to be trained whole",
                    "adapter.target_modules",
                    why,
                    fix,
                )
                for target, one in lost.items()
            ]
        )
    if len(lost) == len(chosen):
        raise UserError(
            f"every linear layer lies inside {', '.join(whole[:3])}, to be trained whole: no adapter is left",
            where="adapter.modules_to_save",
            fix="name smaller modules, or tune all weights with adapter.kind: none",
        )


def saved_module_names(model: nn.Module, names: Iterable[str], *, quantized: bool = False) -> list[str]:
    """Qualified names of the modules that are trained whole; every name must match, and have floating-point weights."""
    modules = dict(model.named_modules())
    faults, found = [], []
    for name in names:
        matched = [
            module for module in named_by(name, modules) if any(True for _ in modules[module].parameters())
        ]
        if not matched:
            known = sorted(
                {module.rpartition(".")[2] for module in modules if module and not module[-1].isdigit()}
            )
            faults.append(
                Fault(
                    f"'{name}' matches no module with weights",
                    "adapter.modules_to_save",
                    "PEFT would train nothing for it, without a word",
                    did_you_mean(name, known),
                )
            )
        head = _head_of(model)
        coded = [
            module
            for module in matched
            if type(modules[module]).__name__ in ("Linear4bit", "Linear8bitLt")
            or (quantized and _is_linear(modules[module]) and modules[module] is not head)
        ]
        if coded:
            faults.append(
                Fault(
                    f"'{name}' selects {coded[0]}, whose weights are quantized and cannot be trained whole",
                    "adapter.modules_to_save",
                    "",
                    "leave it out, or set model.quantize: none",
                )
            )
        found += matched
    if faults:
        raise UserError(faults)
    return sorted(set(found))


def frozen_module_names(model: nn.Module, names: Iterable[str]) -> list[str]:
    """Qualified names of the modules whose weights stay in full tuning; every name must match."""
    modules = dict(model.named_modules())
    faults, found = [], []
    for name in names:
        matched = named_by(name, modules)
        if not matched:
            known = sorted(
                {module.rpartition(".")[2] for module in modules if module and not module[-1].isdigit()}
            )
            faults.append(
                Fault(
                    f"'{name}' matches no module of the model",
                    "adapter.freeze",
                    "",
                    did_you_mean(name, known),
                )
            )
        found += matched
    if faults:
        raise UserError(faults)
    return sorted(set(found))


def layer_prefixes(model: nn.Module, layers: Iterable[int]) -> list[str]:
    """Qualified names of these layers; negative numbers count from the end. Raises UserError for one that is not there."""
    container, n_layers = layer_container(model)
    indices = [index + n_layers if index < 0 else index for index in layers]
    outside = [given for given, index in zip(layers, indices, strict=True) if not 0 <= index < n_layers]
    if outside:
        raise UserError(
            f"there is no layer {outside[0]}; the model has {n_layers}",
            where="adapter.layers",
            fix=f"use 0 to {n_layers - 1}, or -1 to -{n_layers} from the end",
        )
    return [f"{container}.{index}" for index in sorted(set(indices))]


def named_by(target: str, names: Iterable[str]) -> list[str]:
    """The names that are `target` or end in '.' and it."""
    return [name for name in names if name == target or name.endswith(f".{target}")]


def suffixes_that_select(model: nn.Module, wanted: Iterable[str], targets: Iterable[str]) -> list[str]:
    """The shortest list that PEFT turns into exactly `wanted`: the targets, or full names where a target hits more."""
    exactly, short = set(wanted), sorted(targets)
    reached = {name for name, _ in model.named_modules() if any(named_by(target, [name]) for target in short)}
    return short if reached == exactly else sorted(exactly)


def _check_patterns(model: nn.Module, section: AdapterSection) -> None:
    """Names of rank and alpha patterns must hit an adapted module."""
    try:
        adapted = {name for names in selected_modules(model, section).values() for name in names}
    except UserError:
        return  # said already
    known = sorted({name.rpartition(".")[2] for name in adapted})
    faults = [
        Fault(
            f"'{name}' matches no adapted module",
            f"adapter.{key}",
            "PEFT would use the common value for all, without a word",
            did_you_mean(name, known),
        )
        for key, pattern in (("rank_pattern", section.rank_pattern), ("alpha_pattern", section.alpha_pattern))
        for name in _names_of(pattern)
        if not named_by(name, adapted)
    ]
    if faults:
        raise UserError(faults)


def _names_of(pattern: Mapping[str, Any]) -> list[str]:
    return list(pattern)


def layer_container(model: nn.Module) -> tuple[str, int]:
    """Name and length of the list of decoder layers: the outermost of the longest lists of modules."""
    lists = [
        (name, len(module)) for name, module in model.named_modules() if isinstance(module, nn.ModuleList)
    ]
    if not lists:
        raise UserError(
            "the model holds no list of layers", where="adapter.layers", fix="leave out adapter.layers"
        )
    return min(lists, key=lambda entry: (entry[0].count("."), -entry[1]))


def _head_of(model: nn.Module) -> nn.Module | None:
    """The head of a language model, or that of a reward model, which is trained whole."""
    head: nn.Module | None = getattr(model, "get_output_embeddings", lambda: None)()
    return head if head is not None else getattr(model, SCORE_HEAD, None)


def _is_linear(module: nn.Module) -> bool:
    """Plain and bitsandbytes linear layers, and GPT-2's transposed ones."""
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
