"""The nature of a file: content first, then its name, then a refusal that says what to do."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard

from finetune.data.read.sniff import Nature, sniff
from finetune.data.spec_source import FilesSource
from finetune.errors import UserError

ROW = b'{"prompt": "p", "completion": "c"}\n'
MOSTLY_CHINESE = '{"a": "' + "你好" * 99 + '"}\n'
Sniff = Callable[..., Nature]


@pytest.fixture
def nature(tmp_path: Path) -> Sniff:
    """nature(name, content, **source)."""

    def run(name: str, content: bytes, **source: Any) -> Nature:
        (tmp_path / name).write_bytes(content)
        return sniff(tmp_path / name, FilesSource(**{"kind": "files", "files": [name], **source}))

    return run


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.jsonl", ROW, "jsonl"),
        ("a.jsonl", b"", "jsonl"),
        ("a.jsonl", b"no json at all\n" + ROW, "jsonl"),
        ("a.jsonl", b"[\n" + ROW + ROW, "jsonl"),
        ("a.jsonl", b"[" + ROW.strip() + b"," + ROW + b"]", "json"),
        ("a.jsonl", json.dumps([{"a": 1}], indent=1).encode(), "json"),
        ("a.json", ROW * 3, "jsonl"),
        ("a.json", ROW, "json"),
        ("a.json", b'{"data": [' + ROW.strip() + b"]}", "json"),
        ("a.json", ROW.strip() * 3, "json"),
        ("a.json", b"[]", "json"),
        ("a.json", b'{"a": "' + b"x" * 400_000 + b'"}\n' + ROW, "json"),
        ("a.jsonl", b'{"a": "' + b"x" * 400_000 + b'"}\n' + ROW, "jsonl"),
        ("a", ROW, "jsonl"),
        ("a.data", b"[" + ROW + b"]", "json"),
        ("a.csv", ROW, "csv"),
        ("a.CSV", b"a,b\n", "csv"),
        ("a.tab", b"a\tb\n", "tsv"),
        ("a.txt", ROW, "text"),
        ("a.md", b"# words", "text"),
        ("a.csv.gz", b"a,b\n", "csv"),
    ],
)
def test_the_format_of_text(nature: Sniff, name: str, content: bytes, expected: str) -> None:
    found = nature(name, content)
    assert (found.format, found.encoding) == (expected, "utf-8")
    assert found.why


@pytest.mark.parametrize(
    ("content", "encoding"),
    [
        ("ä".encode("utf-8-sig"), "utf-8"),
        ("ä".encode("utf-16"), "utf-16-le"),
        (b"\xfe\xff" + "ä".encode("utf-16-be"), "utf-16-be"),
        ("ä".encode("utf-32"), "utf-32-le"),
        ('{"a": "ä"}'.encode("utf-16-le"), "utf-16-le"),
        ('{"a": "ä"}'.encode("utf-16-be"), "utf-16-be"),
        (MOSTLY_CHINESE.encode("utf-16-le"), "utf-16-le"),
        (MOSTLY_CHINESE.encode("utf-16-be"), "utf-16-be"),
        (MOSTLY_CHINESE.encode("utf-32-le"), "utf-32-le"),
        (MOSTLY_CHINESE.encode("utf-32-be"), "utf-32-be"),
        (b"a\0b\0\0\xd8\0\xd8", "cp1252"),  # no UTF-16: two halves of surrogate pairs
        (b"prompt,completion\n", "utf-8"),
        ("größe".encode(), "utf-8"),
        ("größe".encode("cp1252"), "cp1252"),
        # One character in UTF-8 anywhere says what the rest is, however far away the broken byte stands.
        (b"\xff" + b"x" * 3_000_000 + "ö".encode(), "utf-8"),
        (b"x" * 3_000_000 + b"\xf6", "cp1252"),
        (b"x" * (1 << 20) + b"\xc3", "cp1252"),
        (b"x" * ((1 << 20) - 1) + "ö".encode(), "utf-8"),
    ],
)
def test_the_encoding_of_text(nature: Sniff, content: bytes, encoding: str) -> None:
    assert nature("a.txt", content).encoding == encoding
    assert nature("a.txt", zstandard.compress(content)).encoding == encoding


def test_json_is_utf8_unless_its_bytes_or_the_spec_say_otherwise(nature: Sniff) -> None:
    raw = '{"a": "größe"}'.encode("cp1252")
    assert nature("a.jsonl", raw).encoding == "utf-8"
    assert nature("a.jsonl", raw, encoding="Latin-1").encoding == "iso8859-1"
    assert nature("a.jsonl", ROW.decode().encode("utf-16-be"), encoding="utf-16").encoding == "utf-16-be"
    assert nature("a.jsonl", ROW.decode().encode("utf-16-le"), encoding="utf-16").encoding == "utf-16-le"


@pytest.mark.parametrize(
    ("content", "delimiter"),
    [
        (b"a,b\n1,2\n", ","),
        (b"a;b\n1,5;2\n", ";"),
        (b"a\tb,c\n1\t2\n", "\t"),
        (b"a|b|c\n1|2|3\n", "|"),
        (b"text\nno delimiter; or two, but not in the header\n", ","),
        (b'a;b\n"x, y; z";2\n"u, v";3\n', ";"),
        (b'a,b\n"x;\n;y",2\n', ","),
    ],
)
def test_the_delimiter_of_csv(nature: Sniff, content: bytes, delimiter: str) -> None:
    assert nature("a.csv", content).delimiter == delimiter
    assert nature("a.csv", gzip.compress(content)).delimiter == delimiter
    assert nature("a.csv", content, delimiter="tab").delimiter == "\t"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b"PK\x03\x04\x00", "a zip archive.*unpack it"),
        ("a.xlsx", b"PK\x03\x04\x00", "save it as CSV"),
        ("a.db", b"SQLite format 3\x00", "export the table as CSV"),
        ("a.pdf", b"%PDF-1.7", "extract its text"),
        ("a.pkl", b"\x80\x04\x95\x00", "could run code"),
        ("a.parquet", b"not parquet", "called parquet and is not"),
        ("a.arrow", b"", "called arrow and is not: it is empty"),
        ("a.bin", b"\x01\x02", "cannot tell the format.*source.format"),
        ("a.parquet", gzip.compress(b"PAR1\x00\x00PAR1", mtime=0), "inside gzip.*unpack it"),
    ],
)
def test_what_is_no_file_of_rows_is_named(nature: Sniff, name: str, content: bytes, message: str) -> None:
    with pytest.raises(UserError, match=f"(?s){message}"):
        nature(name, content)


def test_a_stated_format_is_checked_against_the_content(nature: Sniff) -> None:
    with pytest.raises(UserError, match="is parquet, not jsonl"):
        nature("a.jsonl", b"PAR1\x00\x00\x00\x00PAR1", format="jsonl")
    with pytest.raises(UserError, match="called parquet and is not"):
        nature("a.jsonl", ROW, format="parquet")
    assert nature("a.txt", ROW, format="jsonl").format == "jsonl"
    assert nature("a.jsonl", b"%PDF is how this text begins\n", format="text").format == "text"


def test_an_unknown_encoding_is_named_with_the_nearest(nature: Sniff) -> None:
    with pytest.raises(UserError, match="did you mean 'shift_jis'"):
        nature("a.csv", b"a,b\n", encoding="shift-jiss")


@pytest.mark.parametrize("codec", ["rot13", "base64", "zlib", "idna", "punycode", "undefined", "utf-88"])
def test_a_codec_that_is_no_encoding_of_text_is_refused_by_name(codec: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n')
    with pytest.raises(UserError, match=f"source.encoding is '{codec}', which is no encoding"):
        sniff(tmp_path / "a.jsonl", FilesSource(kind="files", files=["a.jsonl"], encoding=codec))
