"""What a sweep tries: keys of a recipe and the values of each, from `--over KEY=VALUES`."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from finetune.errors import Fault, UserError

_RANGE = re.compile(r"(?P<low>[^.].*?)\.\.(?P<high>[^:]+):(?P<log>log)?(?P<count>\d+)")
_MOST_VALUES = 1000


@dataclass(frozen=True, slots=True)
class Axis:
    """One key of the recipe and the values to try, written as `--set` reads them."""

    key: str
    values: tuple[str, ...]


def parse_axes(arguments: Sequence[str]) -> tuple[Axis, ...]:
    """`KEY=LOW..HIGH:logN` (N values, evenly spaced in the logarithm), `KEY=LOW..HIGH:N` (evenly spaced), `KEY=A,B,C`, where a
    value may be a list: `KEY=[a],[a,b]`.

    Raises UserError with every fault at once: a form that is none of these, a key or a value given twice, a range that does not
    rise, a logarithm of what is not positive.
    """
    axes: list[Axis] = []
    faults: list[Fault] = []
    for argument in arguments:
        key, equals, text = (part.strip() for part in argument.partition("="))
        try:
            if not equals or not key or not text:
                raise ValueError("it is not of the form KEY=VALUES")
            if any(axis.key == key for axis in axes):
                raise ValueError(f"{key} is given twice")
            axes.append(Axis(key, _values(text)))
        except ValueError as error:
            faults.append(
                Fault(
                    f"--over {argument}: {error}",
                    fix="write --over train.learning_rate=1e-5..1e-3:log7 or --over adapter.rank=8,16,32",
                )
            )
    if faults:
        raise UserError(faults)
    return tuple(axes)


def _values(text: str) -> tuple[str, ...]:
    if ".." in text:
        return _range(text)
    values = tuple(part.strip() for part in _parts(text))
    if not all(values):
        raise ValueError("a value is empty")
    if len(set(values)) < len(values):
        raise ValueError("a value is given twice")
    return values


def _parts(text: str) -> list[str]:
    """At its commas, but not at those inside brackets or braces: a value may be a list."""
    parts, depth = [""], 0
    for character in text:
        depth += (character in "[{") - (character in "]}")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    if depth:
        raise ValueError("a bracket is not closed")
    return parts


def _range(text: str) -> tuple[str, ...]:
    found = _RANGE.fullmatch(text)
    if found is None:
        raise ValueError("a range is LOW..HIGH:N or LOW..HIGH:logN")
    try:
        low, high, count = float(found["low"]), float(found["high"]), int(found["count"])
    except ValueError:
        raise ValueError("the ends of a range are numbers") from None
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise ValueError("a range must rise")
    if not 2 <= count <= _MOST_VALUES:
        raise ValueError(f"a range has 2 to {_MOST_VALUES} values")
    if found["log"] and low <= 0:
        raise ValueError("a logarithmic range must be above 0")
    steps = [index / (count - 1) for index in range(count)]
    if found["log"]:
        points = [low * (high / low) ** step for step in steps]
    else:
        points = [low + (high - low) * step for step in steps]
    values = tuple(f"{point:.4g}" for point in points)
    if len(set(values)) < count:
        raise ValueError("the ends of the range are too close for so many values of four digits")
    return values
