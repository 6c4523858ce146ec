"""The JSON Schema and the reference page of the recipe, written from the schema: the descriptions there are the only ones.

To renew the committed page: finetune recipe schema --markdown > docs/recipe_reference.md
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from finetune.recipe.annotations import accepted, describe, fields_of
from finetune.recipe.renamed import RECIPE_NAMES_ELSEWHERE
from finetune.recipe.resolve import RESULT_NEUTRAL
from finetune.recipe.schema import RecipeFile
from finetune.recipe.suggest import dotted_keys

_SIGNS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}

_HEAD = """\
# Recipe reference

Written from the schema by `finetune recipe schema --markdown > docs/recipe_reference.md`; do not edit by hand.
A recipe is one YAML file (YAML 1.2) that fixes a run. Unknown keys, wrong types and values out of range are refused, all
at once, each with file, line, column and what to write. `finetune recipe show RECIPE` prints every value in force and
where it comes from; `finetune recipe validate RECIPE` checks without starting anything.

- **Numbers** in every spelling: `2e-5`, `2E-5`, `.5`, `1e3`, `1_000`, `'2e-5'`. A key for whole numbers refuses `1.5`.
- **Booleans** are `true` and `false` only; `yes`, `no`, `on` and `off` are text and are refused with a hint.
- **Text** keeps its spelling: `name: 007` is the text 007.
- **Overrides**: `--set train.learning_rate=1e-4`, as often as wanted; the value follows YAML (`--set eval.suites=[a, b]`,
  `--set train.max_steps=null`). A list replaces a list; a mapping changes only the keys it names. With make:
  `SET="train.epochs=1 profile=smoke"`.
- **Profiles**: `profiles:` holds named sets of dotted overrides. `profile: smoke` or `--set profile=smoke` applies one;
  the order is file, profile, other `--set`. Profiles that are not used are checked too.
- **Extends**: `extends: home_intents_lora.yaml` starts from another recipe, by path from this file (never from the working
  folder) or by shipped name; this file then holds only what differs, and required keys may come from there. Mappings merge
  key by key, lists and single values replace; a section with nothing below it changes nothing, `null` takes it back to its
  defaults. Profiles of one name merge too. `name` and `description` are not taken over. Relative paths start from the file
  that writes them. Chains work. The resolved recipe is whole, without `extends`; its digest is that of the same recipe
  written out in full.
- **Digest**: the run folder is named after the recipe and a digest of its resolved content. A run may be continued
  after changing one of these keys, which are left out of the digest because they change no number of the result:
  {neutral}.
"""


def reference_markdown() -> str:
    """The whole page, with a final newline; the same schema gives the same bytes."""
    neutral = ", ".join(f"`{key}`" for key in RESULT_NEUTRAL)
    tables = section_tables(RecipeFile, "", "Top of the file", {"name": "the file's stem"})
    parts = [_HEAD.format(neutral=neutral), *tables, _elsewhere()]
    return "\n".join(parts)


def recipe_json_schema() -> dict[str, Any]:
    """JSON Schema of a recipe file, for editors. Keys are required only where no `extends` can bring them, and `name`
    never, as it defaults to the file's stem.
    """
    schema = RecipeFile.model_json_schema()
    required = [key for key in schema.pop("required") if key != "name"]
    needed = _requirements(schema["properties"], schema["$defs"])
    for section in schema["$defs"].values():
        section.pop("required", None)
    schema["if"] = {"properties": {"extends": {"type": "null"}}}
    schema["then"] = {"required": required, "properties": needed}
    return schema


def _requirements(properties: Mapping[str, Any], sections: Mapping[str, Any]) -> dict[str, Any]:
    """Key -> what JSON Schema demands of the section below it, once the section is there."""
    found: dict[str, Any] = {}
    for key, held in properties.items():
        for one in (held, *held.get("anyOf", ())):
            if "$ref" not in one:
                continue
            section = sections[one["$ref"].rpartition("/")[2]]
            below = _requirements(section.get("properties", {}), sections)
            demand = {name: value for name in ("required",) if (value := section.get(name))}
            if below:
                demand["properties"] = below
            if demand:
                found[key] = demand
    return found


def section_tables(
    model: type[BaseModel], prefix: str, title: str, defaults: Mapping[str, str] | None = None
) -> Iterator[str]:
    """A heading and a table of keys for a section and for each one below it; also of other schemas than the recipe.

    `defaults` words the default of a dotted key that the schema does not know.
    """
    known = defaults or {}
    rows = ["| key | takes | default | meaning |", "|---|---|---|---|"]
    below: list[tuple[str, str, type[BaseModel]]] = []
    for name, field in fields_of(model).items():
        dotted = f"{prefix}{name}"
        sections = _sections_in(field.annotation)
        for section in sections:
            below.append((dotted, _section_title(dotted, section, one_of_many=len(sections) > 1), section))
        meaning = field.description or "; ".join(_first_line(section) for section in sections)
        if not meaning and name == "kind":
            meaning = "Chooses this section."
        cells = [f"`{dotted}`", _takes(field), known.get(dotted) or _default(field), meaning]
        rows.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    yield "\n".join([f"## {title}", "", _first_line(model), "", *rows, ""])
    for dotted, heading, section in below:
        yield from section_tables(section, f"{dotted}.", heading, known)


def _sections_in(annotation: Any) -> tuple[type[BaseModel], ...]:
    """The sections that may stand under a key, alone or as members of a list."""
    form = accepted(annotation)
    return form.models or tuple(model for item in form.items or () for model in accepted(item).models)


def _section_title(dotted: str, section: type[BaseModel], *, one_of_many: bool) -> str:
    """The key; of a section that is one of several, with the word by which it is chosen."""
    kind = fields_of(section).get("kind")
    if not one_of_many or kind is None:
        return f"`{dotted}`"
    words = " or ".join(str(word) for word in accepted(kind.annotation).literals)
    return f"`{dotted}` with `kind: {words}`"


def _takes(field: FieldInfo) -> str:
    limits = [*_limits_of(field.metadata), *_limits(field.annotation)]
    words = describe(field.annotation)
    return f"{words}, {', '.join(dict.fromkeys(limits))}" if limits else words


def _limits(annotation: Any) -> Iterator[str]:
    """The limits anywhere inside an annotation, such as the `≥ 1` of `Count | None`."""
    if get_origin(annotation) is Annotated:
        inner, *metadata = get_args(annotation)
        for item in metadata:
            yield from _limits_of(item.metadata if isinstance(item, FieldInfo) else [item])
        yield from _limits(inner)
    else:
        for argument in get_args(annotation):
            if not isinstance(argument, str | int | float):
                yield from _limits(argument)


def _limits_of(metadata: list[Any]) -> Iterator[str]:
    for item in metadata:
        for name, sign in _SIGNS.items():
            if (limit := getattr(item, name, None)) is not None:
                yield f"{sign} {limit}"
        if getattr(item, "min_length", None):
            yield "not empty" if item.min_length == 1 else f"at least {item.min_length} entries"
        if pattern := getattr(item, "pattern", None):
            yield f"pattern `{pattern}`"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "**required**"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, BaseModel):
        return "its defaults"
    return (
        f"`{json.dumps(value, ensure_ascii=False)}`"
        if not isinstance(value, str) or not value
        else f"`{value}`"
    )


def _first_line(model: type[BaseModel]) -> str:
    return (model.__doc__ or "").strip().splitlines()[0] if model.__doc__ else ""


def _elsewhere() -> str:
    known = set(dotted_keys(RecipeFile))
    names: dict[str, list[str]] = {}
    for name, target in RECIPE_NAMES_ELSEWHERE.items():
        if target in known:
            names.setdefault(target, []).append(f"`{name}`")
    rows = [f"| `{target}` | {', '.join(sorted(found))} |" for target, found in sorted(names.items())]
    head = "## Names used by other tools\n\nNone of them is accepted; each is refused with the key to write instead.\n"
    return "\n".join([head, "| key here | elsewhere |", "|---|---|", *rows, ""])
