"""Compressed and encoded files give the lines of the plain one, with the right numbers and bytes, up to where they break."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from collections.abc import Callable
from typing import Any

import pytest
import zstandard

COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "zstd": zstandard.compress,
    "bzip2": bz2.compress,
    "xz": lzma.compress,
}
RECORDS = [{"prompt": f"q{n}", "completion": str(n * 7919 % 10007) * 5} for n in range(3000)]
LINES = [json.dumps(record).encode() + b"\n" for record in RECORDS]


def answers(found: Any) -> list[str]:
    return [row.answer for row in found.rows]


@pytest.mark.parametrize("method", sorted(COMPRESS))
def test_members_one_after_another_are_one_file(read: Callable[..., Any], method: str) -> None:
    compress = COMPRESS[method]
    found = read(compress(b"".join(LINES[:2000])) + compress(b"".join(LINES[2000:])))
    assert answers(found) == [record["completion"] for record in RECORDS]
    assert found.rejects == []


@pytest.mark.parametrize("method", sorted(COMPRESS))
@pytest.mark.parametrize("form", ["jsonl", "json", "csv"])
def test_a_file_that_breaks_off_keeps_what_stands_before(
    read: Callable[..., Any], method: str, form: str
) -> None:
    plain = {
        "jsonl": b"".join(LINES),
        "json": json.dumps(RECORDS).encode(),
        "csv": b"prompt,completion\n"
        + b"".join(f"{record['prompt']},{record['completion']}\n".encode() for record in RECORDS),
    }[form]
    found = read(COMPRESS[method](plain)[:-2500], f"rows.{form}")
    whole = answers(found)
    assert whole == [record["completion"] for record in RECORDS[: len(whole)]]
    assert len(whole) > 100 or method in ("bzip2", "zstd")  # which unpack blocks of 100 kB and more
    assert "breaks off" in found.rejects[-1].reason
    assert len(found.rejects) <= 2


def test_damage_in_the_middle_is_a_reject(read: Callable[..., Any]) -> None:
    raw = bytearray(gzip.compress(b"".join(LINES)))
    raw[-4:] = b"\x00\x00\x00\x00"
    found = read(bytes(raw))
    assert len(found.rows) == 3000
    assert ["breaks off" in reason for reason in found.reasons] == [True]


@pytest.mark.parametrize(
    "encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "cp1252"]
)
def test_line_numbers_and_bytes_are_those_of_the_file(read: Callable[..., Any], encoding: str) -> None:
    text = '{"text": "ä€"}\r\n\n{"text": "b"}\nbroken\n{"text": "c"}'
    raw = text.encode(encoding)
    mark = len(raw) - len(
        text.encode(
            {"utf-8-sig": "utf-8", "utf-16": "utf-16-le", "utf-32": "utf-32-le"}.get(encoding, encoding)
        )
    )
    found = read(raw, encoding="auto" if encoding != "cp1252" else encoding)
    assert [row.source for row in found.rows] == ["rows.jsonl:1", "rows.jsonl:3", "rows.jsonl:5"]
    [entry] = found.rejects
    plain = {"utf-8-sig": "utf-8", "utf-16": "utf-16-le", "utf-32": "utf-32-le"}.get(encoding, encoding)
    assert (entry.line, entry.byte) == (4, mark + len(text[: text.index("broken")].encode(plain)))
    assert found.rows[0].text == "ä€"


@pytest.mark.parametrize("form", ["jsonl", "csv", "txt"])
def test_bytes_that_the_encoding_does_not_know_cost_one_row(read: Callable[..., Any], form: str) -> None:
    begin, row = {"jsonl": ("", '{{"text": "{}"}}\n'), "csv": ("text\n", "{}\n"), "txt": ("", "{}\n\n")}[form]
    raw = (begin + row.format("one")).encode("utf-16-be") + row.format("two").encode("utf-16-be")
    raw += row.format("\ud800").encode("utf-16-be", "surrogatepass") + row.format("three").encode("utf-16-be")
    found = read(raw, f"rows.{form}", encoding="utf-16-be")
    assert [one.text for one in found.rows] == ["one", "two", "three"]
    assert len(found.rejects) == 1
    assert "UTF-8" in found.reasons[0] or "utf-16-be" in found.reasons[0]


def test_unicode_line_breaks_are_text(read: Callable[..., Any]) -> None:
    text = "a\u2028b\u2029c\x0bd\x0ce\x1cf\x85g"
    for encoding in ("utf-8", "utf-16"):
        found = read(json.dumps({"text": text}, ensure_ascii=False).encode(encoding))
        assert [row.text for row in found.rows] == [text]
        found = read(f'text\n"{text}"\n'.encode(encoding), "rows.csv")
        assert [row.text for row in found.rows] == [text]
