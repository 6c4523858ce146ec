"""Marks of a reader: saved at once, found again by what a row says, applied or refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finetune.data.curate.flags import flag_rows
from finetune.data.marks import Mark, MarkFile, apply_mark, with_answer
from finetune.data.rows import Row
from finetune.errors import UserError


def row_of(question: str, answer: str, id: str = "r", **keys: Any) -> Row:
    turns = ({"role": "user", "content": question}, {"role": "assistant", "content": answer, "name": "bot"})
    return Row(id, turns, id, "made", **keys)


def test_the_last_mark_on_what_a_row_says_counts(tmp_path: Path) -> None:
    marks = MarkFile(tmp_path / "new" / "marks.jsonl")
    assert marks.read() == {}
    row = row_of("q", "a")
    marks.add(row, "keep")
    marks.add(row, "drop", note="spam ✓")
    (mark,) = MarkFile(marks.path).read().values()
    assert (mark.decision, mark.note, mark.id) == ("drop", "spam ✓", "r")
    assert len(marks.path.read_text().splitlines()) == 2
    moved = replace(row, id="other", source="elsewhere", group="g", tags={"a": "b"})
    assert moved.content_digest() in marks.read()
    assert row_of("q", "another").content_digest() not in marks.read()


def test_marks_are_applied() -> None:
    row = row_of("q", "a")
    digest = row.content_digest()
    assert apply_mark(row, None) == apply_mark(row, Mark(digest, "keep")) == (row, "")
    assert apply_mark(row, Mark(digest, "drop")) == (None, "marked_drop")
    assert apply_mark(row, Mark(digest, "fix")) == (None, "marked_fix")
    mended, reason = apply_mark(row, Mark(digest, "fix", answer="better"))
    assert mended is not None and reason == ""
    assert mended.messages[1] == {"role": "assistant", "content": "better", "name": "bot"}
    assert mended.messages[0] is row.messages[0]
    assert row.answer == "a"


def test_which_answer_is_mended() -> None:
    pair = Row("p", ({"role": "user", "content": "q"},), "p", "made", kind="preference",
               chosen=({"role": "assistant", "content": "good"},), rejected=({"role": "assistant", "content": "bad"},))  # fmt: skip
    mended = with_answer(pair, "better")
    assert mended is not None
    assert (mended.chosen[0]["content"], mended.rejected[0]["content"]) == ("better", "bad")
    text = Row("t", (), "t", "made", kind="text", text="words")
    assert with_answer(text, "x") is None
    assert apply_mark(text, Mark(text.content_digest(), "fix", answer="x")) == (None, "marked_fix")


@pytest.mark.parametrize(
    "line",
    ["not json", "[]", "{}", '{"digest": "d"}', '{"digest": "d", "decision": "maybe"}', '{"digest": 1, "decision": "keep"}',
     '{"digest": "d", "decision": "fix", "answer": 3}', '{"digest": "d", "decision": "keep", "other": 1}'],
)  # fmt: skip
def test_a_line_that_is_no_mark_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "marks.jsonl"
    path.write_text(json.dumps({"digest": "x", "decision": "keep"}) + "\n\n" + line + "\n")
    with pytest.raises(UserError, match=r"marks\.jsonl:3: not a mark"):
        MarkFile(path).read()


def test_a_decision_that_is_none_is_refused_and_not_saved(tmp_path: Path) -> None:
    marks = MarkFile(tmp_path / "marks.jsonl")
    with pytest.raises(UserError, match="did you mean 'drop'"):
        marks.add(row_of("q", "a"), "dropp")
    with pytest.raises(UserError, match="5000 characters"):
        marks.add(row_of("q", "a"), "drop", note="x" * 5000)
    with pytest.raises(UserError, match="only a fix"):
        marks.add(row_of("q", "a"), "drop", answer="b")
    assert not marks.path.exists()


@given(st.text(max_size=30), st.text(max_size=30))
def test_any_mended_answer_survives_the_file(
    tmp_path_factory: pytest.TempPathFactory, answer: str, note: str
) -> None:
    marks = MarkFile(tmp_path_factory.mktemp("marks") / "m.jsonl")
    try:
        answer.encode()
        note.encode()
    except UnicodeEncodeError:
        return
    row = row_of("q", "a")
    marks.add(row, "fix", note, answer)
    mended, _ = apply_mark(row, marks.read()[row.content_digest()])
    assert mended is not None and mended.answer == answer


def test_flags_say_why_a_row_deserves_a_look() -> None:
    words = "one two three four five six seven eight nine ten"
    rows = [
        row_of(f"Ask {n}: {' '.join(f'w{n}x{k}' for k in range(9))}", f'{{"n": {n}}}', id=str(n))
        for n in range(20)
    ]
    rows += [
        row_of("What is it?", "The lamp in the hall.", id="first"),
        row_of("what is  it?", "Some door of oak.", id="second"),
        row_of("Help me with this now", "I'm sorry, but I can't help with that.", id="refused"),
        row_of("Say nothing", "...", id="empty"),
        row_of(f"Copy {words}", '{"a": 1}', id="copy"),
        row_of(f"Copy {words} more", '{"a": 1}', id="copied"),
        row_of("Who is it?", '{"mail": "ann@web.de"}', id="personal"),
        Row("text", (), "text", "made", kind="text", text="running text"),
    ]
    flags = {row.id: found for row, found in zip(rows, flag_rows(rows), strict=True)}
    assert flags["first"] == flags["second"] == ["contradiction", "other format"]
    assert flags["refused"] == ["other format", "refusal"]
    assert flags["empty"] == ["empty", "other format"]
    assert flags["copy"] == flags["copied"] == ["near duplicate"]
    assert flags["personal"] == ["personal data"]
    assert flags["text"] == flags["0"] == []


def test_an_answer_that_ten_rows_share_is_flagged() -> None:
    rows = [row_of(f"question {n} of its own", "Please ask an expert.", id=str(n)) for n in range(10)]
    assert all("repeated answer" in found for found in flag_rows(rows))
    assert not any("repeated answer" in found for found in flag_rows(rows[:9]))
    assert flag_rows([]) == []


def test_what_is_no_file_of_marks_is_refused(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xd5\x00\xff")
    for name in ("binary", "."):
        with pytest.raises(UserError, match="not a file of marks"):
            MarkFile(tmp_path / name).read()
