"""What a recipe really says: every key with its value, where the value comes from, and what the key means."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from finetune.recipe.annotations import fields_of
from finetune.recipe.nodes import DEFAULT, Origin
from finetune.recipe.resolve import RESULT_NEUTRAL, read_recipe
from finetune.recipe.schema import Recipe
from finetune.recipe.yaml_loader import Loaded


@dataclass(frozen=True)
class Explained:
    """One key of a resolved recipe. `source` is 'default', 'file', 'profile', 'set', or 'given' for a bare Recipe."""

    key: str
    value: Any
    source: str
    origin: str
    description: str

    def to_dict(self) -> dict[str, Any]:
        return {
            "key": self.key,
            "value": self.value,
            "source": self.source,
            "origin": self.origin,
            "description": self.description,
        }


@dataclass(frozen=True)
class Difference:
    """One key that two recipes set differently; `changes_result` is False for keys outside the digest."""

    key: str
    left: Any
    right: Any
    changes_result: bool

    def to_dict(self) -> dict[str, Any]:
        return {
            "key": self.key,
            "left": self.left,
            "right": self.right,
            "changes_result": self.changes_result,
        }


_ABSENT = "(absent)"


def explain(recipe: Recipe | Loaded[Recipe] | Path | str, overrides: Sequence[str] = ()) -> list[Explained]:
    """Every key in schema order. Of a path (or a shipped name), with `overrides` applied, each origin is exact; of a
    Recipe it is only known whether the value is the default.
    """
    if isinstance(recipe, Recipe):
        return [_by_default(key, value, field) for key, value, field in _walk(recipe)]
    loaded = recipe if isinstance(recipe, Loaded) else read_recipe(recipe, overrides)
    rows = []
    for key, value, field in _walk(loaded.value):
        origin = _origin(loaded.origins, key)
        rows.append(Explained(key, value, origin.source, origin.describe(), field.description or ""))
    return rows


def diff_recipes(left: Recipe, right: Recipe) -> list[Difference]:
    """The keys whose resolved values differ, in schema order; `profiles` are applied by then and not compared."""
    values = [{key: value for key, value, _ in _walk(recipe)} for recipe in (left, right)]
    keys = dict.fromkeys([*values[0], *values[1]])
    return [
        Difference(key, values[0].get(key, _ABSENT), values[1].get(key, _ABSENT), not _is_neutral(key))
        for key in keys
        if values[0].get(key, _ABSENT) != values[1].get(key, _ABSENT)
    ]


def _is_neutral(key: str) -> bool:
    """Whether a key, or a section that holds it, changes no number of the result."""
    return any(key == neutral or key.startswith(f"{neutral}.") for neutral in RESULT_NEUTRAL)


def _walk(section: BaseModel, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(dotted key, value as JSON, field) of every value but `profiles`, in schema order."""
    for name, field in fields_of(type(section)).items():
        value = getattr(section, name)
        key = f"{prefix}{name}"
        if key == "profiles":
            continue
        if isinstance(value, BaseModel):
            yield from _walk(value, f"{key}.")
        else:
            yield key, _as_json(value), field


def _as_json(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, list | tuple):
        return [_as_json(item) for item in value]
    return {key: _as_json(item) for key, item in value.items()} if isinstance(value, dict) else value


def _by_default(key: str, value: Any, field: Any) -> Explained:
    default = not field.is_required() and value == _as_json(field.get_default(call_default_factory=True))
    source = "default" if default else "given"
    return Explained(key, value, source, source, field.description or "")


def _origin(origins: Mapping[str, Origin], key: str) -> Origin:
    """The origin of the key itself, or of the first key below it where the value is a mapping."""
    if key in origins:
        return origins[key]
    below = (origin for dotted, origin in origins.items() if dotted.startswith(f"{key}."))
    return next(below, DEFAULT)
