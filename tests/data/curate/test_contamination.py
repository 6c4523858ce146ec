"""Rows that hold what a suite asks, against a plain count over words."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finetune.data.curate.contamination import find_contamination


def words(n: int, start: int = 0) -> list[str]:
    return [f"w{index}" for index in range(start, start + n)]


def test_an_item_quoted_among_other_words() -> None:
    item = words(20)
    row = [*words(50, 100), *item, *words(30, 200)]
    found = find_contamination([" ".join(row), "nothing of it"], ["other words " * 9, " ".join(item)])
    assert found.row_coverage.tolist() == pytest.approx([0.2, 0.0])
    assert found.item_coverage.tolist() == [1.0, 0.0]
    assert found.item.tolist() == [1, -1]
    assert found.too_short.tolist() == []


def test_case_and_punctuation_hide_nothing() -> None:
    item = "What is the boiling point of water at the top of Mount Everest, in degrees?"
    row = "Q: what is the BOILING point of water — at the top of Mount Everest in degrees"
    assert find_contamination([row], [item]).item_coverage.tolist() == [1.0]


def test_half_an_item_by_eight_grams() -> None:
    item = words(20)
    row = [*item[:10], "x", *item[11:14], "y"]
    found = find_contamination([" ".join(row)], [" ".join(item)], n=8)
    assert found.item_coverage.tolist() == [0.5]
    assert find_contamination([" ".join(row)], [" ".join(item)]).item.tolist() == [-1]


def test_short_items_match_only_rows_of_the_same_words() -> None:
    found = find_contamination(
        ["turn on the light", "please turn on the light"], ["Turn on the light!", "off"], n=8
    )
    assert found.item.tolist() == [0, -1]
    assert found.too_short.tolist() == [0, 1]
    assert found.row_coverage.tolist() == [1.0, 0.0]


def test_characters_in_scripts_without_spaces() -> None:
    item = "水在珠穆朗玛峰顶的沸点是多少摄氏度请回答"
    assert find_contamination([f"问题：{item}。谢谢"], [item]).item_coverage.tolist() == [1.0]


def test_the_wording_that_all_items_share_is_not_contamination() -> None:
    instruction = (
        "Answer the following question with one letter only and do not explain your choice at all please"
    )
    items = [f"{instruction} {' '.join(words(15, 100 * n))}" for n in range(1, 30)]
    rows = [f"{instruction} {' '.join(words(15, 9000))}", " ".join(words(15, 500))]
    found = find_contamination(rows, items)
    assert found.own_wording > 0
    assert found.item.tolist() == [-1, 4]


@given(
    st.lists(st.lists(st.sampled_from("abcd"), max_size=14), max_size=5),
    st.lists(st.lists(st.sampled_from("abcd"), max_size=10), max_size=4),
    st.integers(2, 4),
)
def test_against_a_plain_count(rows: list[list[str]], items: list[list[str]], n: int) -> None:
    found = find_contamination([" ".join(row) for row in rows], [" ".join(item) for item in items], n=n)

    def grams(tokens: list[str]) -> dict[tuple[str, ...], set[int]]:
        """n-gram (of a shorter text, the text) -> the tokens in it."""
        size = min(n, len(tokens))
        places = range(len(tokens) - size + 1) if tokens else range(0)
        made: dict[tuple[str, ...], set[int]] = {}
        for place in places:
            made.setdefault(tuple(tokens[place : place + size]), set()).update(range(place, place + size))
        return made

    def inside(tokens: list[str], others: set[tuple[str, ...]]) -> float:
        covered = {place for gram, at in grams(tokens).items() if gram in others for place in at}
        return len(covered) / len(tokens) if tokens else 0.0

    every = {gram for item in items for gram in grams(item)}
    for index, row in enumerate(rows):
        assert found.row_coverage[index] == pytest.approx(inside(row, every))
        of_items = [inside(item, set(grams(row))) for item in items]
        assert found.item_coverage[index] == pytest.approx(max(of_items, default=0.0))
        if found.item[index] >= 0:
            assert of_items[found.item[index]] == pytest.approx(max(of_items))


def test_nothing_against_nothing() -> None:
    found = find_contamination([], [])
    assert len(found.item) == len(found.row_coverage) == 0
    assert find_contamination(["a b c"], []).item.tolist() == [-1]
    assert find_contamination([""], [""]).item.tolist() == [-1]
