"""What the tests of reading share: files of every format written on the spot, and reading them with any source section."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet
import pytest
import zstandard

from finetune.data.read import Reject, iter_rows, source_files, split_ranges
from finetune.data.rows import Row
from finetune.data.spec_source import FilesSource

Records = list[dict[str, Any]]


@dataclass(frozen=True)
class Outcome:
    """What reading gave."""

    rows: list[Row]
    rejects: list[Reject]
    ignored_keys: Counter[str]

    @property
    def reasons(self) -> list[str]:
        return [entry.reason for entry in self.rejects]


@pytest.fixture
def read(tmp_path: Path) -> Callable[..., Outcome]:
    """read(content, name=…, **source): write a file (bytes, or records as JSON lines) and read it; or read given files."""

    def run(content: bytes | Records | None = None, name: str = "rows.jsonl", **source: Any) -> Outcome:
        if content is not None:
            (tmp_path / name).write_bytes(content if isinstance(content, bytes) else as_lines(content))
        section = FilesSource(**{"kind": "files", "files": [name], **source})
        found: list[Row | Reject] = []
        ignored: Counter[str] = Counter()
        for file in source_files(section, tmp_path):
            found += iter_rows(file, section, ignored_keys=ignored)
        rows = [one for one in found if isinstance(one, Row)]
        return Outcome(rows, [one for one in found if isinstance(one, Reject)], ignored)

    return run


@pytest.fixture
def read_in_ranges(tmp_path: Path) -> Callable[..., list[Row | Reject]]:
    """read_in_ranges(name, n_bytes, **source): the file read range by range, and what came out in one list."""

    def run(name: str, n_bytes: int, **source: Any) -> list[Row | Reject]:
        section = FilesSource(**{"kind": "files", "files": [name], **source})
        [file] = source_files(section, tmp_path)
        return [
            one for within in split_ranges(file, n_bytes) for one in iter_rows(file, section, within=within)
        ]

    return run


def as_lines(records: Records, **how: Any) -> bytes:
    return b"".join(
        json.dumps(record, **{"ensure_ascii": False, **how}).encode() + b"\n" for record in records
    )


def as_csv(records: Records, delimiter: str = ",", quoting: Any = csv.QUOTE_MINIMAL) -> bytes:
    """Cells as CSV has them: text as it is, anything else as JSON."""
    keys = list(dict.fromkeys(key for record in records for key in record))
    stream = io.StringIO(newline="")
    writer = csv.writer(stream, delimiter=delimiter, quoting=quoting)
    writer.writerow(keys)
    for record in records:
        cells = [record.get(key, "") for key in keys]
        writer.writerow([cell if isinstance(cell, str) else json.dumps(cell) for cell in cells])
    return stream.getvalue().encode()


def as_table(records: Records) -> pa.Table:
    keys = list(dict.fromkeys(key for record in records for key in record))
    return pa.table({key: pa.array([record.get(key) for record in records]) for key in keys})


def as_parquet(records: Records) -> bytes:
    sink = io.BytesIO()
    pa.parquet.write_table(as_table(records), sink, row_group_size=3)
    return sink.getvalue()


def as_arrow(records: Records, opened: Callable[..., Any] = pa.ipc.new_stream) -> bytes:
    table, sink = as_table(records), io.BytesIO()
    with opened(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=3)
    return sink.getvalue()


FORMATS: dict[str, tuple[str, Callable[[Records], bytes]]] = {
    "jsonl": ("rows.jsonl", as_lines),
    "jsonl_ascii": ("rows.ndjson", lambda records: as_lines(records, ensure_ascii=True)),
    "jsonl_named_json": ("rows.json", as_lines),
    "jsonl_without_suffix": ("rows", as_lines),
    "jsonl_bom_crlf": (
        "rows.jsonl",
        lambda records: b"\xef\xbb\xbf" + as_lines(records).replace(b"\n", b"\r\n"),
    ),
    "jsonl_utf16": ("rows.jsonl", lambda records: as_lines(records).decode().encode("utf-16")),
    "json": ("rows.json", lambda records: json.dumps(records).encode()),
    "json_indented": ("rows.json", lambda records: json.dumps(records, indent=2).encode()),
    "json_item_a_line": (
        "rows.json",
        lambda records: b"[\n" + as_lines(records).rstrip().replace(b"\n", b",\n") + b"\n]",
    ),
    "json_data": (
        "rows.json",
        lambda records: json.dumps({"version": "1", "data": records, "more": [{"a": [1]}]}).encode(),
    ),
    "json_objects": ("rows.json", lambda records: "".join(json.dumps(record) for record in records).encode()),
    "json_utf16": ("rows.json", lambda records: json.dumps(records, ensure_ascii=False).encode("utf-16-be")),
    "csv": ("rows.csv", as_csv),
    "csv_semicolon": ("rows.csv", lambda records: as_csv(records, ";")),
    "csv_bom": ("rows.csv", lambda records: b"\xef\xbb\xbf" + as_csv(records)),
    "csv_all_quoted": ("rows.csv", lambda records: as_csv(records, quoting=csv.QUOTE_ALL)),
    "csv_utf16": ("rows.csv", lambda records: as_csv(records).decode().encode("utf-16")),
    "tsv": ("rows.tsv", lambda records: as_csv(records, "\t")),
    "parquet": ("rows.parquet", as_parquet),
    "arrow_stream": ("rows.arrow", as_arrow),
    "arrow_file": ("rows.arrow", lambda records: as_arrow(records, pa.ipc.new_file)),
    "gzip": ("rows.jsonl", lambda records: gzip.compress(as_lines(records))),
    "zstd": ("rows.jsonl.zst", lambda records: zstandard.compress(as_lines(records))),
    "bzip2": ("rows.jsonl.bz2", lambda records: bz2.compress(as_lines(records))),
    "xz": ("rows.csv.xz", lambda records: lzma.compress(as_csv(records))),
    "json_gzip": ("rows.json.gz", lambda records: gzip.compress(json.dumps(records).encode())),
}


@pytest.fixture(params=sorted(FORMATS))
def form(request: pytest.FixtureRequest) -> str:
    """The name of a way to write rows."""
    return str(request.param)


@pytest.fixture
def written(tmp_path: Path) -> Callable[[str, Records], str]:
    """written(form, records): the name of a file under tmp_path that holds the records in that form."""

    def write(form: str, records: Records) -> str:
        name, make = FORMATS[form]
        (tmp_path / name).write_bytes(make(records))
        return name

    return write
