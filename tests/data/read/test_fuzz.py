"""Broken files: reading ends with rows, rejects and at most a UserError, and a line that is whole is never lost."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from finetune.data.read import Reject, iter_rows, source_files
from finetune.data.rows import Row
from finetune.data.spec_source import FilesSource
from finetune.errors import UserError

RECORDS: list[dict[str, Any]] = [
    {"prompt": f'question {n}, "quoted"; é\u2028', "completion": f"answer {n}", "note": "007"}
    for n in range(6)
] + [
    {
        "messages": [
            {"role": "user", "content": f"talk {n}"},
            {"role": "assistant", "content": f"reply {n}"},
        ],
        "tools": [{"type": "function", "function": {"name": "f", "n": n}}],
    }
    for n in range(6)
]
CELLS: list[dict[str, Any]] = [
    {"prompt": f'cell {n}, "quoted"; é', "completion": f"answer {n}", "note": "NA"} for n in range(12)
]
POISON = [
    b"\x00",
    b"\xff\xfe",
    b"\xed\xa0\x80",
    b'"',
    b"'",
    b"\\",
    b"\\ud800",
    b"[",
    b"]",
    b"{",
    b"}",
    b",",
    b":",
    b"\n",
    b"\r",
    b"\r\n",
    b"9" * 40,
    b"1e999",
    b"NaN",
    b"[" * 300,
    b'{"a":' * 300,
    b'"role": "user", ',
    b"null",
    b"\x1f\x8b",
    b"\xef\xbb\xbf",
    b"\x1a",
]
TEXT_FORMS = ("jsonl", "jsonl_named_json", "jsonl_bom_crlf", "csv_all_quoted", "csv", "tsv")
OTHER_FORMS = (
    "json",
    "json_indented",
    "json_item_a_line",
    "json_data",
    "json_objects",
    "json_utf16",
    "jsonl_utf16",
    "parquet",
    "arrow_stream",
    "arrow_file",
    "gzip",
    "zstd",
    "bzip2",
    "xz",
)


def broken(good: bytes, draw: random.Random) -> bytes:
    """A file with one to four faults: bytes changed, left out, put in, repeated, or the end cut off."""
    raw = bytearray(good)
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(raw) + 1)
        span = draw.choice((1, 1, 2, 5, 40))
        fault = draw.randrange(6)
        if fault == 0:
            raw[at : at + 1] = bytes([draw.randrange(256)])
        elif fault == 1:
            del raw[at : at + span]
        elif fault == 2:
            raw[at:at] = draw.choice(POISON)
        elif fault == 3:
            raw[at:at] = raw[at : at + span]
        elif fault == 4:
            raw[at : at + span] = draw.randbytes(span)
        else:
            del raw[draw.randrange(len(raw) // 2, len(raw) + 1) :]
    return bytes(raw)


def outcome(path: Path) -> tuple[list[Row], list[Reject]] | None:
    """Rows and rejects, or None where a UserError says that the file is none of rows."""
    source = FilesSource(kind="files", files=[path.name])
    try:
        [file] = source_files(source, path.parent)
        found = list(iter_rows(file, source))
    except UserError as error:
        assert str(error).strip()
        return None
    rejects = [one for one in found if isinstance(one, Reject)]
    for entry in rejects:
        assert entry.reason
        assert entry.line >= 1
        json.dumps(entry.to_dict()).encode()
    rows = [one for one in found if isinstance(one, Row)]
    for row in rows:
        json.dumps(row.to_dict(), ensure_ascii=False, allow_nan=False).encode()
    return rows, rejects


def whole_lines(good: bytes, bad: bytes) -> list[bytes]:
    """The lines of the good file, without its header if it has one, that the broken one still has."""
    known = {
        line.removesuffix(b"\r") for line in good.removeprefix(b"\xef\xbb\xbf").split(b"\n") if line.strip()
    }
    return [
        line for line in bad.removeprefix(b"\xef\xbb\xbf").split(b"\n") if line.removesuffix(b"\r") in known
    ]


def fuzz(written: Callable[..., str], tmp_path: Path, form: str, n_files: int, seed: str = "") -> int:
    name = written(form, CELLS if form.startswith(("csv", "tsv", "xz")) else RECORDS)
    path = tmp_path / name
    good = path.read_bytes()
    known = outcome(path)
    assert known is not None and len(known[0]) == 12 and not known[1]
    row_of = (
        dict(
            zip(
                (
                    line.removesuffix(b"\r")
                    for line in good.removeprefix(b"\xef\xbb\xbf").split(b"\n")[-13:-1]
                ),
                known[0],
                strict=True,
            )
        )
        if form in TEXT_FORMS
        else {}
    )
    draw = random.Random(form + seed)
    lines_checked = 0
    for _ in range(n_files):
        bad = broken(good, draw)
        path.write_bytes(bad)
        found = outcome(path)
        if form in TEXT_FORMS and (form.startswith("jsonl") or bad.startswith(good.split(b"\n")[0] + b"\n")):
            assert found is not None, bad
            ids = [row.id for row in found[0]]
            for line in whole_lines(good, bad):
                lines_checked += 1
                row = row_of.get(line.removesuffix(b"\r"))
                assert row is None or row.id in ids, (line, bad)
    return lines_checked


@pytest.mark.parametrize("form", TEXT_FORMS + OTHER_FORMS)
def test_ten_thousand_broken_files_give_no_traceback_and_lose_no_whole_line(
    written: Callable[..., str], tmp_path: Path, form: str
) -> None:
    lines_checked = fuzz(written, tmp_path, form, n_files=500)
    assert lines_checked > 1000 or form not in TEXT_FORMS
