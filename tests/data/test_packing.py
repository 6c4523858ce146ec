"""Packs: every row once and whole, none too full, all about equally full."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finetune.data.packing import pack
from finetune.data.row_tokens import IGNORED
from finetune.data.rows import Row
from finetune.data.tokenise import tokenise_rows
from finetune.errors import UserError


@given(st.lists(st.integers(0, 64), max_size=120), st.integers(64, 200))
def test_every_row_is_in_one_pack_and_no_pack_overflows(lengths: list[int], capacity: int) -> None:
    packs = pack(lengths, capacity)
    assert sorted(index for members in packs for index in members) == list(range(len(lengths)))
    loads = [sum(lengths[index] for index in members) for members in packs]
    assert all(load <= capacity for load in loads)
    assert all(packs)
    n_fewest = -(-sum(lengths) // capacity)
    assert len(packs) <= max(1 if lengths else 0, -(-11 * n_fewest // 9) + 1)
    assert pack(lengths, capacity) == packs


def test_packs_are_even() -> None:
    lengths = [40 + (index * 37) % 35 for index in range(1500)]
    for capacity in (512, 1024, 2048):
        packs = pack(lengths, capacity)
        loads = [sum(lengths[index] for index in members) for members in packs]
        assert len(packs) <= -(-sum(lengths) // capacity) * 1.03 + 1
        assert min(loads) >= 0.85 * max(loads)


def test_where_dealing_by_load_would_overflow_a_tight_fit_is_found() -> None:
    """Longest first to the emptier pack gives 5+4 and 5+3, and the last 3 fits nowhere; 5+5 and 4+3+3 do."""
    assert pack([5, 5, 4, 3, 3], 10) == [[0, 1], [2, 3, 4]]


def test_a_row_longer_than_a_pack_is_a_user_error() -> None:
    with pytest.raises(UserError, match=r"train\.pack_tokens: a row of 65 tokens"):
        pack([3, 65], 64)


def test_packing_changes_nothing_that_is_supervised(tiny_tokenizer: object) -> None:
    """PK03: as many targets packed as unpacked, and the first label of every document in a pack is ignored."""
    rows = [
        Row(
            id=str(n),
            messages=({"role": "user", "content": "q" * n}, {"role": "assistant", "content": "a" * (n + 1)}),
            group=str(n),
            source="made",
        )
        for n in range(9)
    ]
    tokenised = tokenise_rows(rows, tiny_tokenizer, max_tokens=400).rows
    packs = pack([len(row.input_ids) for row in tokenised], 200)
    assert len(packs) < len(rows)
    packed_targets = 0
    for members in packs:
        labels = [label for index in members for label in tokenised[index].labels]
        starts = [sum(len(tokenised[i].labels) for i in members[:k]) for k in range(len(members))]
        assert all(labels[start] == IGNORED for start in starts)
        packed_targets += sum(label != IGNORED for label in labels)
    assert packed_targets == sum(row.n_targets for row in tokenised) == sum(n + 2 for n in range(9))
