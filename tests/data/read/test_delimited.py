"""CSV and TSV: cells are text, and what is not well formed costs a line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from finetune.errors import UserError

Read = Callable[..., Any]


def pairs(found: Any) -> list[tuple[str, str]]:
    return [(row.messages[0]["content"], row.answer) for row in found.rows]


@pytest.mark.parametrize(
    "cell", ["42", "007", "1e5", "NA", "null", "None", "true", "NaN", "2024-01-05", "[1]", " x "]
)
def test_no_cell_is_anything_but_text(read: Read, cell: str) -> None:
    found = read(f"prompt,completion,topic\n{cell},{cell},{cell}\n".encode(), "rows.csv", tags=["topic"])
    assert pairs(found) == [(cell, cell)]
    assert found.rows[0].tags == {"topic": cell}


def test_quoted_line_breaks_quotes_and_delimiters(read: Read) -> None:
    raw = b'prompt,completion\r\n"a\r\n""b"",\n",c\r\n\r\nd,"e\nf"\r\n'
    found = read(raw, "rows.csv")
    assert pairs(found) == [('a\r\n"b",\n', "c"), ("d", "e\nf")]
    assert [row.source for row in found.rows] == ["rows.csv:2", "rows.csv:6"]


GOOD = ["p1,c1", '"p,2","c\n2"', "p3,c3"]


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ('"never closed,c', "not well formed"),
        ('"closed"too early,c', "not well formed"),
        ("one cell", "1 cells where the header has 2"),
        ("a,b,c", "3 cells where the header has 2"),
        ('"a\nb",c,d', "3 cells"),
        ("a,b\x00,", "3 cells"),
        ("a,", "'completion' is empty"),
        ("a,b\rc", "not well formed"),
    ],
)
def test_a_bad_row_never_loses_the_others(read: Read, bad: str, reason: str) -> None:
    lines = ["prompt,completion", *GOOD[:2], bad, *GOOD[2:], *GOOD]
    found = read("\n".join(lines).encode(), "rows.csv")
    assert pairs(found) == [("p1", "c1"), ("p,2", "c\n2"), ("p3", "c3")] * 2
    [entry] = found.rejects
    assert reason in entry.reason
    assert entry.line == 5
    assert entry.byte == len("\n".join(lines[:3])) + 1
    assert entry.raw == (bad if "\n" not in bad or "cells" in reason else bad.split("\n")[0])


def test_every_line_with_an_open_quote_is_one_reject(read: Read) -> None:
    raw = "prompt,completion\n" + '"a,b\n' * 500 + "p,c\n"
    found = read(raw.encode(), "rows.csv")
    assert pairs(found)[-1] == ("p", "c")
    assert len(found.rows) + len(found.rejects) <= 501


def test_cells_of_megabytes(read: Read) -> None:
    long = "word, " * 500_000
    assert pairs(read(f'prompt,completion\np,"{long}"\n'.encode(), "rows.csv")) == [("p", long)]


def test_quotes_may_be_plain_characters(read: Read) -> None:
    raw = b'prompt\tcompletion\n"Yes" he said\t5" pipe\n'
    assert read(raw, "rows.tsv").rejects[0].line == 2
    assert pairs(read(raw, "rows.tsv", quoted=False)) == [('"Yes" he said', '5" pipe')]


def test_conversations_in_cells(read: Read) -> None:
    turns = '[{""role"": ""user"", ""content"": ""42""}, {""role"": ""assistant"", ""content"": ""007""}]'
    found = read(f'messages,tools\n"{turns}",\n"{turns}","[]"\n"[broken",\ntext,\n'.encode(), "rows.csv")
    assert pairs(found) == [("42", "007")] * 2
    assert "'messages' is text, not a list of messages: not valid JSON" in found.reasons[0]
    assert found.reasons[1] == "'messages' is text, not a list of messages"


def test_json_columns_are_parsed_and_their_faults_are_rejects(read: Read) -> None:
    good = '[{""role"": ""assistant"", ""content"": ""a""}]'
    raw = f'prompt,completion\nq,"{good}"\nq,[1\n'.encode()
    found = read(raw, "rows.csv", json_columns=["completion"])
    assert pairs(found) == [("q", "a")]
    assert found.reasons[0].startswith("the column 'completion': not valid JSON")


def test_headers(read: Read) -> None:
    assert pairs(read(b"\xef\xbb\xbf prompt , completion\np,c\n", "rows.csv")) == [("p", "c")]
    with pytest.raises(UserError, match="two columns called 'a'"):
        read(b"a,b,a\n1,2,3\n", "rows.csv")
    with pytest.raises(UserError, match=r"header .* is not well formed"):
        read(b'"a"b,c\n1,2\n', "rows.csv")
    assert read(b"prompt,completion\n", "rows.csv").rows == []
    assert read(b"", "rows.csv").rows == []
