"""YAML 1.2 text into a tree with places. Every fault of the text is collected; no input raises anything but faults."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from finetune.errors import Fault, UserError, did_you_mean
from finetune.recipe.nodes import Entry, Mapping, Node, Origin, Scalar, Sequence, parse_integer, parse_number

_TAG = "tag:yaml.org,2002:"
_MERGE = _TAG + "merge"
_BOOLEANS = frozenset({"true", "True", "TRUE", "false", "False", "FALSE"})
_MAX_NODES = 50_000  # aliases can multiply a short file; a recipe, spec or suite is far below this

Place = Callable[[int, int], Origin]


def shown_path(path: Path) -> str:
    """The path as a person wants to read it: from the working folder when it lies below, else as given."""
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except (ValueError, OSError):
        return str(path)


def read_yaml_text(path: Path) -> str:
    """The text of a UTF-8 file (a byte order mark is dropped). Raises UserError for all that can go wrong with a file."""
    shown = shown_path(path)
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        siblings = [other.name for other in path.parent.glob("*.yaml")]
        fix = did_you_mean(path.name, siblings) if siblings else "check the path"
        raise UserError(f"no such file: {shown}", fix=fix) from None
    except IsADirectoryError:
        raise UserError(f"{shown} is a folder, not a YAML file", fix="name a file in it") from None
    except (OSError, ValueError) as error:  # ValueError: a path with a NUL byte
        raise UserError(f"cannot read {shown}: {error}", fix="check the path and its permissions") from None
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = raw[: error.start]
        line, column = before.count(b"\n") + 1, error.start - (before.rfind(b"\n") + 1) + 1
        raise UserError(
            f"not UTF-8 text: byte 0x{raw[error.start]:02x} cannot be decoded",
            where=f"{shown}:{line}:{column}",
            fix="save the file with the encoding UTF-8",
        ) from None


def parse_yaml(text: str, place: Place) -> tuple[Node | None, list[Fault]]:
    """Parse one document.

    `place(line, column)` (from 1) makes the origin of a node. Returns the tree (None for an empty document, or when
    the text cannot be parsed at all) and every fault found: syntax, duplicate keys, keys that are not text, tags,
    recursive or exploding aliases.
    """
    from ruamel.yaml import YAML
    from ruamel.yaml.error import MarkedYAMLError, YAMLError

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            root = YAML(typ="safe", pure=True).compose(text)
        if root is None:
            return None, []
        builder = _Builder(place)
        return builder.build(root, ()), builder.faults
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
        problem = str(error.problem or error.context or "cannot be read").strip().splitlines()[0]
        return None, [
            Fault(
                f"not valid YAML: {problem}", str(place(line, column)), error.context or "", _remedy(problem)
            )
        ]
    except YAMLError as error:
        position = getattr(error, "position", 0)
        line = text.count("\n", 0, position) + 1
        column = position - (text.rfind("\n", 0, position) + 1) + 1
        character = getattr(error, "character", None)
        what = (
            f"character U+{character:04X} is not allowed in YAML"
            if isinstance(character, int)
            else str(error)
        )
        return None, [Fault(what, str(place(line, column)), fix="remove it, or save the file as UTF-8 text")]
    except RecursionError:
        return None, [Fault("nested too deeply", str(place(1, 1)), fix="flatten the lists and mappings")]
    except (
        Exception
    ) as error:  # the parser has its own faults on hostile input; none may reach a user as a traceback
        return None, [
            Fault(
                f"not valid YAML: {type(error).__name__}: {error}", str(place(1, 1)), fix="simplify the file"
            )
        ]


def _remedy(problem: str) -> str:
    """What to type for the syntax faults that people really make."""
    if "\\t" in problem or "tab" in problem:
        return "indent with spaces; YAML allows no tabs"
    if "undefined alias" in problem:
        return "define the anchor (&name) above its use, or put text that starts with '*' in quotes"
    if "mapping values are not allowed" in problem:
        return "check the indentation, and put text that holds ': ' in quotes"
    if "another document" in problem:
        return "keep one document: remove the second '---'"
    return "check brackets, quotes and indentation at this place"


class _Builder:
    """Turns the parser's graph into our tree; aliases are written out, merge keys applied."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._n_nodes = 0
        self.faults: list[Fault] = []

    def build(self, node: Any, above: tuple[int, ...]) -> Node:
        origin = self._place(node.start_mark.line + 1, node.start_mark.column + 1)
        self._n_nodes += 1
        if id(node) in above or self._n_nodes > _MAX_NODES:
            if self._n_nodes <= _MAX_NODES + 1:
                what = (
                    "an alias holds itself"
                    if id(node) in above
                    else f"aliases multiply to more than {_MAX_NODES:,} values"
                )
                self._fault(what, origin, fix="write the values out")
            return Scalar("null", "", origin)
        above = (*above, id(node))
        kind = node.id
        if kind == "scalar":
            return self._scalar(node, origin)
        expected = {"sequence": "seq", "mapping": "map"}[kind]
        if str(node.tag) != _TAG + expected:
            self._fault(f"tag {_short(node.tag)} is not supported here", origin, fix="remove the tag")
        if kind == "sequence":
            return Sequence(tuple(self.build(item, above) for item in node.value), origin)
        return self._mapping(node, origin, above)

    def _fault(self, what: str, origin: Origin, *, why: str = "", fix: str = "") -> None:
        self.faults.append(Fault(what, str(origin), why, fix))

    def _scalar(self, node: Any, origin: Origin) -> Scalar:
        tag, text = str(node.tag).removeprefix(_TAG), self._text(node, origin)
        if tag == "null":
            return Scalar("null", text, origin)
        if tag == "bool" and text in _BOOLEANS:  # YAML 1.1 reads more words as booleans; here they stay text
            return Scalar("bool", text, origin)
        if tag == "int" and parse_integer(text) is not None:
            return Scalar("int", text, origin)
        if tag in ("int", "float") and parse_number(text) is not None:
            return Scalar("float", text, origin)
        if tag not in ("str", "bool", "int", "float", "timestamp", "merge", "value"):
            self._fault(f"tag {_short(node.tag)} is not supported", origin, fix="remove the tag")
        return Scalar("str", text, origin)

    def _text(self, node: Any, origin: Origin) -> str:
        """The text of a scalar; pairs of escaped surrogates, as JSON writes them, become one character."""
        text = str(node.value)
        if not any("\ud800" <= character <= "\udfff" for character in text):
            return text
        try:
            return text.encode("utf-16", "surrogatepass").decode("utf-16")
        except UnicodeDecodeError:
            self._fault(
                "half of a surrogate pair is no character",
                origin,
                fix="write the character itself, or \\UXXXXXXXX",
            )
            return ""

    def _mapping(self, node: Any, origin: Origin, above: tuple[int, ...]) -> Mapping:
        entries: dict[str, Entry] = {}
        inherited: dict[str, Entry] = {}
        merge_at: Origin | None = None
        for key_node, value_node in node.value:
            key_at = self._place(key_node.start_mark.line + 1, key_node.start_mark.column + 1)
            if str(key_node.tag) == _MERGE:
                if merge_at is not None:
                    self._duplicate("<<", key_at, merge_at)
                merge_at = key_at
                inherited = self._merged(value_node, above) | inherited
                continue
            if key_node.id != "scalar" or str(key_node.tag) == _TAG + "null":
                self._fault("a key must be text", key_at, fix="write `key: value`; put odd keys in quotes")
                continue
            key = self._text(key_node, key_at)
            value = self.build(value_node, above)
            if isinstance(value, Scalar) and value.kind == "null" and not value.text:
                value = replace(value, origin=key_at)  # the parser places an empty value at the next token
            if key in entries:
                self._duplicate(key, key_at, entries[key].origin)
            else:
                entries[key] = Entry(value, key_at)
        return Mapping({**inherited, **entries}, origin)

    def _duplicate(self, key: str, again: Origin, first: Origin) -> None:
        self._fault(
            f"duplicate key '{key}'",
            again,
            why=f"it is already set at {first}; only one can count",
            fix="delete one of the two",
        )

    def _merged(self, node: Any, above: tuple[int, ...]) -> dict[str, Entry]:
        """Entries of `<<: *anchor` or `<<: [*a, *b]`; the earlier mapping wins."""
        tree = self.build(node, above)
        parts = tree.items if isinstance(tree, Sequence) else (tree,)
        entries: dict[str, Entry] = {}
        for part in parts:
            if isinstance(part, Mapping):
                entries = {**part.entries, **entries}
            else:
                self._fault("`<<` takes a mapping", part.origin, fix="write `<<: *anchor` of a mapping")
        return entries


def _short(tag: object) -> str:
    return str(tag).replace(_TAG, "!!")
