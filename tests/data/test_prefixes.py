"""Which beginnings rows of a pack share, against brute force and by hand."""

from __future__ import annotations

import random

import pytest

from finetune.data.packing import pack
from finetune.data.prefixes import FEWEST_TOKENS, computed_tokens, longest_pack, shared_beginnings
from finetune.data.row_tokens import IGNORED, TokenisedRow

SYSTEM = list(range(100, 120))


def _row(ids: list[int], first_target: int) -> TokenisedRow:
    labels = [IGNORED] * first_target + ids[first_target:]
    return TokenisedRow("r", ids, labels, len(ids) - first_target)


def _pack(rows: list[TokenisedRow]) -> list[tuple[list[int], list[int]]]:
    return [(row.input_ids, row.labels) for row in rows]


def _alike(one: list[int], other: list[int]) -> int:
    n = 0
    while n < min(len(one), len(other)) and one[n] == other[n]:
        n += 1
    return n


def test_a_system_prompt_is_computed_by_the_first_row_that_has_it() -> None:
    rows = [_row([*SYSTEM, n, n + 1, n + 2, n + 3], 22) for n in (1, 11, 21)]
    assert shared_beginnings(_pack(rows)) == [(0, 0), (0, 20), (0, 20)]
    assert computed_tokens(rows) == 24 + 4 + 4


def test_two_system_prompts_among_each_other() -> None:
    other = list(range(300, 330))
    rows = [
        _row([*SYSTEM, 1, 2, 3], 22),
        _row([*other, 1, 2, 3], 32),
        _row([*SYSTEM, 4, 5, 6], 22),
        _row([*other, 4, 5, 6], 32),
    ]
    assert shared_beginnings(_pack(rows)) == [(0, 0), (1, 0), (0, 20), (1, 30)]


def test_prompts_whose_first_sentence_is_the_same_are_each_computed_once() -> None:
    prompts = [[*SYSTEM, *range(start, start + 30)] for start in (200, 300, 400)]
    rows = [_row([*prompts[n % 3], n + 1, n + 2, n + 3], 52) for n in range(9)]
    assert shared_beginnings(_pack(rows)) == [(0, 0), (1, 0), (2, 0), *((n % 3, 50) for n in range(3, 9))]
    # With a single row of a second prompt, computing all of that anew would save nobody anything.
    assert shared_beginnings(_pack([rows[n] for n in (0, 3, 1, 6)])) == [(0, 0), (0, 50), (0, 20), (0, 50)]


def test_rows_of_which_another_is_the_beginning() -> None:
    rows = [_row([*SYSTEM, *range(1, n)], 17 + n) for n in (4, 6, 8)]
    assert shared_beginnings(_pack(rows)) == [(0, 0), (0, 22), (0, 23)]
    assert shared_beginnings(_pack(rows[::-1])) == [(0, 0), (0, 22), (0, 20)]


def test_targets_and_the_token_before_the_first_of_them_stay_with_their_row() -> None:
    same = [*SYSTEM, 1, 2, 3, 4]
    assert shared_beginnings(_pack([_row(same, 22), _row(same, 22)]))[1] == (0, 21)
    assert shared_beginnings(_pack([_row(same, 22), _row(same, 10)]))[1] == (0, 9)
    assert shared_beginnings(_pack([_row(same, 1), _row(same, 1)]))[1] == (
        1,
        0,
    )  # text: every token is learnt
    assert shared_beginnings(_pack([_row(same, 0), _row(same, 0)]))[1] == (1, 0)
    silent = TokenisedRow("r", same, [IGNORED] * len(same), 0)
    assert shared_beginnings(_pack([silent, silent]))[1] == (0, len(same) - 2)


def test_fewer_tokens_than_pay_are_not_shared() -> None:
    few, enough = SYSTEM[: FEWEST_TOKENS - 1], SYSTEM[:FEWEST_TOKENS]
    for beginning, length in ((few, 0), (enough, FEWEST_TOKENS)):
        rows = [_row([*beginning, n, n + 1, n + 2], len(beginning) + 2) for n in (1, 5)]
        assert shared_beginnings(_pack(rows))[1][1] == length


def test_what_is_short_beside_a_long_row_is_not_shared() -> None:
    for rest, length in ((300, 20), (301, 0)):
        rows = [_row([*SYSTEM, *range(start, start + rest)], 25) for start in (1000, 2000)]
        assert shared_beginnings(_pack(rows))[1][1] == length


@pytest.mark.parametrize("seed", range(20))
def test_every_row_can_be_put_together_again(seed: int) -> None:
    draw = random.Random(seed)
    rows = []
    for _ in range(draw.randint(1, 12)):
        ids = [draw.choice((1, 1, 1, 2)) for _ in range(draw.randint(2, 40))]
        rows.append(_row(ids, draw.randint(0, len(ids) - 1)))
    found = shared_beginnings(_pack(rows))
    for place, (other, length) in enumerate(found):
        row = rows[place]
        assert other <= place and (length == 0) == (other == place)
        assert rows[other].input_ids[:length] == row.input_ids[:length]
        assert all(label == IGNORED for label in row.labels[: length + 1]) or not length
        assert length < len(row.input_ids)
        assert not length or found[other] == (other, 0)
        limit = max(next(n for n, label in enumerate(row.labels) if label != IGNORED) - 1, 0)
        whole = [earlier for earlier in range(place) if found[earlier][1] == 0]
        usable = [_alike(rows[other].input_ids, row.input_ids[:limit]) for other in whole]
        most = max(usable, default=0)
        assert length == (most if most >= FEWEST_TOKENS and found[place][0] != place else 0)


def test_the_longest_pack_as_it_is_computed() -> None:
    rows = [_row([*SYSTEM, *range(n, n + 10)], 25) for n in range(40)]
    packs = pack([30] * 40, 128)
    assert longest_pack(rows, 128, share=False) == max(len(members) for members in packs) * 30 == 120
    assert longest_pack(rows, 128, share=True) == 30 + 3 * 10
