"""Judgements that contradict one another: which rows are found, and what is no contradiction."""

from __future__ import annotations

from typing import Any

from finetune.data.curate.swapped import Swapped, find_swapped
from finetune.data.rows import Row


def said(text: str, **more: Any) -> tuple[dict[str, Any], ...]:
    return ({"role": "assistant", "content": text, **more},)


def pair(prompt: str, chosen: str, rejected: str, **more: Any) -> Row:
    asked = ({"role": "user", "content": prompt},)
    return Row("r", asked, "g", "s", kind="preference", chosen=said(chosen, **more), rejected=said(rejected))


def judged(prompt: str, answer: str, label: bool) -> Row:
    asked = ({"role": "user", "content": prompt},)
    return Row("r", (*asked, *said(answer)), "g", "s", kind="kto", label=label)


def test_pairs_that_prefer_the_other_answer_are_found_with_all_their_rows() -> None:
    rows = [
        pair("q", "x", "y"),
        pair("p", "x", "y"),
        pair("q", "y", "x"),
        pair(" Q ", "x", "y"),  # a prompt is the same in another case
        pair("q", "y", "x", weight=0.5),  # and an answer whatever its weight
    ]
    assert find_swapped(rows) == [Swapped((0, 3), (2, 4))]
    assert find_swapped(rows)[0].rows == (0, 2, 3, 4)


def test_answers_are_compared_to_the_letter() -> None:
    assert find_swapped([pair("q", "It is one.", "it is one."), pair("q", "It is one.", "it is one.")]) == []
    assert len(find_swapped([pair("q", "It", "it"), pair("q", "it", "It")])) == 1


def test_an_order_of_several_answers_is_no_contradiction() -> None:
    assert find_swapped([pair("q", "a", "b"), pair("q", "b", "c"), pair("q", "a", "c")]) == []


def test_an_answer_that_is_wanted_and_not_is_found() -> None:
    rows = [judged("q", "x", False), judged("q", "y", True), judged("q", "x", True), judged("p", "x", True)]
    assert find_swapped(rows) == [Swapped((0,), (2,))]


def test_other_rows_judge_nothing() -> None:
    chat = Row("r", ({"role": "user", "content": "q"}, *said("x")), "g", "s")
    assert find_swapped([chat, chat]) == find_swapped([]) == []
