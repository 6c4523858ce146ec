"""Read a merge recipe or a mergekit file, and report at once everything in it that cannot be done, with its line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

from finetune.errors import Fault
from finetune.recipe.fit import PlacedFault, fit
from finetune.recipe.merge_methods import METHOD_RULES
from finetune.recipe.merge_section import MergeRecipe, Parameters
from finetune.recipe.nodes import DEFAULT, Entry, Mapping, Node, Origin, Scalar, from_plain
from finetune.recipe.nodes import Sequence as ListNode
from finetune.recipe.overrides import apply_overrides, parse_overrides
from finetune.recipe.yaml_loader import raise_faults, read_tree

_ELSEWHERE = {
    "modules": "models of several modules are not merged here: merge the language model by itself",
    "tokens": "sources of single tokens are not read here: delete the key, every token then gets the row of the base, "
    "or of the models that have it",
    "residual_weight": "mergekit reads this key and ignores it: delete it",
    "base": "base_model",
    "method": "merge_method",
    "lora": "merge the adapter first: finetune merge adapter",
    "merge_method": "merge_method",
}


Key = tuple[str | int, ...]


class Refuse(Protocol):
    def __call__(self, key: Key, what: str, *, fix: str = "") -> None: ...


@dataclass(frozen=True, slots=True)
class LoadedMerge:
    """A recipe that can be done, its file, and what it says that has no effect."""

    recipe: MergeRecipe
    path: Path
    remarks: tuple[str, ...] = ()


def load_merge(
    path: Path,
    *,
    overrides: Sequence[str] = (),
    base: str | None = None,
    models: Sequence[str] = (),
    weights: Sequence[float] | None = None,
) -> LoadedMerge:
    """Read `path`; `base` and `models` (from flags), with one of `weights` each, replace what the file names. Raises
    UserError with every fault."""
    root, faults = read_tree(path)
    parsed, override_faults = parse_overrides(overrides)
    root = _named(apply_overrides(root, parsed), base, models, weights)
    value, placed = fit(root, MergeRecipe, _ELSEWHERE)
    remarks: list[str] = []
    if value is not None:
        recipe = cast(MergeRecipe, value)
        found, remarks = _check(recipe, root)
        placed = [*placed, *found]
    raise_faults([*faults, *override_faults], placed)
    return LoadedMerge(cast(MergeRecipe, value), path, tuple(remarks))


def method_of(root: Mapping) -> str:
    """What the tree of a merge recipe names as its method; empty where it names none, which reading it tells."""
    entry = root.entries.get("merge_method")
    return entry.node.text if entry is not None and isinstance(entry.node, Scalar) else ""


def stand_ins(path: Path, overrides: Sequence[str] = ()) -> tuple[str | None, list[str]]:
    """A base and models for a recipe that names none, as many as its method takes; nothing for one that names its own."""
    root = apply_overrides(read_tree(path)[0], parse_overrides(overrides)[0])
    if "models" in root.entries or "slices" in root.entries:
        return None, []
    rule = METHOD_RULES.get(method_of(root))
    low, high = rule.n_models if rule is not None else (1, 1)
    return (None if "base_model" in root.entries else "base"), ["one", "two"][: min(max(low, 2), high)]


def _named(
    root: Mapping, base: str | None, models: Sequence[str], weights: Sequence[float] | None
) -> Mapping:
    entries = dict(root.entries)
    if base is not None:
        entries["base_model"] = Entry(from_plain(base, Origin("set", "--base")), DEFAULT)
    if models:
        origin = Origin("set", "--model")
        named: list[dict[str, Any]] = [{"model": model} for model in models]
        for entry, weight in zip(named, weights or (), strict=weights is not None):
            entry["parameters"] = {"weight": weight}
        entries["models"] = Entry(from_plain(named, origin), origin)
    return Mapping(entries, root.origin)


def _check(recipe: MergeRecipe, root: Mapping) -> tuple[list[PlacedFault], list[str]]:
    """Faults of a recipe whose keys are all known, and remarks."""
    faults: list[PlacedFault] = []

    def refuse(key: Key, what: str, *, fix: str = "") -> None:
        origin = _origin(root, key)
        faults.append((origin, Fault(what, str(origin), fix=fix)))

    rule = METHOD_RULES[recipe.merge_method]
    if recipe.spoken == "peft" and not rule.has_peft:
        known = ", ".join(name for name, entry in METHOD_RULES.items() if entry.has_peft)
        refuse(
            ("dialect",),
            f"PEFT has no {recipe.merge_method} of whole deltas",
            fix=f"peft is known for {known}",
        )
    if (recipe.models is None) == (recipe.slices is None):
        both = recipe.models is not None
        what = "a recipe has models or slices, not both" if both else "the recipe names no models"
        refuse(("slices",) if both else (), what, fix="write models: or slices:, or name them with --model")
    if recipe.tokenizer and recipe.tokenizer_source:
        refuse(
            ("tokenizer_source",), "tokenizer and tokenizer_source say the same thing", fix="keep one of them"
        )
    remarks = _check_parameters(recipe, refuse)
    _check_inputs(recipe, refuse)
    return faults, remarks


def _check_inputs(recipe: MergeRecipe, refuse: Refuse) -> None:
    rule = METHOD_RULES[recipe.merge_method]
    low, high = rule.n_models
    groups: list[tuple[Key, list[str], str | None]] = []
    if recipe.models is not None:
        listed = recipe.base_model in (None, *(entry.model for entry in recipe.models))
        counts = (
            recipe.merge_method == "linear" and recipe.spoken == "mergekit"
        )  # karcher has no weights there
        if counts and not listed and recipe.parameters.weight is None:
            refuse(
                ("base_model",),
                "mergekit counts the base_model among the models of linear, and it has no weight here",
                fix="list it under models with a weight, or leave base_model out",
            )
        groups.append((("models",), [entry.model for entry in recipe.models], recipe.base_model))
    for i, piece in enumerate(recipe.slices or []):
        names = [source.model for source in piece.sources]
        groups.append((("slices", i, "sources"), names, piece.base_model or recipe.base_model))
        lengths = {source.layer_range[1] - source.layer_range[0] for source in piece.sources}
        if len(lengths) > 1 or min(lengths) < 1:
            refuse(
                ("slices", i, "sources"), "the sources of a slice must have equally many layers, at least one"
            )
    for key, names, base in groups:
        if rule.base in ("deltas", "end") and base is None:
            refuse(key, f"{recipe.merge_method} needs a base_model", fix="name it with base_model or --base")
        others = names if rule.base in ("input", "unused") else [name for name in names if name != base]
        if not low <= len(others) <= high:
            wanted = str(low) if low == high else f"at least {low}"
            beside = "" if rule.base in ("input", "unused") else " beside the base"
            refuse(
                key,
                f"{recipe.merge_method} merges {wanted} model{'s' * (wanted != '1')}{beside}, not {len(others)}",
            )


def _check_parameters(recipe: MergeRecipe, refuse: Refuse) -> list[str]:
    """Parameters that the method does not read: faults in our recipes, remarks where mergekit would ignore them."""
    rule = METHOD_RULES[recipe.merge_method]
    remarks = []
    for key, scope, is_model in _scopes(recipe):
        for name in scope.given:
            place = (*key, name)
            if name not in rule.reads:
                what = f"{recipe.merge_method} does not read '{name}'"
                if recipe.merge == 1:
                    refuse(place, what, fix=f"it reads {', '.join(sorted(rule.reads)) or 'nothing'}")
                elif name != "int8_mask":
                    remarks.append(f"{what}; it has no effect, as in mergekit")
            elif is_model and name in rule.shared:
                refuse(place, f"'{name}' is one for all models", fix="write it under the recipe's parameters")
    return list(dict.fromkeys(remarks))


def _scopes(recipe: MergeRecipe) -> Iterator[tuple[Key, Parameters, bool]]:
    yield ("parameters",), recipe.parameters, False
    for i, entry in enumerate(recipe.models or []):
        yield ("models", i, "parameters"), entry.parameters, True
    for i, piece in enumerate(recipe.slices or []):
        yield ("slices", i, "parameters"), piece.parameters, False
        for j, source in enumerate(piece.sources):
            yield ("slices", i, "sources", j, "parameters"), source.parameters, True


def _origin(root: Mapping, key: Key) -> Origin:
    """The place of the deepest node on the way to `key`."""
    node: Node = root
    origin = root.origin
    for part in key:
        if isinstance(node, Mapping) and part in node.entries:
            entry = node.entries[str(part)]
            node, origin = entry.node, entry.origin
        elif isinstance(node, ListNode) and isinstance(part, int) and part < len(node.items):
            node = node.items[part]
            origin = node.origin
        else:
            break
    return origin
