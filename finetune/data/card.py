"""The card of a build (README.md) and its Croissant metadata (croissant.json), written from the manifest alone.

Croissant is MLCommons' vocabulary for data sets, JSON-LD over schema.org: https://docs.mlcommons.org/croissant/docs/croissant-spec.html
Neither holds a date: the same build has the same card.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from finetune.data.rows import SIDES
from finetune.errors import UserError
from finetune.paths import disk_faults, write_json

CARD = "README.md"
CROISSANT = "croissant.json"
_NO_LICENCE = "unknown"
_FILES_SHOWN = 50
# What the Croissant vocabulary says words mean; every Croissant file carries it.
_CONTEXT = {
    "@language": "en",
    "@vocab": "https://schema.org/",
    "citeAs": "cr:citeAs",
    "column": "cr:column",
    "conformsTo": "dct:conformsTo",
    "cr": "http://mlcommons.org/croissant/",
    "rai": "http://mlcommons.org/croissant/RAI/",
    "data": {"@id": "cr:data", "@type": "@json"},
    "dataType": {"@id": "cr:dataType", "@type": "@vocab"},
    "dct": "http://purl.org/dc/terms/",
    "equivalentProperty": "cr:equivalentProperty",
    "examples": {"@id": "cr:examples", "@type": "@json"},
    "extract": "cr:extract",
    "field": "cr:field",
    "fileProperty": "cr:fileProperty",
    "fileObject": "cr:fileObject",
    "fileSet": "cr:fileSet",
    "format": "cr:format",
    "includes": "cr:includes",
    "isLiveDataset": "cr:isLiveDataset",
    "jsonPath": "cr:jsonPath",
    "key": "cr:key",
    "md5": "cr:md5",
    "parentField": "cr:parentField",
    "path": "cr:path",
    "recordSet": "cr:recordSet",
    "references": "cr:references",
    "regex": "cr:regex",
    "repeated": "cr:repeated",
    "replace": "cr:replace",
    "samplingRate": "cr:samplingRate",
    "sc": "https://schema.org/",
    "separator": "cr:separator",
    "source": "cr:source",
    "subField": "cr:subField",
    "transform": "cr:transform",
}
# Name -> (key of a row, key of each turn for what a row has several of, meaning)
_FIELDS = {
    "id": ("id", None, "Name of the row, stable when other rows come or go."),
    "roles": ("messages", "role", "Who speaks, turn by turn."),
    "contents": ("messages", "content", "What is said, turn by turn."),
    "group": ("group", None, "Rows of one group are on one side of the split."),
    "source": ("source", None, "File and line that the row was read from."),
}


def write_card(folder: Path, manifest: Mapping[str, Any]) -> tuple[Path, Path]:
    """Write the card and the Croissant metadata of a build into `folder`, which is made when it is not there."""
    card, croissant = folder / CARD, folder / CROISSANT
    with disk_faults(folder):
        folder.mkdir(parents=True, exist_ok=True)
        card.write_text(card_of(manifest), encoding="utf-8")
    write_json(croissant, croissant_of(manifest))
    return card, croissant


def card_of(manifest: Mapping[str, Any]) -> str:
    """The README of a build: what it holds, where each part is from and under which licence, what was left out and why."""
    name = str(manifest["name"])
    lines = [
        "---",
        f"license: {json.dumps(_hub_licence(manifest), ensure_ascii=False)}",
        f"pretty_name: {json.dumps(name)}",
        "configs:",
        "- config_name: default",
        "  data_files:",
        *(f"  - {{split: {side}, path: {side}.jsonl}}" for side in _filled(manifest)),
        "---",
        "",
        f"# {_one_line(name)}",
        "",
        *([_one_line(str(manifest["description"])), ""] if manifest.get("description") else []),
        f"Build `{manifest['digest'][:16]}`, seed {manifest['seed']}. Licence: {_licence_words(manifest)}.",
        "",
        *_sides(manifest),
        *_sources(manifest),
        *_ledger(manifest),
        *_leaks(manifest),
    ]
    return "\n".join(lines).rstrip() + "\n"


def croissant_of(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The Croissant metadata of a build: its files with their digests, and the fields of a row."""
    name = str(manifest["name"])
    files = manifest["files"]
    sides = _filled(manifest)
    licences = [licence for licence in _licences(manifest) if licence != _NO_LICENCE]
    return {
        "@context": _CONTEXT,
        "@type": "sc:Dataset",
        "conformsTo": "http://mlcommons.org/croissant/1.0",
        "name": name,
        "description": str(
            manifest.get("description") or f"Rows to tune and evaluate a language model: {name}."
        ),
        "version": f"1.0.0+{manifest['digest'][:16]}",
        **({"license": licences[0] if len(licences) == 1 else licences} if licences else {}),
        "distribution": [
            {
                "@type": "cr:FileObject",
                "@id": f"{side}.jsonl",
                "name": f"{side}.jsonl",
                "contentUrl": f"{side}.jsonl",
                "contentSize": f"{files[f'{side}.jsonl']['bytes']} B",
                "encodingFormat": "application/jsonlines",
                "sha256": files[f"{side}.jsonl"]["sha256"],
            }
            for side in sides
        ],
        "recordSet": [_record_set(side) for side in sides],
    }


def _record_set(side: str) -> dict[str, Any]:
    return {
        "@type": "cr:RecordSet",
        "@id": side,
        "name": side,
        "description": f"The rows of the {side} side, one a line.",
        "field": [_field(side, name, *described) for name, described in _FIELDS.items()],
    }


def _field(side: str, name: str, column: str, part: str | None, meaning: str) -> dict[str, Any]:
    source: dict[str, Any] = {"fileObject": {"@id": f"{side}.jsonl"}, "extract": {"column": column}}
    field = {
        "@type": "cr:Field",
        "@id": f"{side}/{name}",
        "name": name,
        "description": meaning,
        "dataType": "sc:Text",
        "source": source,
    }
    if part is None:
        return field
    source["transform"] = {"jsonPath": f"$.{part}"}
    return field | {"repeated": True}


def _filled(manifest: Mapping[str, Any]) -> list[str]:
    return [side for side in SIDES if manifest["splits"][side]["rows"]]


def _parts(manifest: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Every source of the rows; that of the pinned rows comes last."""
    given = manifest["source"]
    pinned = manifest.get("pinned")
    return [*given.get("sources", [given]), *([pinned] if pinned else [])]


def _licence_of(part: Mapping[str, Any], manifest: Mapping[str, Any]) -> str:
    """The licence of a part: its own, or that of the whole."""
    return str(part.get("licence") or manifest.get("licence") or _NO_LICENCE)


def _model_terms(part: Mapping[str, Any]) -> str | None:
    """What the terms of the model that wrote a generated part allow; None for parts that no model wrote."""
    if part.get("kind") != "generated":
        return None
    return str(part.get("model_licence") or _NO_LICENCE)


def _licences(manifest: Mapping[str, Any]) -> list[str]:
    """The licences of all parts, and of the models that wrote some of them, each once."""
    found: dict[str, None] = {}
    for part in _parts(manifest):
        found[_licence_of(part, manifest)] = None
        if (terms := _model_terms(part)) is not None:
            found[terms] = None
    return list(found)


def _hub_licence(manifest: Mapping[str, Any]) -> str | list[str]:
    """SPDX names in small letters, as the hub's cards spell them."""
    licences = [licence.lower() for licence in _licences(manifest)]
    return licences[0] if len(licences) == 1 else licences


def _licence_words(manifest: Mapping[str, Any]) -> str:
    unknown = "unknown: ask whoever owns the sources before you share rows, or a model that learnt them"
    licences = _licences(manifest)
    words = [unknown if licence == _NO_LICENCE else _one_line(licence) for licence in licences]
    if len(words) == 1:
        return words[0]
    return f"each part has its own, and all of them hold for the whole ({'; '.join(words)})"


def _sides(manifest: Mapping[str, Any]) -> list[str]:
    rows = [
        [side, f"{manifest['splits'][side]['rows']}", f"`{manifest['splits'][side]['digest'][:16]}`"]
        for side in SIDES
    ]
    return ["## Sides", "", *_table(["side", "rows", "digest"], rows), ""]


def _sources(manifest: Mapping[str, Any]) -> list[str]:
    """A line for every source, with its licence and its rows; then a line for every file or package."""
    parts = _parts(manifest)
    sources = [
        [
            str(number),
            _one_line(_from(part, is_pinned=part is manifest.get("pinned"))),
            _one_line(_licence_words_of(part, manifest)),
            str(part.get("read", "")),
        ]
        for number, part in enumerate(parts, start=1)
    ]
    files = [
        [str(number), _one_line(name), f"`{str(what)[:16]}`"]
        for number, part in enumerate(parts, start=1)
        for name, what in {**part.get("files", {}), **part.get("packages", {})}.items()
    ]
    more = len(files) - _FILES_SHOWN
    return [
        "## Sources",
        "",
        *_table(["source", "from", "licence", "rows read"], sources),
        "",
        *_table(["source", "file or package", "SHA-256 or version"], files[:_FILES_SHOWN]),
        *([f"\nand {more} more, in `manifest.json`"] if more > 0 else []),
        "",
    ]


def _licence_words_of(part: Mapping[str, Any], manifest: Mapping[str, Any]) -> str:
    """The licence of a part; of answers also what the terms of their model allow, which may forbid training others."""
    own, terms = _licence_of(part, manifest), _model_terms(part)
    if terms is None:
        return own
    if terms == _NO_LICENCE:
        terms = "unknown: find out whether others may be trained on its answers (source.model.licence)"
    return f"{own}; terms of the model: {terms}"


def _from(part: Mapping[str, Any], *, is_pinned: bool) -> str:
    """Where a part is from, in words."""
    words = {
        "hub": f"dataset {part.get('dataset')} of the Hugging Face hub",
        "home_intents": "sentence templates of Home Assistant, sampled",
        "generated": f"answers of the model {part.get('model')} to the prompts of {part.get('prompts')}",
    }
    said, origin = words.get(str(part.get("kind"))), part.get("origin")
    if said is None:
        said = str(origin or "own files")
    elif origin:
        said += f" ({origin})"
    return f"{said}; pinned as regressions" if is_pinned else said


def _ledger(manifest: Mapping[str, Any]) -> list[str]:
    ledger = manifest["ledger"]
    dropped = ledger["dropped"]
    return [
        "## What was left out",
        "",
        f"{ledger['read']} rows read = {ledger['kept']} kept + {sum(dropped.values())} dropped + {ledger['quarantined']} "
        "quarantined. Each of them is named in `ledger.jsonl` or `rejects.jsonl`.",
        "",
        *(
            _table(["reason", "rows"], [[reason, str(n)] for reason, n in sorted(dropped.items())])
            if dropped
            else []
        ),
        *([""] if dropped else []),
    ]


def _leaks(manifest: Mapping[str, Any]) -> list[str]:
    leaks = ", ".join(f"{kind} {n}" for kind, n in manifest["leaks"].items())
    return ["## Between sides", "", f"Leaks: {leaks}. `finetune data check` proves it from the files.", ""]


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return [*lines, *("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)]


def _one_line(text: str) -> str:
    """Text of a spec or a file name on one line, without markup: a card is shown on web pages."""
    return " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;")


def require_manifest(manifest: Mapping[str, Any], where: str) -> None:
    """Raise UserError for a build of an older version, whose manifest does not list its files."""
    if "files" not in manifest:
        raise UserError("the manifest does not list its files", where=where, fix="build the data set again")
