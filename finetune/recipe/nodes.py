"""A small tree of YAML values, each of which remembers where it was written: in a file, a profile, or a `--set`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

_INTEGER = re.compile(r"[-+]?[0-9][0-9_]*|0o[0-7]+|0x[0-9a-fA-F]+")
_NUMBER = re.compile(r"[-+]?(?:[0-9][0-9_]*(?:\.[0-9_]*)?|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?")
_NOT_FINITE = {".inf": float("inf"), "-.inf": float("-inf"), "+.inf": float("inf"), ".nan": float("nan")}

Source = Literal["default", "file", "profile", "set"]


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a value comes from. `label` is a file, or the whole `--set key=value`; line and column count from 1."""

    source: Source
    label: str
    line: int = 0
    column: int = 0
    profile: str = ""

    def __str__(self) -> str:
        return f"{self.label}:{self.line}:{self.column}" if self.line else self.label

    def describe(self) -> str:
        """For people: 'default', 'recipe.yaml:3', 'profile smoke (recipe.yaml:40)' or '--set a.b=c'."""
        if self.source == "default":
            return "default"
        place = f"{self.label}:{self.line}" if self.line else self.label
        return f"profile {self.profile} ({place})" if self.source == "profile" else place


DEFAULT = Origin("default", "default")


@dataclass(frozen=True, slots=True)
class Scalar:
    """One scalar with the text as written; `kind` is what YAML 1.2 makes of it (quoted text is always 'str')."""

    kind: Literal["null", "bool", "int", "float", "str"]
    text: str
    origin: Origin

    @property
    def value(self) -> str | int | float | bool | None:
        """The value by YAML's own rules, for places where the schema asks for no particular type."""
        if self.kind == "null":
            return None
        if self.kind == "bool":
            return self.text.lower() == "true"
        number = {"int": parse_integer, "float": parse_number}.get(self.kind, lambda _: None)(self.text)
        return self.text if number is None else number


@dataclass(frozen=True, slots=True)
class Sequence:
    """A list."""

    items: tuple[Node, ...]
    origin: Origin


@dataclass(frozen=True, slots=True)
class Entry:
    """One `key: value` of a mapping; `origin` is the place of the key."""

    node: Node
    origin: Origin


@dataclass(frozen=True, slots=True)
class Mapping:
    """A mapping with text keys, in the order written."""

    entries: dict[str, Entry]
    origin: Origin


Node = Scalar | Sequence | Mapping


def parse_integer(text: str) -> int | None:
    """'32', '1_000', '0x20', '0o40' and '007' (YAML 1.2: seven) as an int; None for anything else."""
    if _INTEGER.fullmatch(text) is None:
        return None
    digits = text.replace("_", "")
    try:
        return int(digits, 0) if digits[:2] in ("0x", "0o") else int(digits)
    except ValueError:  # more digits than Python converts
        return None


def parse_number(text: str) -> float | None:
    """'2e-5', '2E-5', '.5', '1e3', '1.', '1_000' and '.inf' as a float; None for anything else ('nan' is text)."""
    if text.lower() in _NOT_FINITE:
        return _NOT_FINITE[text.lower()]
    if _NUMBER.fullmatch(text):
        return float(text.replace("_", ""))
    whole = parse_integer(text)
    return None if whole is None else float(whole)


def from_plain(value: Any, origin: Origin) -> Node:
    """A tree from plain Python values (dicts, lists, scalars); every node gets the same origin."""
    if isinstance(value, dict):
        return Mapping({str(k): Entry(from_plain(v, origin), origin) for k, v in value.items()}, origin)
    if isinstance(value, (list, tuple)):
        return Sequence(tuple(from_plain(item, origin) for item in value), origin)
    if value is None:
        return Scalar("null", "null", origin)
    if isinstance(value, bool):
        return Scalar("bool", str(value).lower(), origin)
    if isinstance(value, int):
        return Scalar("int", str(value), origin)
    return (
        Scalar("float", repr(value), origin)
        if isinstance(value, float)
        else Scalar("str", str(value), origin)
    )


def to_plain(node: Node) -> Any:
    """Plain Python values by YAML's own rules."""
    if isinstance(node, Scalar):
        return node.value
    if isinstance(node, Sequence):
        return [to_plain(item) for item in node.items]
    return {key: to_plain(entry.node) for key, entry in node.entries.items()}


def relabel(node: Node, profile: str) -> Node:
    """The same tree, marked as coming from a profile."""
    origin = replace(node.origin, source="profile", profile=profile)
    if isinstance(node, Scalar):
        return replace(node, origin=origin)
    if isinstance(node, Sequence):
        return Sequence(tuple(relabel(item, profile) for item in node.items), origin)
    entries = {
        key: Entry(relabel(entry.node, profile), replace(entry.origin, source="profile", profile=profile))
        for key, entry in node.entries.items()
    }
    return Mapping(entries, origin)


def set_node(root: Mapping, path: tuple[str, ...], node: Node, origin: Origin) -> Mapping:
    """A copy of `root` with `node` at `path`. A mapping is merged key by key into a mapping; all else replaces."""
    head, rest = path[0], path[1:]
    present = root.entries.get(head)
    below = present.node if present is not None and isinstance(present.node, Mapping) else None
    merged: Node
    if rest:
        merged = set_node(below or Mapping({}, origin), rest, node, origin)
    elif isinstance(node, Mapping) and below is not None:
        merged = below
        for key, entry in node.entries.items():
            merged = set_node(merged, (key,), entry.node, entry.origin)
    else:
        merged, below = node, None
    # A section that is only added to keeps the place where it was opened.
    key_origin = origin if below is None or present is None else present.origin
    return Mapping({**root.entries, head: Entry(merged, key_origin)}, root.origin)


def leaves(node: Node, prefix: str = "") -> Iterator[tuple[str, Origin]]:
    """Dotted key and origin of every value below `node`; a list counts as one value, and so does an empty mapping."""
    if isinstance(node, Mapping) and (node.entries or not prefix):
        for key, entry in node.entries.items():
            yield from leaves(entry.node, f"{prefix}.{key}" if prefix else key)
    else:
        yield prefix, node.origin
