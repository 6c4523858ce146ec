"""The column map: what the file calls a thing, and what a row does with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Read = Callable[..., Any]


def said(found: Any) -> list[list[tuple[str, str]]]:
    return [[(turn["role"], turn["content"]) for turn in row.messages] for row in found.rows]


def test_columns_by_name_path_and_template(read: Read) -> None:
    record = {"q": "What?", "meta": {"a": {"text": "That."}, "n": 7}, "c{": "x", "messages": "of the file"}
    for prompt, asked in (
        ("q", "What?"),
        ("{q} ({meta.n})", "What? (7)"),
        ("{{q}} {q}", "{q} What?"),
        ("Say: {meta.a}", 'Say: {"text":"That."}'),
    ):
        found = read([record], columns={"prompt": prompt, "completion": "meta.a.text"})
        assert said(found) == [[("user", asked), ("assistant", "That.")]], prompt


def test_a_key_with_a_dot_wins_over_a_path(read: Read) -> None:
    found = read([{"a.b": "key", "a": {"b": "path"}}], columns={"text": "a.b"})
    assert found.rows[0].text == "key"


def test_with_a_map_only_its_columns_are_read(read: Read) -> None:
    record = {"question": "q", "answer": "a", "messages": 7, "system": "not mapped", "topic": "t", "n": 1}
    found = read(
        [record] * 2, columns={"prompt": "question", "completion": "answer"}, tags=["topic"], group_by="n"
    )
    assert said(found) == [[("user", "q"), ("assistant", "a")]] * 2
    assert found.ignored_keys == {"messages": 2, "system": 2}
    assert (found.rows[0].tags, found.rows[0].group) == ({"topic": "t"}, "n=1")


def test_a_mapped_column_that_a_row_lacks_is_that_rows_fault(read: Read) -> None:
    rows = [{"q": "x", "a": "y"}, {"a": "y"}, {"q": None, "a": "y"}]
    found = read(rows, columns={"prompt": "q", "completion": "a"})
    assert len(found.rows) == 1
    assert "neither 'messages' nor 'prompt'" in found.reasons[0]
    assert found.reasons[0].endswith("; the row lacks 'q', which source.columns names")
    assert found.reasons[1] == "'prompt' is null or missing, not text"
    found = read(rows, columns={"prompt": "Ask: {q}", "completion": "a"})
    assert found.reasons == ["the row has no 'q', which source.columns asks for"] * 2


def test_turns_with_other_keys_and_names(read: Read) -> None:
    record = {"talk": [{"who": "Kundin", "says": "q", "at": 3}, {"who": "gpt", "says": "a"}]}
    found = read(
        [record],
        columns={"conversations": "talk"},
        role_key="who",
        content_key="says",
        roles={"Kundin": "user"},
    )
    assert found.rows[0].messages == (
        {"role": "user", "content": "q", "at": 3},
        {"role": "assistant", "content": "a"},
    )
    assert (
        "the role is 'Kundin'" in read([record], columns={"conversations": "talk"}, role_key="who").reasons[0]
    )


def test_roles_may_be_renamed_in_messages_too(read: Read) -> None:
    record = {"messages": [{"role": "human", "content": "q"}, {"role": "assistant", "content": "a"}]}
    assert "source.roles" in read([record]).reasons[0]
    assert said(read([record], roles={"human": "user"})) == [[("user", "q"), ("assistant", "a")]]


@pytest.mark.parametrize("value", ["", None])
def test_an_empty_tag_is_none_and_an_empty_group_a_fault(read: Read, value: Any) -> None:
    found = read([{"text": "t", "topic": value}, {"text": "t"}], tags=["topic"])
    assert [row.tags for row in found.rows] == [{}, {}]
    found = read([{"text": "t", "topic": value}], group_by="topic")
    assert found.reasons == ["the row has no 'topic', which source.group_by asks for"]


def test_the_kind_jsonl_is_files_with_that_format(read: Read) -> None:
    found = read(b'prompt,completion\n{"text": "a"}\n', "rows.csv", kind="jsonl")
    assert [row.text for row in found.rows] == ["a"]
    assert found.rejects[0].line == 1
