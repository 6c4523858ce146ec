"""From a record of any format to the canonical row, by the spec's source section."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

from finetune.data.fold import normalised_opening, squeeze_text
from finetune.data.read.json_line import parse_value
from finetune.data.read.record import Record, RowError
from finetune.data.read.shapes import RULES, Fields, plain_turns, shape_fields, shape_of
from finetune.data.read.turns import INSTRUCTING, TurnKeys, as_text
from finetune.data.rows import Row, Turn, digest_content
from finetune.data.spec_source import RowsSource, Shape
from finetune.digest import digest_bytes

_HOLE = re.compile(r"\{\{|\}\}|\{([^{}]+)\}")
_MISSING = object()
Getter = Callable[[dict[str, Any]], Any]


class RowMaker:
    """Makes the rows of one file. `ignored_keys` counts the keys that were read past."""

    def __init__(self, source: RowsSource, name: str, ignored_keys: Counter[str]) -> None:
        self._source = source
        self._name = name
        self._ignored_keys = ignored_keys
        self._keys = TurnKeys(source.role_key, source.content_key, source.roles)
        self._columns = {key: _getter(said) for key, said in source.columns.items()}
        self._json_columns = [(column, path_getter(column)) for column in source.json_columns]
        self._tags = [(tag, path_getter(tag)) for tag in source.tags]
        self._group_by = path_getter(source.group_by) if source.group_by else None
        # Where nothing in the spec changes what the keys of a record mean.
        self._may_be_plain = source.shape in ("auto", "messages") and not (
            source.columns or source.json_columns or source.role_key or source.content_key or source.roles
        )
        own = {*source.tags, *([source.group_by] if source.group_by else [])}
        mapped = {column for said in source.columns.values() for column in columns_in(said)}
        self._used: dict[Shape, frozenset[str]] = {
            shape: frozenset({_first_key(key) for key in own | mapped} | (set() if mapped else rule.reads))
            for shape, rule in RULES.items()
        }

    def __call__(self, record: Record) -> Row:
        """The row of a record. Raises RowError with the reason when there is none."""
        given = record.value
        if self._may_be_plain and (turns := plain_turns(given)) is not None:
            shape: Shape = "messages"
            row = self._row(record.line, given, turns, {})
        else:
            if self._json_columns:
                given = self._parsed(given)
            mapped = self._mapped(given) if self._columns else given
            try:
                shape = shape_of(mapped) if self._source.shape == "auto" else self._source.shape
                fields = shape_fields(mapped, shape, self._keys)
            except RowError as fault:
                raise self._with_missing(fault, mapped) from None
            row = self._row(record.line, given, fields.pop("messages", []), fields)
        if not self._used[shape].issuperset(given):
            self._ignored_keys.update([key for key in given if key not in self._used[shape]])
        return row

    def _row(self, line: int, given: dict[str, Any], messages: list[Turn], fields: Fields) -> Row:
        system = self._source.system
        if system is not None and messages and messages[0]["role"] not in INSTRUCTING:
            messages.insert(0, {"role": "system", "content": system})
        group = self._group(given, messages, fields)
        source = f"{self._name}:{line}"
        tags = self._tags_of(given) if self._tags else {}
        if not fields:  # the commonest by far
            return Row(f"row-{digest_content([messages])[:16]}", tuple(messages), group, source, tags)
        made = digest_content([messages, sorted(fields.items())])
        return Row(f"row-{made[:16]}", tuple(messages), group, source, tags, **fields)

    def _group(self, given: dict[str, Any], messages: list[Turn], fields: Fields) -> str:
        if self._group_by is not None:
            value = self._group_by(given)
            if value is _MISSING or value is None or value == "":
                raise RowError(f"the row has no '{self._source.group_by}', which source.group_by asks for")
            return f"{self._source.group_by}={as_text(value)}"
        if messages:
            opening = normalised_opening(messages)
        else:  # text or tokens: the whole row is what must not be on two sides
            opening = squeeze_text(fields.get("text") or ",".join(map(str, fields["input_ids"])))
        return f"opening-{digest_bytes(opening.encode())[:16]}"

    def _tags_of(self, given: dict[str, Any]) -> dict[str, str]:
        tags: dict[str, str] = {}
        for tag, get in self._tags:
            value = get(given)
            if value is not _MISSING and value is not None and value != "":
                tags[tag] = value if type(value) is str else as_text(value)
        return tags

    def _mapped(self, given: dict[str, Any]) -> dict[str, Any]:
        found = {key: get(given) for key, get in self._columns.items()}
        return {key: value for key, value in found.items() if value is not _MISSING}

    def _with_missing(self, fault: RowError, mapped: dict[str, Any]) -> RowError:
        """The fault, with the columns of the map that the row does not have, which may be its cause."""
        missing = [f"'{self._source.columns[key]}'" for key in self._columns if key not in mapped]
        if not missing:
            return fault
        return RowError(f"{fault}; the row lacks {', '.join(missing)}, which source.columns names")

    def _parsed(self, given: dict[str, Any]) -> dict[str, Any]:
        made = dict(given)
        for column, get in self._json_columns:
            value = get(given)
            if isinstance(value, str):
                try:
                    made[column] = parse_value(value.encode("utf-8", errors="surrogatepass"))
                except RowError as fault:
                    raise RowError(f"the column '{column}': {fault}") from None
        return made


def columns_in(said: str) -> list[str]:
    """The columns that a value of `source.columns` names: itself, or those in the braces of a template."""
    holes = [match[1] for match in _HOLE.finditer(said)]
    return [hole for hole in holes if hole] if holes else [said]


def path_getter(path: str) -> Getter:
    """The value under a key, or under `outer.inner` where no key is called so."""
    if "." not in path:
        return lambda given: given.get(path, _MISSING)
    steps = path.split(".")

    def get(given: dict[str, Any]) -> Any:
        value: Any = given.get(path, _MISSING)
        if value is _MISSING:
            value = given
            for step in steps:
                value = value.get(step, _MISSING) if isinstance(value, dict) else _MISSING
        return value

    return get


def _getter(said: str) -> Getter:
    if not _HOLE.search(said):
        return path_getter(said)
    getters = {column: path_getter(column) for column in columns_in(said)}

    def get(given: dict[str, Any]) -> Any:
        values = {column: read(given) for column, read in getters.items()}
        for column, value in values.items():
            if value is _MISSING or value is None:
                raise RowError(f"the row has no '{column}', which source.columns asks for")
        return _HOLE.sub(lambda match: as_text(values[match[1]]) if match[1] else match[0][0], said)

    return get


def _first_key(path: str) -> str:
    return path.split(".")[0]
