"""Any list of rows, written in any format, is read back equal: text is never changed, and no row is lost or invented."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from finetune.data.rows import Row

WORDS = [
    "42",
    "007",
    "1e5",
    "NA",
    "null",
    "None",
    "true",
    "NaN",
    "2024-01-05",
    "2024-02-01 10:00:00",
    "[]",
    "{}",
]
letters = st.characters(exclude_categories=["Cs"])
text = (
    st.sampled_from(WORDS)
    | st.text(letters, max_size=12)
    | st.text("\"',;\t\n\r\\|{}[]: \u2028\x00é", max_size=8)
)
said = text.filter(lambda value: bool(value))
turns = st.builds(
    lambda asked, answered: [
        {"role": "user", "content": asked},
        {"role": "assistant", "content": answered},
    ],
    text,
    said,
)
chat = st.builds(lambda messages, topic: {"messages": messages, "topic": topic}, turns, text)
pair = st.builds(
    lambda prompt, completion, topic: {"prompt": prompt, "completion": completion, "topic": topic},
    text,
    said,
    text,
)
preference = st.builds(
    lambda prompt, answers, topic: {
        "prompt": prompt,
        "chosen": answers[0],
        "rejected": answers[1],
        "topic": topic,
    },
    said,
    st.lists(said, min_size=2, max_size=2, unique=True),
    text,
)
kto = st.builds(lambda row, label: {**row, "label": label}, pair, st.booleans())
running = st.builds(lambda words, topic: {"text": words, "topic": topic}, text.filter(str.strip), text)
lists = st.one_of(
    *(st.lists(kind, min_size=1, max_size=9) for kind in (chat, pair, preference, kto, running))
)


def content(row: Row) -> list[Any]:
    given = row.to_dict()
    return [given[key] for key in sorted(given) if key != "source"]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(records=lists)
def test_rows_are_read_back_equal_from_every_format(
    read: Callable[..., Any], written: Callable[..., str], form: str, records: list[dict[str, Any]]
) -> None:
    expected = [content(row) for row in read(records, tags=["topic"]).rows]
    assert len(expected) == len(records)
    found = read(None, written(form, records), tags=["topic"])
    assert found.rejects == []
    assert [content(row) for row in found.rows] == expected
    assert [row.source.rpartition(":")[0] for row in found.rows] == [
        found.rows[0].source.rpartition(":")[0]
    ] * len(records)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(records=lists, n_bytes=st.integers(1, 400), junk=st.binary(max_size=20))
@pytest.mark.parametrize(
    "form", ["jsonl", "jsonl_bom_crlf", "jsonl_without_suffix", "parquet", "gzip", "csv"]
)
def test_ranges_of_any_size_give_what_one_pass_gives(
    read: Callable[..., Any],
    read_in_ranges: Callable[..., Any],
    written: Callable[..., str],
    tmp_path: Any,
    form: str,
    records: list[dict[str, Any]],
    n_bytes: int,
    junk: bytes,
) -> None:
    name = written(form, records)
    if form == "jsonl":
        with (tmp_path / name).open("ab") as stream:
            stream.write(b"\n\n" + junk)
    whole = read(None, name)
    parts = read_in_ranges(name, n_bytes)
    assert [one for one in parts if isinstance(one, Row)] == whole.rows
    assert [one for one in parts if not isinstance(one, Row)] == whole.rejects


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.lists(st.lists(text, min_size=2, max_size=2), max_size=8))
def test_paragraphs_lines_and_whole_files(read: Callable[..., Any], rows: list[list[str]]) -> None:
    paragraphs = ["\n".join(lines) for lines in rows]
    raw = "\n\n".join(paragraphs).encode()
    if not raw.decode().strip():
        return
    [whole] = read(raw, "t.txt", text_unit="file", encoding="utf-8").rows
    assert whole.text.encode() == raw.removesuffix(b"\n").removesuffix(b"\r")
    lines = read(raw, "t.txt", text_unit="line", encoding="utf-8")
    assert [row.text for row in lines.rows] == [
        line.decode().removesuffix("\r") for line in raw.split(b"\n") if line.decode().strip()
    ]
    joined = b"\n".join(line for line in raw.split(b"\n") if line.strip())
    parts = read(raw, "t.txt", encoding="utf-8").rows
    assert sum(len(row.text.split()) for row in parts) == len(joined.decode().split())


def test_a_record_is_kept_as_it_is_for_the_ledger(read: Callable[..., Any]) -> None:
    raw = b'{"prompt": "\xff", "completion": "\xe2\x82"}'
    [entry] = read(raw).rejects
    assert "UTF-8" in entry.reason
    assert entry.raw == '{"prompt": "\\xff", "completion": "\\xe2\\x82"}'
    json.dumps(entry.to_dict())
