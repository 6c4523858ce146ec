"""Files that were joined, or written on other machines: byte order marks inside, several objects a line, old line ends."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from finetune.errors import UserError

Read = Callable[..., Any]
BOM = b"\xef\xbb\xbf"


def record(name: str) -> bytes:
    return b'{"prompt":"p%b","completion":"c%b"}' % (name.encode(), name.encode())


def answers(found: Any) -> list[str]:
    return [row.answer for row in found.rows]


@pytest.mark.parametrize("between", [b"", b" ", b"\t", b"\r", b"\r\r", BOM, b"\r" + BOM])
def test_several_objects_on_a_line_are_rows_each(read: Read, between: bytes) -> None:
    raw = record("1") + b"\n" + record("2") + between + record("\u00e9") + between + record("4") + b"\r\n"
    found = read(raw)
    assert answers(found) == ["c1", "c2", "cé", "c4"] and not found.rejects
    assert [row.source for row in found.rows] == ["rows.jsonl:1", *["rows.jsonl:2"] * 3]


def test_a_byte_order_mark_at_any_line_hides_nothing(read: Read) -> None:
    found = read(BOM + record("1") + b"\n" + BOM + record("2") + b"\n" + BOM + b"\n" + record("3"))
    assert answers(found) == ["c1", "c2", "c3"]
    assert not found.rejects


@pytest.mark.parametrize(
    ("line", "kept", "raw"),
    [
        (record("1") + b'{"prompt":"p2","comp', ["c1"], '{"prompt":"p2","comp'),
        (record("1") + b" junk", ["c1"], "junk"),
        (record("1") + b"[]" + record("2"), ["c1"], "[]" + record("2").decode()),
        (b"junk " + record("1"), [], "junk " + record("1").decode()),
        (record("1") + b'{"prompt": NaN}' + record("2"), ["c1", "c2"], '{"prompt": NaN}'),
        (record("1") + b'{"a":1,"a":2}' + record("2"), ["c1", "c2"], '{"a":1,"a":2}'),
    ],
)
def test_what_is_no_object_costs_itself(read: Read, line: bytes, kept: list[str], raw: str) -> None:
    before, after = b'{"prompt":"first","completion":"f"}\n', b"\n" + record("last") + b"\n"
    assert len(before) == 36
    found = read(before + line + after)
    assert answers(found) == ["f", *kept, "clast"]
    [entry] = found.rejects
    assert (entry.line, entry.raw) == (2, raw)
    assert entry.byte == len(before) + line.index(raw.encode())


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.text(min_size=1, max_size=6), st.sampled_from(["\n", "\r", "", " ", "\r\n"]))))
def test_any_rows_joined_in_any_way_come_back(read: Read, parts: list[tuple[str, str]]) -> None:
    text = "".join(json.dumps({"prompt": "p", "completion": a}) + between for a, between in parts)
    found = read(text.encode(), format="jsonl")
    assert answers(found) == [answer for answer, _ in parts] and not found.rejects


def test_a_table_with_old_line_ends(read: Read) -> None:
    found = read(b'prompt,completion\ra,b\r"c, d",e\r\rf,"g\rh"\ri\rj,k', "old.csv")
    assert [(row.messages[0]["content"], row.answer) for row in found.rows] == [
        ("a", "b"), ("c, d", "e"), ("f", "g\rh"), ("j", "k")
    ]  # fmt: skip
    [entry] = found.rejects
    assert (entry.line, entry.byte, entry.raw) == (7, 40, "i")


def test_rows_under_a_key_on_one_line_whatever_the_name(read: Read) -> None:
    rows = b"[" + record("1") + b"," + record("2") + b"]"
    for name in ("rows.jsonl", "rows.json"):
        assert answers(read(b'{"data": ' + rows + b', "version": 1}', name)) == ["c1", "c2"]
    assert answers(read(b'{"data": ' + b"[" + record("1") + b"," * 1 + b" " * (1 << 18) + record("2") + b"]}")) == [
        "c1", "c2"
    ]  # fmt: skip


def test_a_row_that_only_looks_like_a_document_is_a_row(read: Read) -> None:
    turns = b'[{"role":"user","content":"q"},{"role":"assistant","content":"a"}]'
    mapped = {"columns": {"messages": "data"}}
    one = b'{"data": ' + turns + b"}\n"
    assert answers(read(one, **mapped)) == ["a"]
    assert answers(read(one * 2, **mapped)) == ["a", "a"]


def test_a_pointer_of_git_lfs_is_named(read: Read) -> None:
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:aa\nsize 3\n"
    for name in ("rows.jsonl", "rows.parquet", "rows.csv"):
        with pytest.raises(UserError, match=r"a pointer of Git LFS.*\n.*git lfs pull"):
            read(pointer, name)
