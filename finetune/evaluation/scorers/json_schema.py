"""Answers that must be JSON of a given shape."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any


def make_json_schema(*, schema: dict[str, Any] | None = None) -> Callable[[str, str], float]:
    """1.0 when the answer is one JSON value that the schema accepts; without `schema` the reference is the schema.

    Only what the schema itself holds counts: a `$ref` to another document is an error, never a download.
    """
    from jsonschema.exceptions import SchemaError
    from jsonschema.validators import validator_for
    from referencing import Registry
    from referencing.exceptions import Unresolvable

    def validator(wanted: Any) -> Any:
        if not isinstance(wanted, (dict, bool)):
            raise ValueError(f"the schema is no JSON Schema: {str(wanted)[:80]}")
        kind = validator_for(wanted)
        try:
            kind.check_schema(wanted)
        except SchemaError as error:
            raise ValueError(f"the schema is no JSON Schema: {error.message}") from None
        return kind(wanted, registry=Registry())

    fixed = validator(schema) if schema is not None else None

    def json_schema(output: str, reference: str) -> float:
        accepts = fixed if fixed is not None else validator(json.loads(reference))
        try:
            value = _value_of(output)
        except ValueError:
            return 0.0
        try:
            return float(accepts.is_valid(value))
        except Unresolvable as error:
            raise ValueError(f"the schema refers to something outside itself: {error}") from None

    return json_schema


def format_of_json_schema(*, schema: dict[str, Any] | None = None) -> Callable[[str], bool]:
    """An answer that is no JSON value at all is off-format; one that the schema refuses is wrong."""
    return is_json


def is_json(output: str) -> bool:
    try:
        _value_of(output)
    except ValueError:
        return False
    return True


def _value_of(text: str) -> Any:
    """RFC 8259 has no NaN and no Infinity. Nesting too deep to parse counts as no JSON."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")
