"""A parameter of a merge for one tensor: scopes, filters and gradients, as mergekit files mean them."""

from __future__ import annotations

from collections.abc import Iterable

from finetune.recipe.merge_section import Conditional, MergeRecipe, Parameters, Setting, Value


def lookup(name: str, scopes: Iterable[Parameters], tensor: str, position: float) -> Value | None:
    """The first scope that has a value for this tensor decides. `position` runs from 0 (first layer) to 1 (last)."""
    for scope in scopes:
        setting = scope.get(name)
        value = None if setting is None else evaluate(setting, tensor, position)
        if value is not None:
            return value
    return None


def evaluate(setting: Setting, tensor: str, position: float) -> Value | None:
    """A plain value, a point of a gradient, or the first conditional whose filter the tensor's name contains."""
    if isinstance(setting, Conditional):
        setting = [setting]
    if not isinstance(setting, list):
        return setting
    plain = [entry for entry in setting if not isinstance(entry, Conditional)]
    if len(plain) == len(setting):
        return _on_gradient(plain, position) if plain else None
    for entry in setting:
        if not isinstance(entry, Conditional):
            return entry
        if entry.filter in (None, "*") or str(entry.filter) in tensor:
            value = entry.value
            return _on_gradient(value, position) if isinstance(value, list) else value
    return None


def filters_in(recipe: MergeRecipe) -> list[str]:
    """Every filter of a recipe once; those that fit all tensors are left out."""
    scopes = [recipe.parameters, *(entry.parameters for entry in recipe.models or [])]
    for piece in recipe.slices or []:
        scopes += [piece.parameters, *(source.parameters for source in piece.sources)]
    settings = [scope.get(name) for scope in scopes for name in scope.given]
    entries = [entry for found in settings for entry in (found if isinstance(found, list) else [found])]
    texts = [entry.filter for entry in entries if isinstance(entry, Conditional)]
    return list(dict.fromkeys(text for text in texts if text not in (None, "*")))


def _on_gradient(values: list[Value], position: float) -> Value | None:
    """Piecewise linear between evenly spaced numbers; true and false switch instead."""
    if not values:
        return None
    scaled = position * (len(values) - 1)
    left = int(scaled)
    if any(isinstance(value, bool) for value in values):
        return values[left]
    right = min(left + 1, len(values) - 1)
    share = scaled - left
    return (1 - share) * values[left] + share * values[right]
