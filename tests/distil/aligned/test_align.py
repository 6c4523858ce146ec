"""The same answer in the tokens of two tokenizers, cut where both have a boundary, to the byte."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finetune.data.rows import Row
from finetune.data.tokenise import TokenisedRow, tokenise_row
from finetune.distil.aligned.align import SharedTokens, align_row
from finetune.distil.aligned.token_bytes import TokenBytes
from finetune.errors import UserError


def chat(*answers: str) -> Row:
    turns: list[dict[str, str]] = []
    for answer in answers:
        turns += [{"role": "user", "content": "how?"}, {"role": "assistant", "content": answer}]
    return Row(id="r", messages=tuple(turns), group="", source="s", tags={})


def texts(side: TokenBytes, ids: Any) -> bytes:
    return b"".join(side.pieces(ids))


@pytest.mark.parametrize(
    "answer",
    [
        "set the kitchen light to 20°C",
        "Größe 日本語 🙂🙂 naïve",
        "🙂",
        "é",  # a letter and a combining accent
        "日本",
        "line one\n\n  line two\tand a tab",
        " white space around the text ",
        "names a </s> and an <|im_end|> in the middle",
    ],
)
def test_groups_cover_the_answer_and_say_the_same(
    answer: str, tiny_tokenizer: Any, other_tokenizer: Any
) -> None:
    row = chat("ok", answer)
    student, teacher = (tokenise_row(row, tokenizer) for tokenizer in (tiny_tokenizer, other_tokenizer))
    ours, theirs = TokenBytes(tiny_tokenizer), TokenBytes(other_tokenizer)
    found = align_row(student, teacher, ours, theirs)
    assert [label for label in student.labels if label != -100] == list(found.student_ids)
    assert [label for label in teacher.labels if label != -100] == list(found.teacher_ids)
    own = [place for group in found.groups for place in range(group.student_first, group.student_last)]
    other = [place for group in found.groups for place in range(group.teacher_first, group.teacher_last)]
    assert own == list(range(len(found.student_ids))) and other == list(range(len(found.teacher_ids)))
    for group in found.groups:
        says = texts(ours, found.student_ids[group.student_first : group.student_last])
        also = texts(theirs, found.teacher_ids[group.teacher_first : group.teacher_last])
        if says.strip() != also.strip():  # an answer's end, which each writes in its own way
            assert says.endswith(b"<|im_end|>") and also.endswith(b"</s>")
            assert says.removesuffix(b"<|im_end|>").strip() == also.removesuffix(b"</s>").strip()
    assert set(found.ends) == {(2, other_tokenizer.eos_token_id)}


def test_a_split_character_is_aligned_inside_where_both_split_it_alike(
    tiny_tokenizer: Any, merging_tokenizer: Any
) -> None:
    row = chat("x鵝")  # a character that no merge is learnt for
    student, teacher = (tokenise_row(row, one) for one in (tiny_tokenizer, merging_tokenizer))
    ours, theirs = TokenBytes(tiny_tokenizer), TokenBytes(merging_tokenizer)
    found = align_row(student, teacher, ours, theirs)
    inside = [group for group in found.groups if group.is_one_to_one]
    assert texts(ours, [found.student_ids[group.student_first] for group in inside]) == "鵝".encode()
    assert texts(theirs, [found.teacher_ids[group.teacher_first] for group in inside]) == "鵝".encode()


def test_a_boundary_within_a_character_of_one_side_is_none_of_the_other(
    tiny_tokenizer: Any, merging_tokenizer: Any
) -> None:
    row = chat("in the kitchen 🙂")
    student, teacher = (tokenise_row(row, one) for one in (tiny_tokenizer, merging_tokenizer))
    ours, theirs = TokenBytes(tiny_tokenizer), TokenBytes(merging_tokenizer)
    found = align_row(student, teacher, ours, theirs)
    of_emoji = [
        g
        for g in found.groups
        if texts(theirs, found.teacher_ids[g.teacher_first : g.teacher_last]) == " 🙂".encode()
    ]
    assert [(g.student_last - g.student_first, g.teacher_last - g.teacher_first) for g in of_emoji] == [
        (5, 1)
    ]


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), min_size=1, max_size=30))
def test_any_text_is_read_back_from_the_bytes_of_its_tokens(other_bytes: TokenBytes, text: str) -> None:
    ids = other_bytes.tokenizer(text, add_special_tokens=False)["input_ids"]
    assert texts(other_bytes, ids) == text.encode()


def test_tokens_of_the_same_bytes_are_shared_whatever_their_ids(
    tiny_tokenizer: Any, other_tokenizer: Any
) -> None:
    ours, theirs = TokenBytes(tiny_tokenizer), TokenBytes(other_tokenizer)
    shared = SharedTokens.of(ours, theirs, [(2, other_tokenizer.eos_token_id)])
    assert shared.n_student == 259 and shared.n_teacher == len(other_tokenizer)
    assert len(set(shared.student_ids)) == len(shared.student_ids) == len(set(shared.teacher_ids))
    for own, other in zip(shared.student_ids, shared.teacher_ids, strict=True):
        if own == 2:
            assert other == other_tokenizer.eos_token_id
        else:
            assert ours.by_id[own] == theirs.by_id[other]
    written = (
        tiny_tokenizer("k")["input_ids"][0],
        other_tokenizer("k", add_special_tokens=False)["input_ids"][-1],
    )
    assert written in zip(
        shared.student_ids, shared.teacher_ids, strict=True
    )  # the piece, not the byte that spells it


def test_running_text_is_aligned_from_its_first_target_on(
    tiny_tokenizer: Any, merging_tokenizer: Any
) -> None:
    row = Row(id="t", messages=(), group="", source="s", tags={}, kind="text", text="the kitchen light")
    student, teacher = (tokenise_row(row, one) for one in (tiny_tokenizer, merging_tokenizer))
    ours, theirs = TokenBytes(tiny_tokenizer), TokenBytes(merging_tokenizer)
    found = align_row(student, teacher, ours, theirs)
    first = found.groups[0]
    skipped = texts(ours, student.input_ids[: 1 + first.student_first])
    assert skipped == texts(theirs, teacher.input_ids[: 1 + first.teacher_first])
    assert found.groups[-1].student_last == len(found.student_ids)


def test_templates_that_write_another_answer_are_refused_with_the_row(tiny_tokenizer: Any) -> None:
    side = TokenBytes(tiny_tokenizer)
    student, shouting, twice = (
        tokenise_row(chat(*answers), tiny_tokenizer) for answers in (["ok"], ["OK"], ["ok"] * 2)
    )
    with pytest.raises(UserError, match="do not write the same answer") as told:
        align_row(student, shouting, side, side)
    assert (
        "row r" in told.value.faults[0].where and "'ok' for the student and 'OK'" in told.value.faults[0].why
    )
    with pytest.raises(UserError, match="do not write the same answer") as told:
        align_row(student, twice, side, side)
    assert "1 answers for the student and 2" in told.value.faults[0].why


def test_a_tokenizer_of_another_family_is_refused_with_a_remedy() -> None:
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    pieces = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    pieces.decoder = decoders.WordPiece()
    with pytest.raises(UserError, match="cannot be taken apart into bytes") as told:
        TokenBytes(PreTrainedTokenizerFast(tokenizer_object=pieces, unk_token="[UNK]"))
    assert "WordPiece" in told.value.faults[0].why and "way: answers" in told.value.faults[0].fix


def test_an_answer_that_one_side_ends_and_the_other_does_not_is_aligned_up_to_there(
    tiny_tokenizer: Any,
) -> None:
    ours = TokenBytes(tiny_tokenizer)
    ids = tiny_tokenizer("abc")["input_ids"]
    open_end = TokenisedRow("r", [1, *ids], [-100, *ids], 3)
    ended = TokenisedRow("r", [1, *ids, 2], [-100, *ids, 2], 4)
    found = align_row(open_end, ended, ours, ours)
    assert [tuple(group) for group in found.groups] == [(n, n + 1, n, n + 1) for n in range(3)]
    assert not found.ends
