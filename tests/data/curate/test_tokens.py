"""Words as hashes: what counts as a word, and that a hash depends on the word alone."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from finetune.data.curate.tokens import batches, fold, gather_ranges, hash_tokens, ngrams

text = st.text(st.characters(exclude_categories=[]), max_size=60)


def hashes_of(*texts: str) -> list[list[int]]:
    found = hash_tokens(texts)
    return [found.hashes[a:b].tolist() for a, b in zip(found.offsets[:-1], found.offsets[1:], strict=True)]


def same(one: str, other: str) -> bool:
    first, second = hashes_of(one, other)
    return first == second


@pytest.mark.parametrize(
    ("written", "words"),
    [
        ("The quick, brown fox!", "the quick brown fox"),
        ("  tabs\tand\nlines  ", "tabs and lines"),
        ("Straße", "strasse"),
        ("ＦＵＬＬ ｗｉｄｔｈ", "full width"),
        ("ﬁne", "fine"),
        ("don’t", "don t"),
        ("naïve café", "NAÏVE CAFÉ"),
        ("“quoted” (text)", "quoted text"),
        ("f(x)", "f x"),
        ("今天天气", "今 天 天 气"),
        ("iPhoneが好き", "iphone が 好 き"),
        ("안녕 세상", "안녕, 세상."),
    ],
)
def test_case_forms_spaces_and_punctuation_do_not_count(written: str, words: str) -> None:
    assert same(written, words)


@pytest.mark.parametrize(
    ("one", "other"),
    [("3 + 4", "3 - 4"), ("3 * 4", "3 / 4"), ("a < b", "a > b"), ("50 €", "50 $"), ("ab", "a b"), ("xy", "yx"),
     ("снег", "снеr"), ("snake_case", "snake case"), ("0" * 300, "0" * 301), ("a" * 8, "a" * 9), ("👍", "👎")],
)  # fmt: skip
def test_what_makes_another_text(one: str, other: str) -> None:
    assert not same(one, other)


def test_a_script_without_spaces_has_a_token_a_character() -> None:
    assert [len(row) for row in hashes_of("今天天气很好", "hello world", "สวัสดี", "")] == [6, 2, 6, 0]


def test_nothing_but_punctuation_is_no_token() -> None:
    assert hashes_of("", " ", "...", "?!", "\u200b", "\n\n") == [[]] * 6
    assert hash_tokens([]).offsets.tolist() == [0]


@given(st.lists(text, max_size=8), st.randoms(use_true_random=False))
def test_the_hashes_of_a_row_do_not_depend_on_its_neighbours(texts: list[str], random) -> None:  # type: ignore[no-untyped-def]
    alone = [hashes_of(one)[0] for one in texts]
    assert hashes_of(*texts) == alone
    order = list(range(len(texts)))
    random.shuffle(order)
    assert hashes_of(*(texts[place] for place in order)) == [alone[place] for place in order]


@given(st.lists(st.text("ab +éß€𝒳今", max_size=12), max_size=6))
def test_against_a_plain_reading(texts: list[str]) -> None:
    """One token a run of letters, one an operator or a character of a script without spaces; equal iff equal."""
    words = [re.findall(r"[abéßsx]+|[+€今]", fold(one)) for one in texts]
    found = hashes_of(*texts)
    assert [len(row) for row in found] == [len(row) for row in words]
    named: dict[int, str] = {}
    for row, spelt in zip(found, words, strict=True):
        for value, word in zip(row, spelt, strict=True):
            assert named.setdefault(value, word) == word
    assert len(set(named.values())) == len(named)


def test_hashes_are_the_same_on_every_machine_and_day() -> None:
    """Split files and manifests rest on them: a change here moves rows of everybody's data."""
    assert hashes_of("Hello, wörld", "international organisation" + "x" * 300, "日本") == [
        [0xA36FBF98C6CAA59F, 0x1765DBF2A0D509B],
        [0xDE7738B7C81F6399, 0x849C7888499E846F],
        [0xEE24BA96A53B43D1, 0x38A8E77C23DC93B8],
    ]


@given(st.lists(st.lists(st.sampled_from("abcde"), max_size=9), max_size=5), st.integers(1, 5))
def test_ngrams_are_equal_exactly_where_the_words_are(rows: list[list[str]], n: int) -> None:
    grams = ngrams(hash_tokens([" ".join(row) for row in rows]), n)
    names: dict[int, tuple[str, ...]] = {}
    for index, row in enumerate(rows):
        expected = [tuple(row[at : at + n]) for at in range(max(len(row) - n + 1, min(len(row), 1)))]
        values = grams.hashes[grams.offsets[index] : grams.offsets[index + 1]].tolist()
        assert len(values) == len(expected)
        for value, gram in zip(values, expected, strict=True):
            assert names.setdefault(value, gram) == gram
    assert len(set(names.values())) == len(names)


def test_batches_are_small_and_complete() -> None:
    texts = ["x" * (index % 7 * 10_000) for index in range(600)]
    parts = list(batches(texts))
    assert [row for _, rows in parts for row in rows] == texts
    assert [first for first, _ in parts] == np.cumsum([0, *(len(rows) for _, rows in parts)])[:-1].tolist()
    assert all(sum(map(len, rows[:-1])) < 300_000 and len(rows) <= 256 for _, rows in parts)


def test_ranges() -> None:
    starts, counts = np.array([5, 0, 9]), np.array([2, 3, 0])
    assert gather_ranges(starts, counts).tolist() == [5, 6, 0, 1, 2]
    assert gather_ranges(starts[:0], counts[:0]).tolist() == []
