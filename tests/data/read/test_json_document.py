"""JSON documents: rows wherever they stand, in constant memory, and a broken one costs itself."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import finetune.data.read.json_document as document
from finetune.data.read import iter_rows, source_files
from finetune.data.spec_source import FilesSource
from finetune.errors import UserError

Read = Callable[..., Any]


def texts(found: Any) -> list[str]:
    return [row.text for row in found.rows]


def item(text: str, **more: Any) -> str:
    return json.dumps({"text": text, **more})


@pytest.mark.parametrize(
    "raw",
    [
        f"[{item('a')}, {item('b')}]",
        f"[\n  {item('a')},\n  {item('b')}\n]\n",
        f"{item('a')}{item('b')}",
        f"{item('a')}\n\n{item('b')}",
        f"[{item('a')}][{item('b')}]",
        f'{{"data": [{item("a")}, {item("b")}]}}',
        f'{{"version": {{"x": [1]}}, "data": [{item("a")}, {item("b")}], "more": [{{"text": "z"}}], "n": {{"a": 1}}}}',
        f'{{"train": [{item("a")}], "note": "[[[", "rows": [{item("b")}]}}',
        f"[{item('a', deep=[[1, {'x': ']'}], {}])},{item('b')}]",
    ],
)
def test_rows_wherever_they_stand(read: Read, raw: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for chunk_bytes in (1, 2, 3, 7, 1 << 20):
        monkeypatch.setattr(document, "CHUNK_BYTES", chunk_bytes)
        for encoding in ("utf-8", "utf-8-sig", "utf-16"):
            found = read(raw.encode(encoding), "rows.json", format="json")
            assert (texts(found), found.reasons) == (["a", "b"], [])


def test_a_single_object_is_a_row(read: Read) -> None:
    assert texts(read(item("a", data=7).encode(), "rows.json")) == ["a"]
    assert texts(read(json.dumps({"text": "a", "tools": [{"b": 1}]}, indent=1).encode(), "rows.json")) == [
        "a"
    ]


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ('{"text": "b"', "not valid JSON"),
        ('{"text": ["b"}', "not valid JSON"),
        ('{"text": b}', "not valid JSON"),
        ('{"text": "b\n"}', "not valid JSON"),
        ('{"text": "b}', "not valid JSON"),
        ('{"text": "\\ud800"}', "surrogate"),
        ('{"text": "b", "text": "c"}', "written twice"),
        ('"only words"', "not valid JSON|must be a JSON object"),
        ("[1, 2]", "this is a list"),
        ("null", "this is a null"),
        ("}}", "not valid JSON"),
    ],
)
@pytest.mark.parametrize("indent", ["", "    "])
def test_a_broken_row_never_loses_the_others(read: Read, bad: str, reason: str, indent: str) -> None:
    import re

    items = [item("a"), bad, item("c"), item("d")]
    raw = "[\n" + ",\n".join(indent + one for one in items) + "\n]"
    found = read(raw.encode(), "rows.json", format="json")
    assert texts(found) == ["a", "c", "d"]
    assert re.search(reason, found.reasons[0])
    assert found.rejects[0].line == 3
    assert found.rejects[0].byte == raw.index(bad)
    assert len(found.rejects) == 1


@pytest.mark.parametrize("missing", ["]}", "}]"])
def test_a_missing_bracket_is_made_up_at_the_next_line_that_stands_alike(read: Read, missing: str) -> None:
    rows = [
        {"messages": [{"role": "user", "content": f"q{n}"}, {"role": "assistant", "content": "a"}]}
        for n in range(4)
    ]
    lines = [json.dumps(row) for row in rows]
    lines[1] = lines[1].replace(missing, "", 1)
    found = read(("[\n" + ",\n".join(lines) + "\n]").encode(), "rows.json", format="json")
    assert [row.messages[0]["content"] for row in found.rows] == ["q0", "q2", "q3"]
    assert found.rejects[0].line == 3


def test_a_document_that_breaks_off(read: Read) -> None:
    raw = f"[{item('a')}, {item('b')}, {item('c')}]"
    for end, n_whole in ((-1, 3), (-4, 2), (len(item("a")) + 2, 1)):
        found = read(raw[:end].encode(), "rows.json")
        assert texts(found) == ["a", "b", "c"][:n_whole]
        assert found.reasons == ["the document breaks off: a closing bracket is missing"]


def test_a_row_that_never_ends_is_given_up(read: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document, "MAX_ROW_BYTES", 1000)
    monkeypatch.setattr(document, "CHUNK_BYTES", 100)
    raw = f"[\n{item('a')},\n{item('b' * 5000)[:-2]},\n" + ",\n".join([item("c")] * 3) + "\n]"
    found = read(raw.encode(), "rows.json", format="json")
    assert texts(found)[0] == "a"
    assert texts(found)[-1] == "c"
    assert found.rejects


def test_memory_holds_a_row_and_not_the_document(tmp_path: Path) -> None:
    with (tmp_path / "rows.json").open("w") as stream:
        stream.write('{"meta": 1, "data": [')
        stream.write(",".join(item("x" * 2000) for _ in range(10_000)))
        stream.write("]}")
    section = FilesSource(kind="files", files=["rows.json"])
    [file] = source_files(section, tmp_path)
    assert file.size_bytes > 20_000_000
    tracemalloc.start()
    try:
        assert sum(1 for _ in iter_rows(file, section)) == 10_000
        assert tracemalloc.get_traced_memory()[1] < 8_000_000
    finally:
        tracemalloc.stop()


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text(max_size=5)
    | st.sampled_from(["[", "}", '"', "\\", "\n", ","]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    records=st.lists(st.dictionaries(st.text(max_size=3), values, max_size=3), min_size=1, max_size=5),
    indent=st.none() | st.integers(0, 3),
    chunk_bytes=st.integers(1, 40),
    ascii_only=st.booleans(),
)
def test_any_rows_are_cut_where_they_end(
    read: Read,
    records: list[dict[str, Any]],
    indent: int | None,
    chunk_bytes: int,
    ascii_only: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(document, "CHUNK_BYTES", chunk_bytes)
    rows = [{"text": f"t{n}", "held": record} for n, record in enumerate(records)]
    raw = json.dumps(rows, indent=indent, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    assert texts(read(raw, "rows.json", format="json")) == [row["text"] for row in rows]


@pytest.mark.parametrize("chunk", [7, 1 << 20])
@pytest.mark.parametrize(
    "raw",
    [
        f'{{"train": [{item("a")}], "test": [{item("b")}]}}',
        f'{{"note": "x", "validation": [{item("b")}], "data": [{item("a")}]}}',
        f'{{"data": [], "dev": [{item("b")}, {item("c")}]}}',
    ],
)
def test_rows_of_another_side_are_not_lost_in_silence(
    raw: str, chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(document, "CHUNK_BYTES", chunk)
    (tmp_path / "d.json").write_text(raw)
    source = FilesSource(kind="files", format="json", files=["d.json"])
    with pytest.raises(UserError, match=r"rows under '(test|validation|dev)' beside those that are read"):
        for file in source_files(source, tmp_path):
            list(document.read_json_document(file))


@pytest.mark.parametrize(
    "raw",
    [
        f'{{"data": [{item("a")}], "test": [], "dev": ["x"], "splits": [{{"test": [{{}}]}}]}}',
        item("a", test=[{"x": 1}]) + item("b", dev=[{"y": [{}]}]),
        f"[{item('a', test=[{'data': []}])}]",
    ],
)
def test_rows_may_have_keys_called_like_sides(raw: str, tmp_path: Path) -> None:
    (tmp_path / "d.json").write_text(raw)
    source = FilesSource(kind="files", format="json", files=["d.json"])
    for file in source_files(source, tmp_path):
        assert next(row.value["text"] for row in document.read_json_document(file)) == "a"
