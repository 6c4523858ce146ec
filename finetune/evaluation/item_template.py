"""Items out of any columns: templates and column names of a suite's `items`, applied to one record at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from jinja2 import StrictUndefined, TemplateError, TemplateSyntaxError, Undefined, UndefinedError
from jinja2.sandbox import SandboxedEnvironment

from finetune.errors import Fault, UserError, did_you_mean
from finetune.evaluation.item_source import ItemsSection
from finetune.evaluation.items import Item

Record = Mapping[str, Any]
_TEMPLATES = ("prompt", "reference", "system", "id", "group")


class ColumnError(ValueError):
    """A record that no item can be made of; the message says which field is to blame."""


def check_templates(section: ItemsSection, *, where: str) -> None:
    """Refuse templates and expressions that cannot be read, all at once, before any record is."""
    faults = []
    written = {name: getattr(section, name) for name in _TEMPLATES}
    written |= {f"tags.{tag}": text for tag, text in section.tags.items()}
    for key, text in written.items():
        if text is not None and _is_template(text):
            faults += _problem(_compiled, text, f"{where}: items.{key}")
    for key, text in section.check.items():
        faults += _problem(_expression, text, f"{where}: items.check.{key}")
    if faults:
        raise UserError(faults)


def item_from_record(record: Record, section: ItemsSection, *, number: int, source: str, texts: bool) -> Item:
    """One item out of the columns of a record. number: its place, from 0, which names it when the section does not.

    texts: the reference alone is the item. Raises ColumnError naming the field that is missing, null or no text.
    """
    assert section.reference is not None
    name = _text(section.id, record, "id") if section.id is not None else str(number)
    turns = []
    if not texts:
        if section.system is not None:
            turns.append({"role": "system", "content": _text(section.system, record, "system")})
        if section.prompt is None:
            raise ColumnError("items.prompt is not given")
        turns.append({"role": "user", "content": _text(section.prompt, record, "prompt")})
    check = {key: _value(text, record, f"check.{key}") for key, text in section.check.items()}
    return Item(
        id=name,
        messages=tuple(turns),
        reference=_text(section.reference, record, "reference"),
        cluster=_text(section.group, record, "group") if section.group is not None else name,
        source=source,
        tags={tag: _text(text, record, f"tags.{tag}") for tag, text in section.tags.items()},
        check=check or None,
    )


def _text(template: str, record: Record, key: str) -> str:
    """A template rendered, or the text of a column exactly as it is; whole numbers are written out."""
    if _is_template(template):
        return str(_guarded(lambda: _compiled(template).render(record), record, key))
    if template not in record:
        raise ColumnError(f"items.{key}: no column '{template}'; {did_you_mean(template, record)}")
    value = record[template]
    if isinstance(value, str):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    kind = "null" if value is None else f"{type(value).__name__}, not text"
    raise ColumnError(f"items.{key}: the column '{template}' is {kind}")


def _value(expression: str, record: Record, key: str) -> Any:
    value = _guarded(lambda: _expression(expression)(**record), record, key)
    if isinstance(value, Undefined):
        raise ColumnError(f"items.{key}: {_missing(str(value._undefined_message), record)}")
    return value


def _guarded(work: Callable[[], Any], record: Record, key: str) -> Any:
    try:
        return work()
    except UndefinedError as error:
        raise ColumnError(f"items.{key}: {_missing(str(error), record)}") from None
    except (TemplateError, ValueError, TypeError, KeyError, IndexError, ArithmeticError) as error:
        raise ColumnError(f"items.{key}: {error}") from None


def _missing(message: str, record: Record) -> str:
    return f"{message}; columns: {', '.join(record)}"


def _is_template(text: str) -> bool:
    return "{{" in text or "{%" in text


@cache
def _environment() -> SandboxedEnvironment:
    # What a template writes is text for a model, not a page: nothing is escaped, and the last line break is kept.
    return SandboxedEnvironment(
        undefined=StrictUndefined, autoescape=False, keep_trailing_newline=True, finalize=_refuse_null
    )


def _refuse_null(value: Any) -> Any:
    if value is None:
        raise ValueError("a field of the template is null; write {{ field or '' }} where that is meant")
    return value


@cache
def _compiled(template: str) -> Any:
    return _environment().from_string(template)


@cache
def _expression(text: str) -> Any:
    return _environment().compile_expression(text, undefined_to_none=False)


def _problem(compile_: Callable[[str], Any], text: str, where: str) -> list[Fault]:
    try:
        compile_(text)
    except TemplateSyntaxError as error:
        return [
            Fault(f"the template cannot be read: {error.message}", where, fix="see the Jinja documentation")
        ]
    return []
