"""Lines become objects unchanged, or a fault with a reason; nothing in between."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finetune.data.jsonl import Line, LineError, parse_line, read_lines
from finetune.errors import UserError


def lines_of(path: Path) -> list[tuple[int, int, bytes]]:
    return [(line.number, line.byte, line.raw) for line in read_lines(path) if isinstance(line, Line)]


def test_line_ends_bom_and_blank_lines(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a":1}\r\n\r\n   \n{"a":2}\n{"a":3}')
    assert lines_of(path) == [(1, 3, b'{"a":1}'), (4, 18, b'{"a":2}'), (5, 26, b'{"a":3}')]


def test_gzip_is_recognised_by_content(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(gzip.compress(b'{"a":1}\n{"a":2}\n'))
    assert [raw for _, _, raw in lines_of(path)] == [b'{"a":1}', b'{"a":2}']


def test_a_broken_gzip_keeps_the_lines_before_the_break(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl.gz"
    rows = b"".join(
        json.dumps({"n": n, "noise": str(n * 7919 % 10007)}).encode() + b"\n" for n in range(3000)
    )
    path.write_bytes(gzip.compress(rows)[:-2000])
    found = list(read_lines(path))
    whole = [line for line in found if isinstance(line, Line)]
    assert len(whole) > 1000
    assert [json.loads(line.raw)["n"] for line in whole] == list(range(len(whole)))
    assert isinstance(found[-1], LineError)
    assert f"after line {whole[-1].number}" in str(found[-1])


@pytest.mark.parametrize(
    ("start", "name"),
    [
        (b"\xff\xfe{\x00", "UTF-16"),
        (b'{\x00"\x00', "UTF-16LE"),
        (b'\x00{\x00"', "UTF-16BE"),
        (b"PAR1", "Parquet"),
        (b"PK\x03\x04", "zip"),
    ],
)
def test_other_formats_are_refused_by_name(tmp_path: Path, start: bytes, name: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(start + b"rest")
    with pytest.raises(UserError, match=name):
        list(read_lines(path))


def test_missing_file_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read"):
        list(read_lines(tmp_path / "none.jsonl"))


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b'{"a": NaN}', "not valid JSON"),
        (b'{"a": 1e999}', "not valid JSON"),
        (b'{"a": "\\ud800"}', "surrogate"),
        (b'{"a": "\xff"}', "UTF-8"),
        (b'{"a": 1', "not valid JSON"),
        (b'{"a": 1} {"a": 2}', "not valid JSON"),
        (b"[1]", "this is a list"),
        (b"null", "this is a null"),
        (b'{"a": 1, "a": 2}', "'a' is written twice"),
        (b'{"x": {"role": "user", "role": "user"}}', "'role' is written twice"),
        (b'{"a\\u003a": ":", "b": 1, "b": 2}', "'b' is written twice"),
        (b'{"a":' * 400 + b"1" + b"}" * 400, "nested too deeply"),
        (b'{"a":' * 100000, "not valid JSON"),
    ],
)
def test_bad_lines_say_why(raw: bytes, reason: str) -> None:
    with pytest.raises(LineError, match=reason):
        parse_line(raw)


def test_long_integers_are_not_rounded() -> None:
    assert parse_line(b'{"id": 123456789012345678901234567890}') == {"id": 123456789012345678901234567890}
    assert parse_line(b'{"id": 9223372036854775809}') == {"id": 9223372036854775809}


text = st.text(st.characters(exclude_categories=["Cs"]))
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**80), 2**80) | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(text, values, max_size=4), st.booleans())
def test_every_object_comes_back_exactly(row: dict[str, object], ascii_only: bool) -> None:
    assert parse_line(json.dumps(row, ensure_ascii=ascii_only).encode()) == row


@given(st.binary())
def test_any_bytes_are_an_object_or_a_reasoned_fault(raw: bytes) -> None:
    try:
        assert isinstance(parse_line(raw), dict)
    except LineError as fault:
        assert str(fault)
