"""Reads a tree into a pydantic model by the types of its fields, and collects every fault with its place.

Scalars are read by what the field asks for, not by what YAML guesses: `007` in a text field stays '007', `2e-5` and
`'2e-5'` in a number field are numbers, `yes` in a boolean field is an error. Constraints and validators are pydantic's.
Each section is validated by itself, from the leaves up, so one bad section never hides the faults of another.
"""

from __future__ import annotations

import math
from collections.abc import Mapping as MappingABC
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from finetune.errors import Fault, nearest
from finetune.recipe.annotations import Accepted, accepted, describe, fields_of, shown
from finetune.recipe.constraints import faults_of_validation
from finetune.recipe.nodes import (
    Mapping,
    Node,
    Origin,
    Scalar,
    Sequence,
    parse_integer,
    parse_number,
    to_plain,
)
from finetune.recipe.suggest import dotted_keys, suggest

_YES = frozenset({"yes", "on", "true", "1"})
_NO = frozenset({"no", "off", "false", "0"})

PlacedFault = tuple[Origin, Fault]


class Refused:
    """Stands for a value already reported; pydantic rejects it, and its complaint is dropped."""


REFUSED = Refused()


def fit(
    node: Mapping, model: type[BaseModel], renamed: MappingABC[str, str]
) -> tuple[BaseModel | None, list[PlacedFault]]:
    """The model read from `node`, or None and every fault. `renamed` maps names of other tools to dotted keys."""
    fitter = _Fitter(list(dotted_keys(model)), renamed)
    value = fitter.section(node, model, "")
    return (None, fitter.faults) if isinstance(value, Refused) or fitter.faults else (value, [])


class _Fitter:
    def __init__(self, known: list[str], renamed: MappingABC[str, str]) -> None:
        self._known = known
        self._renamed = renamed
        self.faults: list[PlacedFault] = []

    def _refuse(self, origin: Origin, what: str, *, why: str = "", fix: str = "") -> Refused:
        self.faults.append((origin, Fault(what, str(origin), why, fix)))
        return REFUSED

    def section(self, node: Mapping, model: type[BaseModel], key: str) -> BaseModel | Refused:
        """One section: known keys fitted, unknown ones reported, then pydantic's own checks."""
        fields = fields_of(model)
        data: dict[str, Any] = {}
        for name, entry in node.entries.items():
            dotted = f"{key}.{name}" if key else name
            if name in fields:
                data[name] = self.value(entry.node, fields[name].annotation, dotted)
            elif model.model_config.get("extra") == "allow":
                data[name] = to_plain(entry.node)
            else:
                fix = suggest(name, key, list(fields), self._known, self._renamed)
                self._refuse(entry.origin, f"unknown key '{dotted}'", fix=fix)
        try:
            return model.model_validate(data)
        except ValidationError as error:
            self.faults += faults_of_validation(error, node, model, key, ignore=REFUSED)
            return REFUSED

    def value(self, node: Node, annotation: Any, key: str) -> Any:
        """Any value by its annotation; REFUSED when it was reported."""
        form = accepted(annotation)
        if form.anything:
            return REFUSED if self._refuse_not_finite(node, key) else to_plain(node)
        if isinstance(node, Mapping):
            return self._mapping(node, form, annotation, key)
        if isinstance(node, Sequence):
            if form.items is None:
                return self._refuse(node.origin, f"'{key}' must be {describe(annotation)}, not a list")
            item_annotations = form.items
            return [
                self.value(item, item_annotations[min(i, len(item_annotations) - 1)], f"{key}[{i}]")
                for i, item in enumerate(node.items)
            ]
        if node.kind == "null" and not form.nullable and form.models:
            return self.value(
                Mapping({}, node.origin), annotation, key
            )  # `adapter:` with nothing below: its defaults
        value = _scalar(node, form)
        if not isinstance(value, Refused):
            return value
        return self._refuse_scalar(node, form, annotation, key)

    def _refuse_not_finite(self, node: Node, key: str) -> bool:
        """Report NaN and infinities, which have no place in a digest, anywhere in a value without a type."""
        if isinstance(node, Mapping):
            below = [(f"{key}.{name}", entry.node) for name, entry in node.entries.items()]
        elif isinstance(node, Sequence):
            below = [(f"{key}[{i}]", item) for i, item in enumerate(node.items)]
        elif node.kind in ("int", "float") and not math.isfinite(_number(node) or 0):
            self._refuse(
                node.origin, f"'{key}' must be finite, not {shown(node.text)}", fix="write a finite number"
            )
            return True
        else:
            return False
        found = [self._refuse_not_finite(inner, dotted) for dotted, inner in below]
        return any(found)

    def _mapping(self, node: Mapping, form: Accepted, annotation: Any, key: str) -> Any:
        if form.models:
            model = self._choose(node, form.models, key)
            return REFUSED if model is None else self.section(node, model, key)
        if form.values is not None:
            names = [shown(literal) for literal in accepted(form.keys).literals]
            values: dict[str, Any] = {}
            for name, entry in node.entries.items():
                if names and name not in names:
                    self._refuse(entry.origin, f"unknown key '{key}.{name}'", fix=_meant(name, names))
                else:
                    values[name] = self.value(entry.node, form.values, f"{key}.{name}")
            return values
        return self._refuse(node.origin, f"'{key}' must be {describe(annotation)}, not a mapping")

    def _choose(self, node: Mapping, models: tuple[type[BaseModel], ...], key: str) -> type[BaseModel] | None:
        """The member of a union of sections: by its literal field (`kind: …`), else by the most keys in common."""
        if len(models) == 1:
            return models[0]
        shared = set.intersection(*(set(fields_of(model)) for model in models))
        for name in sorted(shared):
            words = [accepted(fields_of(model)[name].annotation).literals for model in models]
            if not all(words) or name not in node.entries:
                continue
            entry = node.entries[name]
            text = entry.node.text if isinstance(entry.node, Scalar) else ""
            for model, literals in zip(models, words, strict=True):
                if text in map(shown, literals):
                    return model
            known = [shown(literal) for literals in words for literal in literals]
            self._refuse(
                entry.node.origin,
                f"'{key}.{name}' is '{shown(text)}', which is not one of {', '.join(known)}",
                fix=_meant(text, known),
            )
            return None
        return max(models, key=lambda model: len(set(fields_of(model)) & set(node.entries)))

    def _refuse_scalar(self, node: Scalar, form: Accepted, annotation: Any, key: str) -> Refused:
        wanted = describe(annotation)
        given = f"'{shown(node.text)}'" if node.kind == "str" else shown(node.text)
        word = node.text.lower()
        why = fix = ""
        if node.kind == "null":
            given = "null" if node.text else "empty"
            fix = "give it a value, or delete the key to take the default"
        elif form.scalars == (bool,) and word in _YES | _NO:
            why = "YAML 1.2 has two booleans, true and false; yes, no, on, off and quoted words are text"
            fix = f"write {'true' if word in _YES else 'false'} without quotes"
        elif form.items is not None and not form.scalars and not form.literals:
            fix = f"write it as a list: [{shown(node.text)}]"
        elif node.kind == "bool" and {str, Path} & set(form.scalars):
            fix = f'if the text is meant, put it in quotes: "{node.text}"'
        elif form.literals:
            words = [shown(literal) for literal in form.literals]
            fix = _meant(node.text, words)
            if form.items is not None and node.kind == "str" and nearest(node.text, words) is None:
                fix = f"write it as a list: [{shown(node.text)}], or one of {', '.join(words)}"
        elif {int, float} & set(form.scalars) and _number(node) is not None:
            finite = math.isfinite(_number(node) or 0)
            fix = "write a number without fraction" if finite else "write a finite number"
        return self._refuse(node.origin, f"'{key}' must be {wanted}, not {given}", why=why, fix=fix)


def _scalar(node: Scalar, form: Accepted) -> Any:
    """The scalar as the first type that takes it; the order keeps `5` a number where text would do too."""
    if node.kind == "null":
        return None if form.nullable else REFUSED
    if node.kind == "bool":
        value = node.text.lower() == "true"
        fits = bool in form.scalars or any(literal is value for literal in form.literals)
        return value if fits else REFUSED
    for literal in form.literals:
        if not isinstance(literal, bool) and node.text == str(literal):
            return literal
    is_text = str in form.scalars or Path in form.scalars
    if not (node.kind == "str" and is_text):
        number = _number(node)
        if number is not None and math.isfinite(number):
            whole = parse_integer(node.text)
            if int in form.scalars and (whole is not None or number.is_integer()):
                return int(number) if whole is None else whole
            if float in form.scalars:
                return number
    return node.text if is_text else REFUSED


def _number(node: Scalar) -> float | None:
    try:
        return parse_number(node.text)
    except OverflowError:  # an integer beyond the range of floats
        return math.inf


def _meant(word: str, known: list[str]) -> str:
    match = nearest(word, known)
    return f"did you mean '{match}'?" if match else f"write one of {', '.join(known)}"
