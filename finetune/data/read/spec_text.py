"""A dataset spec, ready to build, for rows that were inspected."""

from __future__ import annotations

import json
import math
import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from finetune.data.read.inspect import Inspection
from finetune.data.read.row_maker import columns_in
from finetune.data.spec_source import FilesSource, HubSource, RowsSource

_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_.@/-]*")
_NOT_PLAIN = frozenset({"null", "true", "false", "yes", "no", "on", "off", "y", "n"})
_SMALL = 20  # with fewer groups than this, a hash may leave the train side empty
_TAG_VALUES = range(2, 51)
_GROUP_NAME = re.compile(
    r"(?:^|_)(?:user|customer|author|conversation|session|thread|dialog|doc|document|source|template|topic)(?:_?(?:id|name|uuid))?$",
    re.IGNORECASE,
)


def spec_text(found: Inspection, name: str, *, spec_folder: Path = Path()) -> str:
    """The YAML of a spec with the chosen reading stated, and with hints about keys that the build could use.

    Paths of files, which were inspected from the working folder, are written as seen from `spec_folder`.
    """
    tally = found.chosen
    lines = [
        "dataset: 1",
        f"name: {_scalar(name)}",
        "licence: unknown  # of the rows: an SPDX name such as CC-BY-4.0",
        "source:",
        *(f"  {line}" for line in _source_lines(tally.source, spec_folder)),
    ]
    if found.reject_rate > tally.source.max_reject_rate:
        limit = min(1.0, math.ceil(found.reject_rate * 105) / 100)
        lines.append(f"  max_reject_rate: {limit:g}  # {found.reject_rate:.1%} of the rows are faulty")
    lines += [f"  # {hint}" for hint in _hints(found)]
    lines.append("split:")
    if len(tally.groups) < _SMALL:
        lines.append(f"  shares: {{train: 1.0}}  # {len(tally.groups)} groups are too few to split")
    else:
        lines.append("  shares: {train: 0.8, validation: 0.05, test: 0.15}")
    return "\n".join(lines) + "\n"


def dataset_name(files: list[str]) -> str:
    """A name for a dataset after its files: letters, digits, '.', '_' and '-'."""
    stem = files[0].rstrip("/").rpartition("/")[2]
    for _ in range(2):
        stem = re.sub(
            r"\.(jsonl?|ndjson|csv|tsv|tab|parquet|arrow|feather|txt|text|md|gz|zst|bz2|xz)$", "", stem
        )
    return re.sub(r"[^A-Za-z0-9._-]+", "_", stem).strip("._-") or "rows"


def _source_lines(source: RowsSource, spec_folder: Path) -> Iterator[str]:
    stated = source.model_dump(exclude_defaults=True)
    stated.pop("kind", None)
    if isinstance(source, FilesSource):
        yield "kind: files"
        yield f"files: {_flow([_seen_from(spec_folder, file) for file in stated.pop('files')])}"
    elif isinstance(source, HubSource):
        yield "kind: hub"
        if Path(source.id).is_dir():
            stated["id"] = _seen_from(spec_folder, source.id)
        for key in ("id", "revision", "name", "split"):
            if key in stated:
                yield f"{key}: {_flow(stated.pop(key))}"
    for key, value in stated.items():
        yield f"{key}: {_flow(value)}"


def _seen_from(folder: Path, file: str) -> str:
    return file if Path(file).expanduser().is_absolute() else Path(os.path.relpath(file, folder)).as_posix()


def _hints(found: Inspection) -> Iterator[str]:
    """Columns that could be the group or tags of the rows; both are choices, so they are shown and not made."""
    mapped = {column for said in found.chosen.source.columns.values() for column in columns_in(said)}
    free = {
        key: values
        for key, values in found.columns.items()
        if key in found.chosen.ignored_keys and key not in mapped
    }
    tags = []
    for key, values in free.items():
        if _is_group(key, values, found.read):
            yield f"group_by: {_scalar(key)}  # rows of one value stay on one side; {_many(values)} values"
        elif len(values) in _TAG_VALUES and sum(values.values()) >= 0.9 * found.read > 2 * len(values):
            tags.append(key)
    if tags:
        yield f"tags: {_flow(tags)}  # kept with the rows, for balance, strata and coverage"


def _is_group(key: str, values: Counter[str], n_rows: int) -> bool:
    repeated = any(count > 1 for _, count in values.most_common(1))
    return (
        bool(_GROUP_NAME.search(key))
        and repeated
        and len(values) >= _SMALL
        and sum(values.values()) >= min(0.9 * n_rows, 900)
    )


def _many(values: Counter[str]) -> str:
    return f"{len(values)}" if len(values) <= 1000 else "more than 1,000"


def _flow(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_scalar(key)}: {_flow(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_flow(item) for item in value) + "]"
    return _scalar(value) if isinstance(value, str) else json.dumps(value)


def _scalar(text: str) -> str:
    plain = _PLAIN.fullmatch(text) and text.casefold() not in _NOT_PLAIN
    return text if plain else json.dumps(text)
