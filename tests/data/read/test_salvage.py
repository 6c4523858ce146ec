"""A faulty row of a document costs itself: rows that it has swallowed are found, and none is made of what is a part."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from finetune.data.read.salvage import Salvage

Read = Callable[..., Any]
PARTS = {"prompt": "inner", "completion": "inner"}


def row(text: str, **more: Any) -> dict[str, Any]:
    return {"prompt": text, "completion": f"to {text}", **more}


def asked(found: Any) -> list[str]:
    return [one.messages[0]["content"] for one in found.rows]


@pytest.mark.parametrize("whole", [[row("a")], []])  # with a good row before, and without
@pytest.mark.parametrize(
    "fault", ['to b"', '"to b', "to b", '"to b\\"', '"to b"]', '{"x": "to b"', '["to b"']
)
@pytest.mark.parametrize("form", ["[%s]", '{"data": [%s], "n": 1}', "%s"])
def test_rows_behind_a_faulty_one_on_the_same_line_are_read(
    read: Read, whole: list[dict[str, Any]], fault: str, form: str
) -> None:
    rows = [json.dumps(one) for one in (*whole, row("b"), row("c"), row("d", note="x"))]
    rows[len(whole)] = rows[len(whole)].replace('"to b"', fault)
    document = (form % ("" if form == "%s" else ", ").join(rows)).encode()
    found = read(document, "rows.json", format="json")
    assert asked(found) == [*(one["prompt"] for one in whole), "c", "d"]
    assert found.rejects
    at = document.index(rows[len(whole)].encode())
    assert (found.rejects[0].line, found.rejects[0].byte) == (1, at)


def test_lines_and_bytes_of_what_is_salvaged(read: Read) -> None:
    rows = [json.dumps(row(name)) for name in "abc"]
    document = "[" + rows[0][:-1] + ",\n\n" + rows[1] + ",\n" + rows[2] + "]"
    found = read(document.encode(), "rows.json", format="json")
    assert [one.source for one in found.rows] == ["rows.json:3", "rows.json:4"]
    [entry] = found.rejects
    assert (entry.line, entry.raw.rstrip(",\n")) == (1, rows[0][:-1])


@pytest.mark.parametrize(
    "faulty",
    [
        '{"messages": [], "was": {"prompt": "inner", "completion": "inner"}, bad}',
        '{"messages": [], "tried": [{"prompt": "inner", "completion": "inner"}], bad}',
        '{"messages": [{"type": "text", "text": "inner"}, {"type": "text", "text": "inner"}], bad}',
        '{"prompt": "{\\"prompt\\": \\"inner\\", \\"completion\\": \\"inner\\"}", bad}',
    ],
)
def test_parts_of_a_faulty_row_are_no_rows(read: Read, faulty: str) -> None:
    found = read(f"[{faulty}, {json.dumps(row('good'))}]".encode(), "rows.json", format="json")
    assert (asked(found), len(found.rejects)) == (["good"], 1)
    assert found.rejects[0].raw.rstrip(", ") == faulty


def test_rows_whose_keys_make_no_shape_are_known_by_those_before(read: Read) -> None:
    rows = [json.dumps({"q": name, "a": name, "id": 1}) for name in "abc"]
    rows[1] = rows[1].replace('"b"', '"b', 1)
    columns = {"prompt": "q", "completion": "a"}
    found = read(f"[{', '.join(rows)}]".encode(), "rows.json", format="json", columns=columns)
    assert asked(found) == ["a", "c"]


def test_a_repeated_key_in_a_salvaged_row_is_still_refused(read: Read) -> None:
    document = '[{"prompt": "a", bad}, {"prompt": "b", "prompt": "c", "completion": "d"}]'
    found = read(document.encode(), "rows.json", format="json")
    assert found.rows == []
    assert "written twice" in found.reasons[-1]


def test_brackets_that_never_close_end_the_search() -> None:
    raw = b'{"a": [1, ' * 5_000 + b"\xff"
    pieces = list(Salvage().pieces(raw))
    assert pieces == [(0, raw, False)]
