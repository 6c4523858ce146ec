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
        f"license: {json.dumps(_hub_licence(manifest))}",
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
    licence = _licence_of(manifest)
    return {
        "@context": _CONTEXT,
        "@type": "sc:Dataset",
        "conformsTo": "http://mlcommons.org/croissant/1.0",
        "name": name,
        "description": str(
            manifest.get("description") or f"Rows to tune and evaluate a language model: {name}."
        ),
        "version": f"1.0.0+{manifest['digest'][:16]}",
        **({"license": licence} if licence != _NO_LICENCE else {}),
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


def _licence_of(manifest: Mapping[str, Any]) -> str:
    return str(manifest.get("licence") or _NO_LICENCE)


def _hub_licence(manifest: Mapping[str, Any]) -> str:
    """SPDX names in small letters, as the hub's cards spell them."""
    return _licence_of(manifest).lower()


def _licence_words(manifest: Mapping[str, Any]) -> str:
    licence = _licence_of(manifest)
    if licence == _NO_LICENCE:
        return "unknown: ask whoever owns the sources before you share rows, or a model that learnt them"
    return _one_line(licence)


def _sides(manifest: Mapping[str, Any]) -> list[str]:
    rows = [
        [side, f"{manifest['splits'][side]['rows']}", f"`{manifest['splits'][side]['digest'][:16]}`"]
        for side in SIDES
    ]
    return ["## Sides", "", *_table(["side", "rows", "digest"], rows), ""]


def _sources(manifest: Mapping[str, Any]) -> list[str]:
    """One line a file or package of every source, with its licence where one is named."""
    rows: list[list[str]] = []
    given = manifest["source"]
    for source in given.get("sources", [given]):
        licence = str(source.get("licence") or _licence_of(manifest))
        parts = {**source.get("files", {}), **source.get("packages", {})} or {
            str(source.get("kind", "?")): ""
        }
        rows += [
            [_one_line(part), _one_line(licence), f"`{str(what)[:16]}`" if what else ""]
            for part, what in parts.items()
        ]
    shown, more = rows[:50], len(rows) - 50
    return [
        "## Sources",
        "",
        *_table(["part", "licence", "version or SHA-256"], shown),
        *([f"\nand {more} more, in `manifest.json`"] if more > 0 else []),
        "",
    ]


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
