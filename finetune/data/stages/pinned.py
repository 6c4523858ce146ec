"""Rows that are pinned to the regressions side: the file of an earlier build as it is, or rows of any shape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from finetune.data.read import Reject, SourceFile
from finetune.data.read.record import RowError, reject
from finetune.data.read.row_maker import RowMaker
from finetune.data.read.source import iter_records
from finetune.data.rows import Row
from finetune.data.spec_source import FilesSource, RowsSource, Source
from finetune.errors import UserError

_STORED_KEYS = frozenset({"id", "messages", "group", "source", "tags"})


def pinned_source(file: str, like: Source, spec_folder: Path, where: str) -> FilesSource:
    """How the file of pinned rows is read: as the rows of `like`, and none of it may be faulty."""
    if not (spec_folder / file).is_file():
        raise UserError(
            f"no such file: {spec_folder / file}",
            where=where,
            fix="correct the path; relative paths are taken from the folder of the spec",
        )
    given = {"files": [file], "max_reject_rate": 0.0, "format": "auto"}
    if isinstance(like, RowsSource):
        alike = like.model_dump(exclude_unset=True, include=set(RowsSource.model_fields))
        return FilesSource(**{**alike, "kind": "files", **given})
    return FilesSource(kind="files", **given)


def iter_pinned_rows(
    file: SourceFile, source: RowsSource, ignored_keys: Counter[str]
) -> Iterator[Row | Reject]:
    """A row that was stored by a build is taken as it is, with its id, group and tags; others are made into rows."""
    make = RowMaker(source, file.name, ignored_keys)
    for found in iter_records(file, source):
        if isinstance(found, Reject):
            yield found
            continue
        try:
            is_stored = found.value.keys() >= _STORED_KEYS
            yield Row.from_dict(found.value) if is_stored else make(found)
        except (RowError, ValueError, TypeError, KeyError) as fault:
            yield reject(file.name, found.line, found.byte, fault, found.raw)
