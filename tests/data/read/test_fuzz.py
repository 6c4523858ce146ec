"""Broken files: reading ends with rows, rejects and at most a UserError, and a line, or a row of a document, that is whole is
never lost."""

from __future__ import annotations

import json
import random
import re
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
DOCUMENT_FORMS = ("json", "json_indented", "json_item_a_line", "json_data", "json_objects")
OTHER_FORMS = (
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


def in_document(form: str, record: dict[str, Any]) -> bytes:
    """A record as it stands in a document of this form."""
    if form == "json_indented":
        return json.dumps([record], indent=2)[2:-2].strip().encode()
    return json.dumps(record, ensure_ascii=form != "json_item_a_line").encode()


def stands_alone(document: bytes, record: bytes) -> bool:
    """Whether a record is in a document, and not as the value of a key or in another list than that of the rows."""
    places = [match.start() for match in re.finditer(re.escape(record), document)]
    before = [document[:place].rstrip() for place in places]
    return any(
        not text.endswith((b":", b"[")) or text in (b"[", b'{"version": "1", "data": [') for text in before
    )


def parts_of(row: Row) -> list[Any]:
    """All values inside a row."""
    waiting: list[Any] = [row.to_dict()]
    found: list[Any] = []
    while waiting:
        one = waiting.pop()
        found.append(one)
        waiting += one.values() if isinstance(one, dict) else one if isinstance(one, list) else []
    return found


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
    records = [(in_document(form, record), row) for record, row in zip(RECORDS, known[0], strict=True)]
    assert form not in DOCUMENT_FORMS or all(stands_alone(good, record) for record, _ in records)
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
        # Where the key of the rows is broken, the document is one row that is refused, and the build fails.
        if form in DOCUMENT_FORMS and (form != "json_data" or bad.startswith(good.split(b"{", 2)[1], 1)):
            assert found is not None, bad
            ids = [row.id for row in found[0]]
            for record, row in records:
                if stands_alone(bad, record):
                    lines_checked += 1
                    # Brackets may be left out in such a way that it is, by the rules of JSON, a part of the row before.
                    assert row.id in ids or any(row.messages[0] in parts_of(one) for one in found[0]), bad
    return lines_checked


@pytest.mark.parametrize("form", TEXT_FORMS + DOCUMENT_FORMS + OTHER_FORMS)
def test_ten_thousand_broken_files_give_no_traceback_and_lose_no_whole_row(
    written: Callable[..., str], tmp_path: Path, form: str
) -> None:
    lines_checked = fuzz(written, tmp_path, form, n_files=500)
    assert lines_checked > 1000 or form not in TEXT_FORMS + DOCUMENT_FORMS
