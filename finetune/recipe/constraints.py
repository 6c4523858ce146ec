"""pydantic's complaints about one section, as faults with places and in the words of a recipe."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from finetune.errors import Fault
from finetune.recipe.annotations import describe, fields_of, shown
from finetune.recipe.nodes import Mapping, Node, Origin, Sequence

MISSING = "missing key"
"""How the fault of a required key that is not there begins."""

# 'key: what is wrong; what to write', the form of messages that validators raise as plain ValueError.
_KEYED_MESSAGE = re.compile(r"(?:([A-Za-z_]\w*(?:\.\w+)*): )?(.+?)(?:; ([^;]+))?", re.DOTALL)


def _at_least(n: int, what: str) -> str:
    return "must not be empty" if n == 1 else f"needs at least {n} {what}"


_WORDING: dict[str, Callable[[dict[str, Any]], str]] = {
    "greater_than_equal": lambda limits: f"must be at least {limits['ge']}",
    "greater_than": lambda limits: f"must be greater than {limits['gt']}",
    "less_than_equal": lambda limits: f"must be at most {limits['le']}",
    "less_than": lambda limits: f"must be less than {limits['lt']}",
    "too_short": lambda limits: _at_least(limits["min_length"], "entries"),
    "too_long": lambda limits: f"takes at most {limits['max_length']} entries",
    "string_too_short": lambda limits: _at_least(limits["min_length"], "characters"),
    "string_too_long": lambda limits: f"takes at most {limits['max_length']} characters",
    "string_pattern_mismatch": lambda limits: f"must match the pattern {limits['pattern']}",
}


def refused(key: str, what: str, *, why: str = "", fix: str = "") -> PydanticCustomError:
    """For validators of a section: raise this to place a fault at `key` (dotted, below the section) with a remedy.

    A ValueError that reads 'key: what is wrong; what to write' does the same.
    """
    return PydanticCustomError("refused", "{what}", {"key": key, "what": what, "why": why, "fix": fix})


def faults_of_validation(
    error: ValidationError, node: Mapping, model: type[BaseModel], key: str, *, ignore: object
) -> list[tuple[Origin, Fault]]:
    """Faults of the section `node` at dotted `key`; complaints about values that are `ignore` are already reported."""
    by_place: dict[str, ErrorDetails] = {}
    for detail in error.errors(include_url=False):
        if detail["input"] is ignore:
            continue
        dotted, _ = _locate(node, detail["loc"], key)
        kept = by_place.get(dotted)
        # A union complains once per member; the complaint about a limit says more than one about a type.
        if kept is None or (kept["type"] not in _WORDING and detail["type"] in _WORDING):
            by_place[dotted] = detail
    return [_fault(detail, node, model, key) for detail in by_place.values()]


def _fault(detail: ErrorDetails, node: Mapping, model: type[BaseModel], key: str) -> tuple[Origin, Fault]:
    dotted, origin = _locate(node, detail["loc"], key)
    limits: dict[str, Any] = detail.get("ctx", {})
    if detail["type"] == "missing":
        field = fields_of(model).get(str(detail["loc"][-1]))
        section = f" under `{key}:`" if key else ""
        fix = f"add `{detail['loc'][-1]}: …`{section}"
        if field is not None:
            fix += f" ({describe(field.annotation)})"
        why = (field.description or "") if field is not None else ""
        return origin, Fault(f"{MISSING} '{dotted}'", str(origin), why, fix)
    if detail["type"] in _WORDING:
        rule = _WORDING[detail["type"]](limits)
        given = detail["input"]
        tail = "" if isinstance(given, list | dict) or given == "" else f", not {shown(given)}"
        return origin, Fault(f"'{dotted}' {rule}{tail}", str(origin), _why(model, detail), "")
    message, target, why, fix = detail["msg"], "", "", ""
    if detail["type"] == "refused":
        message, target, why, fix = limits["what"], limits["key"], limits["why"], limits["fix"]
    elif detail["type"] in ("value_error", "assertion_error"):
        message = str(limits.get("error", message))
        if (keyed := _KEYED_MESSAGE.fullmatch(message)) is not None:
            target, message, fix = keyed[1] or "", keyed[2], keyed[3] or ""
    if target:
        loc = (*detail["loc"], *target.split("."))
        section = dotted
        dotted, origin = _locate(node, loc, key)
        if not dotted.endswith(
            target
        ):  # a section on the way has all its defaults, so the file does not hold it
            dotted = f"{section}.{target}" if section else target
        origin = _culprit(node, loc) or origin
    return origin, Fault(f"'{dotted}': {message}" if dotted else message, str(origin), why, fix)


def _culprit(node: Node, loc: tuple[int | str, ...]) -> Origin | None:
    """When the key at fault has its default, what broke the rule is the flag or profile that set something beside it."""
    for part in loc:
        if not isinstance(node, Mapping):
            return None
        if str(part) not in node.entries:
            beside = [entry.node.origin for entry in node.entries.values()]
            return next((origin for origin in reversed(beside) if origin.source in ("set", "profile")), None)
        node = node.entries[str(part)].node
    return None


def _why(model: type[BaseModel], detail: ErrorDetails) -> str:
    field = fields_of(model).get(str(detail["loc"][0])) if detail["loc"] else None
    return (field.description or "") if field is not None else ""


def _locate(node: Node, loc: tuple[int | str, ...], key: str) -> tuple[str, Origin]:
    """Dotted key and place of a pydantic location; parts that are no keys (union tags) are skipped, but for the last."""
    origin = node.origin
    for position, part in enumerate(loc):
        if isinstance(node, Mapping) and str(part) in node.entries:
            node = node.entries[str(part)].node
            origin, key = node.origin, f"{key}.{part}" if key else str(part)
        elif isinstance(node, Sequence) and isinstance(part, int) and part < len(node.items):
            node = node.items[part]
            origin, key = node.origin, f"{key}[{part}]"
        elif isinstance(node, Mapping) and isinstance(part, str) and position == len(loc) - 1:
            key = f"{key}.{part}" if key else part
    return key, origin
