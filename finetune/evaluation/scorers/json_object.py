"""Scorers for answers that must be one JSON object, such as an intent with its slots.

Strict on the container, fair on the spelling: the answer must be exactly one JSON object (RFC 8259) with nothing but
white space around it — no code fence, no sentence, no second object, no repeated key, no NaN. Within it, key order
and white space carry no meaning. Numbers are compared by value, so 5 equals 5.0: JSON has one number type, and a
program that reads either does the same thing. `true` is not 1, and "5" is not 5.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

INTENT_KEY = "intent"


class NotAnObjectError(ValueError):
    """A reference that has no keys to compare: these scorers are for answers that are JSON objects."""


def parse_object(text: str) -> dict[str, Any] | None:
    """The JSON object that `text` is, or None when it is anything else."""
    try:
        value = json.loads(
            text,
            object_pairs_hook=_without_repeats,
            parse_constant=_refuse_constant,
            parse_float=_finite,
        )
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def same_value(left: Any, right: Any) -> bool:
    """Equality of two parsed JSON values; unlike Python's, it tells true from 1 at every depth."""
    if isinstance(left, bool) or isinstance(right, bool):
        return left is right
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(same_value(left[key], right[key]) for key in left)
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(same_value, left, right))
    return bool(left == right)


def valid_json(output: str, reference: str) -> float:
    """1.0 when the answer is one JSON object, whatever it says. This counts format failures apart from wrong answers."""
    return float(parse_object(output) is not None)


def exact_match(output: str, reference: str) -> float:
    """1.0 when the answer is the reference's JSON object: same keys, same values, nothing around it."""
    wanted, answer = _reference(reference), parse_object(output)
    return float(answer is not None and same_value(answer, wanted))


def intent_accuracy(output: str, reference: str) -> float:
    """1.0 when the `intent` of the answer is the reference's; an answer that is no JSON object scores 0.0."""
    wanted, answer = _reference(reference), parse_object(output)
    if answer is None or INTENT_KEY not in answer:
        return 0.0
    return float(same_value(answer[INTENT_KEY], wanted.get(INTENT_KEY)))


def slot_f1(output: str, reference: str) -> float:
    """F1 of the slots of one item: every key but `intent`, right only when name and value both match.

    Hard edges: no slots in the answer and none in the reference is 1.0; none on one side only is 0.0; an answer that
    is no JSON object is 0.0, also when the reference has no slots. The intent does not matter here. The mean over
    items weighs every item alike (it is not the F1 over all slots pooled).
    """
    return _fields_f1(output, reference, ignored={INTENT_KEY}, nested=False, elements=False)


def make_field_f1(
    *, ignore: list[str] | None = None, nested: bool = True, lists: str = "whole"
) -> Callable[[str, str], float]:
    """F1 of the fields of one JSON object, each right only when its name and its value both match.

    ignore: keys of the object that do not count. nested: a field inside an object counts by itself, under its path.
    lists: a list is one value (`whole`), or each of its `elements` counts by itself, whatever their order.
    Hard edges: no fields on either side is 1.0, on one side only 0.0; an answer that is no JSON object is 0.0.
    """
    if lists not in ("whole", "elements"):
        raise ValueError(f"lists: '{lists}' is not whole or elements")
    ignored, elements = set(ignore or ()), lists == "elements"
    return lambda output, reference: _fields_f1(
        output, reference, ignored=ignored, nested=nested, elements=elements
    )


def format_of_field_f1(
    *, ignore: list[str] | None = None, nested: bool = True, lists: str = "whole"
) -> Callable[[str], bool]:
    """An answer that is no JSON object is off-format."""
    return is_object


def is_object(output: str) -> bool:
    """Whether an answer is one JSON object and nothing else."""
    return parse_object(output) is not None


def _fields_f1(output: str, reference: str, *, ignored: set[str], nested: bool, elements: bool) -> float:
    answer = parse_object(output)

    def fields(value: dict[str, Any]) -> Counter[tuple[tuple[str, ...], str]]:
        counted = {key: content for key, content in value.items() if key not in ignored}
        return Counter(_leaves(counted, (), nested, elements))

    wanted = fields(_reference(reference))
    if answer is None:
        return 0.0
    found = fields(answer)
    if not found and not wanted:
        return 1.0
    return 2.0 * (found & wanted).total() / (found.total() + wanted.total())


def _leaves(
    value: dict[str, Any], path: tuple[str, ...], nested: bool, elements: bool
) -> Iterator[tuple[tuple[str, ...], str]]:
    """Every field as (path, canonical value); an empty object or list is a value like any other."""
    for key, content in value.items():
        here = (*path, key)
        if nested and isinstance(content, dict) and content:
            yield from _leaves(content, here, nested, elements)
        elif elements and isinstance(content, list) and content:
            yield from ((here, _canonical(one)) for one in content)
        else:
            yield here, _canonical(content)


def _canonical(value: Any) -> str:
    """Equal texts for values that `same_value` calls equal: 5.0 as 5, keys in one order."""
    return json.dumps(_integral(value), sort_keys=True)


def _integral(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {key: _integral(content) for key, content in value.items()}
    return [_integral(one) for one in value] if isinstance(value, list) else value


def _reference(text: str) -> dict[str, Any]:
    value = parse_object(text)
    if value is None:
        raise NotAnObjectError(f"the reference is not one JSON object: {text[:80]!r}")
    return value


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("repeated key")
    return value


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} does not fit a number")
    return value
