"""What a field of a schema accepts, in one flat form: used to read YAML by type, to word faults and to write pages."""

from __future__ import annotations

import types
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

_SCALARS = {str: "text", Path: "a path", int: "a whole number", float: "a number", bool: "true or false"}


@dataclass(frozen=True)
class Accepted:
    """The flattened members of an annotation. `items`, `keys` and `values` are the annotations inside a list and a dict."""

    scalars: tuple[type, ...] = ()  # of str, Path, int, float, bool
    literals: tuple[str | int | float | bool, ...] = ()
    nullable: bool = False
    models: tuple[type[BaseModel], ...] = ()
    items: tuple[Any, ...] | None = None
    keys: Any = None
    values: Any = None
    anything: bool = False  # the annotation says nothing that a reader of YAML could use


def accepted(annotation: Any) -> Accepted:
    """Flatten Annotated, unions, aliases and literals of `annotation`."""
    result: dict[str, Any] = {"scalars": (), "literals": (), "models": ()}
    for member in _members(annotation):
        origin, arguments = get_origin(member), get_args(member)
        if member is None or member is type(None):
            result["nullable"] = True
        elif origin is Literal:
            result["literals"] += tuple(value for value in arguments if value is not None)
            result["nullable"] = result.get("nullable", False) or None in arguments
        elif member in _SCALARS:
            result["scalars"] += (member,)
        elif isinstance(member, type) and issubclass(member, BaseModel):
            result["models"] += (member,)
        elif origin in (list, tuple, set, frozenset) or member in (list, tuple):
            inner = tuple(argument for argument in arguments if argument is not Ellipsis)
            result["items"] = inner or (Any,)
        elif origin is dict or member is dict:
            result["keys"], result["values"] = arguments or (str, Any)
        else:
            result["anything"] = True
    return Accepted(**result)


def _members(annotation: Any) -> list[Any]:
    if get_origin(annotation) is Annotated:
        return _members(get_args(annotation)[0])
    if hasattr(annotation, "__value__"):  # `type X = …` and typing_extensions.TypeAliasType
        return _members(annotation.__value__)
    if get_origin(annotation) in (Union, types.UnionType):
        return [member for part in get_args(annotation) for member in _members(part)]
    return [typing.Any if annotation is object else annotation]


def fields_of(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """The keys a section takes in a file (aliases where the schema gives them) and their fields."""
    return {field.alias or name: field for name, field in model.model_fields.items()}


def describe(annotation: Any) -> str:
    """What to write for this annotation: 'a whole number', 'one of bf16, fp32', 'a list of text', 'text or null'."""
    form = accepted(annotation)
    parts: list[str] = []
    if form.literals:
        words = [shown(value) for value in form.literals]
        parts.append(words[0] if len(words) == 1 else f"one of {', '.join(words)}")
    numbers = [kind for kind in form.scalars if not (kind is int and float in form.scalars)]
    parts += [_SCALARS[kind] for kind in numbers]
    if form.items is not None:
        parts.append(f"a list of {_plural(form.items[0])}")
    if form.models:
        parts.append("a section")
    if form.values is not None:
        parts.append("a mapping")
    if form.anything:
        parts.append("any value")
    if form.nullable:
        parts.append("null")
    return " or ".join(parts)


def _plural(annotation: Any) -> str:
    form = accepted(annotation)
    if form.models:
        return "sections"
    words = describe(annotation)
    return {
        "a whole number": "whole numbers",
        "a number": "numbers",
        "any value": "values",
        "a path": "paths",
    }.get(words, words.removeprefix("one of "))


def shown(value: object) -> str:
    """A value as YAML spells it, shortened so that a message stays one line."""
    text = (
        {True: "true", False: "false", None: "null"}.get(value)
        if isinstance(value, bool | None)
        else str(value)
    )
    text = " ".join(str(text).split())
    return text if len(text) <= 60 else f"{text[:57]}..."
