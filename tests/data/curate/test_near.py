"""Near duplicates against brute force: every pair that is reported is true, and nearly all true pairs are reported."""

from __future__ import annotations

import itertools
import random
from collections import Counter, defaultdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from finetune.data.curate import near, verify
from finetune.data.curate.links import components, representatives
from finetune.data.curate.near import bands_for, find_near_duplicates
from finetune.errors import UserError

Pairs = dict[tuple[int, int], float]


def shingles(text: str, n: int = 3) -> set[tuple[str, ...]]:
    words = text.split()
    return {tuple(words[at : at + n]) for at in range(max(len(words) - n + 1, min(len(words), 1)))}


def brute_force(texts: list[str], threshold: float, n: int = 3) -> Pairs:
    sets = [shingles(text, n) for text in texts]
    rows_with: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for row, grams in enumerate(sets):
        for gram in grams:
            rows_with[gram].append(row)
    common = Counter(pair for rows in rows_with.values() for pair in itertools.combinations(rows, 2))
    jaccard = {(i, j): n / (len(sets[i]) + len(sets[j]) - n) for (i, j), n in common.items()}
    return {pair: value for pair, value in jaccard.items() if value >= threshold}


def edited(words: list[str], n_edits: int, draw: random.Random) -> list[str]:
    changed = list(words)
    for _ in range(n_edits):
        changed[draw.randrange(len(words))] = f"new{draw.randrange(10_000)}"
    return changed


def made_rows(n: int, seed: int) -> list[str]:
    """Rows of 60 words; a fifth of them have one to three edited copies."""
    draw = random.Random(seed)
    rows: list[str] = []
    while len(rows) < n:
        words = [f"w{draw.randrange(3000)}" for _ in range(60)]
        rows.append(" ".join(words))
        if draw.random() < 0.2:
            rows += [" ".join(edited(words, draw.randint(0, 9), draw)) for _ in range(draw.randint(1, 3))]
    draw.shuffle(rows)
    return rows[:n]


def as_pairs(texts: list[str], **options: float) -> Pairs:
    return {(i, j): jaccard for i, j, jaccard in find_near_duplicates(texts, **options)}  # type: ignore[arg-type]


@pytest.mark.parametrize("threshold", [0.5, 0.6, 0.8, 0.9])
def test_pairs_and_similarities_are_those_of_brute_force(threshold: float) -> None:
    texts = made_rows(900, seed=int(threshold * 100))
    truth = brute_force(texts, threshold)
    found = as_pairs(texts, threshold=threshold)
    groups = [[row for row, text in enumerate(texts) if text == one] for one in set(texts)]
    twins = {row: min(group) for group in groups for row in group}
    # Of equal rows only the first is paired with others; its twins are linked to it.
    expected = {
        (i, j): value for (i, j), value in truth.items() if twins[i] == i and (twins[j] == j or twins[j] == i)
    }
    assert set(found) <= set(truth)
    assert len(set(expected) & set(found)) >= 0.97 * len(expected)
    assert len(expected) > 20
    assert found == {pair: pytest.approx(truth[pair], abs=1e-12) for pair in found}


@given(st.lists(st.lists(st.sampled_from("abcdef"), max_size=12), max_size=10), st.integers(1, 4))
def test_no_false_pair_among_short_rows(rows: list[list[str]], n: int) -> None:
    texts = [" ".join(row) for row in rows]
    truth = brute_force(texts, 0.6, n)
    found = as_pairs(texts, threshold=0.6, ngram=n)
    assert set(found) <= set(truth)
    assert all(found[pair] == pytest.approx(truth[pair]) for pair in found)
    equal = {pair for pair, value in truth.items() if value == 1.0}
    assert {row for pair in equal for row in pair} == {
        row for pair, value in found.items() if value == 1.0 for row in pair
    }


def test_empty_rows_are_near_to_nothing() -> None:
    found = find_near_duplicates(["", "...", "a b c", " \n", "A, b c!", "?"])
    assert list(found) == [(2, 4, 1.0)]
    assert found.empty.tolist() == [0, 1, 3, 5]
    assert list(find_near_duplicates([])) == list(find_near_duplicates([""])) == []


def test_one_edit_in_a_chat_row_is_found_with_three_grams() -> None:
    """One word of 25: a 3-gram Jaccard of 20/26; with 5-grams it would be 16/26, hardly above 0.6."""
    words = [f"w{n}" for n in range(25)]
    texts = [" ".join(words), " ".join([*words[:12], "other", *words[13:]])]
    assert as_pairs(texts) == {(0, 1): pytest.approx(20 / 26)}
    assert as_pairs(texts, ngram=5) == {(0, 1): pytest.approx(16 / 26)}


def test_scripts_without_spaces_are_compared_by_characters() -> None:
    texts = [
        "今天的天气真是非常好我们去公园散步吧",
        "今天的天气真是非常好我们去公园跑步吧",
        "明天我要在家里看书写字",
    ]
    assert as_pairs(texts, threshold=0.6) == {(0, 1): pytest.approx(13 / 19)}


def test_formulas_that_differ_by_an_operator_are_not_equal() -> None:
    assert as_pairs(["what is 17 + 25", "what is 17 - 25"]) == {}


def test_the_order_of_rows_and_the_number_of_threads_change_nothing() -> None:
    texts = made_rows(400, seed=1)
    found = as_pairs(texts)
    assert as_pairs(texts, workers=1) == as_pairs(texts, workers=3) == found
    order = list(range(len(texts)))
    random.Random(5).shuffle(order)
    moved = as_pairs([texts[place] for place in order])
    kept = components(len(texts), ((i, j, 1.0) for i, j in found))
    kept_moved = components(len(texts), ((i, j, 1.0) for i, j in moved))
    groups = {frozenset(np.flatnonzero(kept == root).tolist()) for root in kept}
    assert groups == {
        frozenset(order[row] for row in np.flatnonzero(kept_moved == root)) for root in kept_moved
    }


def test_texts_are_fetched_one_by_one_and_in_order() -> None:
    class OnDisk:
        def __init__(self) -> None:
            self.rows, self.asked = made_rows(300, seed=2), []

        def __len__(self) -> int:
            return len(self.rows)

        def __getitem__(self, index: int, /) -> str:
            self.asked.append(index)
            return self.rows[index]

    texts = OnDisk()
    found = {(i, j): x for i, j, x in find_near_duplicates(texts)}
    assert found == as_pairs(texts.rows)
    assert texts.asked[:300] == list(range(300))
    assert set(texts.asked[300:]) >= {row for pair in found for row in pair}


def test_verification_in_many_blocks_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = made_rows(300, seed=3)
    whole = as_pairs(texts)
    monkeypatch.setattr(verify, "_BLOCK_HASHES", 500)
    monkeypatch.setattr(near, "_PAIRS_HELD", 10)
    assert as_pairs(texts) == whole


def test_a_crowd_of_alike_rows_is_linked_without_comparing_all_with_all() -> None:
    draw = random.Random(4)
    base = [f"w{n}" for n in range(60)]
    crowd = [" ".join([*base, f"only{n}", f"here{draw.randrange(9)}"]) for n in range(1500)]
    found = find_near_duplicates(crowd)
    assert found.n_verified < 60 * len(crowd)
    assert len(set(components(len(crowd), found).tolist())) == 1
    assert len(set(representatives(len(crowd), found).tolist())) == 1
    assert found.unchecked.size == 0
    assert all(jaccard == pytest.approx(58 / 62, abs=0.02) for _, _, jaccard in found)


def test_a_crowd_that_shares_an_instruction_is_named_not_merged() -> None:
    """Rows of 40 common and 40 own words: a third alike, so none is a duplicate, however often they meet."""
    base = " ".join(f"w{n}" for n in range(40))
    rows = [base + " " + " ".join(f"own{n}x{k}" for k in range(40)) for n in range(400)]
    found = find_near_duplicates(rows)
    assert list(found) == []
    assert set(found.unchecked.tolist()) <= set(range(400))
    assert found.n_verified < 30_000
    near_one = [*rows, rows[7].replace("own7x3 ", "changed ")]
    assert [pair[:2] for pair in find_near_duplicates(near_one)] == [(7, 400)]


def test_equal_rows_are_linked_to_the_first_of_them() -> None:
    texts = ["a b c d"] * 500 + ["x y z"] + ["A b, c d."] * 2
    found = list(find_near_duplicates(texts))
    assert found == [(0, row, 1.0) for row in [*range(1, 500), 501, 502]]


def test_bands_divide_the_permutations_and_reach_the_recall() -> None:
    for threshold, permutations in itertools.product([0.4, 0.6, 0.75, 0.9, 1.0], [96, 128, 256]):
        bands = bands_for(threshold, permutations)
        assert permutations % bands == 0
        assert 1 - (1 - threshold ** (permutations // bands)) ** bands >= 0.95
    assert bands_for(0.6, 96) == 24
    assert bands_for(1.0, 96) == 1
    for threshold, permutations in [(0.0, 96), (1.1, 96), (0.05, 16)]:
        with pytest.raises(UserError):
            bands_for(threshold, permutations)


def test_no_chain_is_followed_when_rows_are_left_out() -> None:
    """a ~ b ~ c ~ d, where a and c are not near: b goes for a, d goes for c."""
    chain = [(0, 1, 0.7), (1, 2, 0.8), (2, 3, 0.9)]
    assert representatives(5, chain).tolist() == [0, 0, 2, 2, 4]
    assert components(5, chain).tolist() == [0, 0, 0, 0, 4]


def test_the_most_similar_kept_row_stands_for_a_row() -> None:
    assert representatives(3, iter([(0, 2, 0.7), (1, 2, 0.9)])).tolist() == [0, 1, 1]
    assert representatives(0, []).tolist() == components(0, []).tolist() == []


@given(st.lists(st.tuples(st.integers(0, 11), st.integers(0, 11)).filter(lambda p: p[0] < p[1]), unique=True))
def test_every_row_left_out_is_next_to_the_one_kept_and_no_two_kept_are_near(
    links: list[tuple[int, int]],
) -> None:
    kept_for = representatives(12, [(i, j, 0.6 + 0.01 * ((i * 7 + j) % 30)) for i, j in links])
    for row, keeper in enumerate(kept_for.tolist()):
        assert keeper == row or (keeper, row) in links
        assert kept_for[keeper] == keeper
    kept = [row for row in range(12) if kept_for[row] == row]
    assert not any(pair in links for pair in itertools.combinations(kept, 2))
