"""Rows that are too long: refused, dropped or shortened by the prompt, always counted; an answer is never cut."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from finetune.data.long_rows import GAP
from finetune.data.rows import Row
from finetune.data.tokenise import TokenisedSplit, tokenise_row, tokenise_rows
from finetune.errors import UserError


def row_of(*contents: str, id: str = "r", system: str | None = None) -> Row:
    turns = [{"role": "system", "content": system}] if system is not None else []
    turns += [{"role": "assistant" if n % 2 else "user", "content": c} for n, c in enumerate(contents)]
    return Row(id=id, messages=tuple(turns), group=id, source="made")


def spans_of(split: TokenisedSplit, tokenizer: Any) -> list[list[str]]:
    return [[tokenizer.decode(row.input_ids[a:b]) for a, b in row.spans()] for row in split.rows]


def check_account(split: TokenisedSplit) -> None:
    counts = split.counts
    assert counts["read"] == counts["kept"] + counts["dropped_too_long"] + counts["dropped_no_target"]
    assert counts["kept"] == len(split.rows)
    assert len(split.dropped) == counts["read"] - counts["kept"]
    assert counts["truncated"] <= counts["kept"]


def test_all_rows_too_long_is_an_error_that_names_the_key(tiny_tokenizer: Any) -> None:
    """TR01: four rows whose prompt fills the limit; never a run on nothing."""
    rows = [row_of("p" * 30, " seven", id=f"r{n}") for n in range(4)]
    for policy in ("drop", "truncate_prompt"):
        with pytest.raises(UserError, match=r"data\.max_tokens: no row is left: of 4 rows, 4 are too long"):
            tokenise_rows(rows, tiny_tokenizer, max_tokens=8, long_rows=policy)  # type: ignore[arg-type]


def test_long_rows_are_dropped_with_a_count_and_their_indexes(tiny_tokenizer: Any) -> None:
    """TR01, second variant: three long rows and a short one."""
    rows = [row_of("p" * 300, " seven", id=f"r{n}") for n in range(3)] + [row_of("p", " seven", id="short")]
    split = tokenise_rows(rows, tiny_tokenizer, max_tokens=200, long_rows="drop")
    check_account(split)
    assert [row.row_id for row in split.rows] == ["short"]
    assert split.counts["dropped_too_long"] == 3
    assert [entry["index"] for entry in split.dropped] == [0, 1, 2]


def test_the_default_refuses_and_says_what_would_do(tiny_tokenizer: Any) -> None:
    rows = [row_of("p" * 100, "a", id="long"), row_of("p", "a")]
    n_tokens = len(tokenise_row(rows[0], tiny_tokenizer).input_ids)
    with pytest.raises(UserError) as caught:
        tokenise_rows(rows, tiny_tokenizer, max_tokens=n_tokens - 1)
    assert f"long ({n_tokens})" in str(caught.value)
    assert f"set data.max_tokens to {n_tokens}" in str(caught.value)
    assert tokenise_rows(rows, tiny_tokenizer, max_tokens=n_tokens).counts["kept"] == 2


def test_rows_without_any_target_are_dropped_and_counted(tiny_tokenizer: Any) -> None:
    untrained = Row(
        "u",
        ({"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "train": False}),
        "u",
        "made",
    )
    split = tokenise_rows([untrained, row_of("q", "a")], tiny_tokenizer, max_tokens=200)
    check_account(split)
    assert split.counts["dropped_no_target"] == 1
    assert split.dropped == [
        {"id": "u", "index": 0, "reason": "no_target", "tokens": split.dropped[0]["tokens"]}
    ]
    with pytest.raises(UserError, match="1 have no trained answer"):
        tokenise_rows([untrained], tiny_tokenizer, max_tokens=200)


def test_no_rows_are_no_error(tiny_tokenizer: Any) -> None:
    split = tokenise_rows([], tiny_tokenizer, max_tokens=8)
    assert split.rows == []
    assert set(split.counts.values()) == {0}


def test_the_oldest_turns_go_first_and_the_system_turn_stays(tiny_tokenizer: Any) -> None:
    row = row_of("old " * 20, "first", "newer", "second", "newest", "third", system="Be brief.")
    kept = row_of("newer", "second", "newest", "third", system="Be brief.")
    n_tokens = len(tokenise_row(kept, tiny_tokenizer).input_ids)
    split = tokenise_rows([row], tiny_tokenizer, max_tokens=n_tokens, long_rows="truncate_prompt")
    check_account(split)
    assert split.counts["truncated"] == 1
    assert split.rows[0].input_ids == tokenise_row(kept, tiny_tokenizer).input_ids
    shorter = tokenise_rows([row], tiny_tokenizer, max_tokens=n_tokens - 1, long_rows="truncate_prompt")
    assert spans_of(shorter, tiny_tokenizer) == [["third<|im_end|>"]]
    assert "Be brief." in tiny_tokenizer.decode(shorter.rows[0].input_ids)


def test_the_middle_of_a_single_long_turn_is_cut(tiny_tokenizer: Any) -> None:
    row = row_of("BEGIN " + "x" * 500 + " END", "the whole answer", system="Be brief.")
    split = tokenise_rows([row], tiny_tokenizer, max_tokens=150, long_rows="truncate_prompt")
    (done,) = split.rows
    said = tiny_tokenizer.decode(done.input_ids)
    assert 145 <= len(done.input_ids) <= 150
    assert "BEGIN xx" in said and "xx END" in said and GAP in said and "Be brief." in said
    assert spans_of(split, tiny_tokenizer) == [["the whole answer<|im_end|>"]]


def test_an_answer_that_does_not_fit_is_dropped_not_cut(tiny_tokenizer: Any) -> None:
    """The end-of-turn token is never learnt after a cut answer."""
    rows = [row_of("q" * 50, "a" * 500, id="long answer"), row_of("q" * 500, "short", id="long prompt")]
    split = tokenise_rows(rows, tiny_tokenizer, max_tokens=200, long_rows="truncate_prompt")
    check_account(split)
    assert spans_of(split, tiny_tokenizer) == [["short<|im_end|>"]]
    assert split.dropped[0]["id"] == "long answer"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 120), st.integers(1, 60)), min_size=1, max_size=4),
    st.integers(90, 260),
    st.sampled_from(["all", "last"]),
)
def test_shortening_keeps_whole_answers_within_the_limit(
    tiny_tokenizer: Any, sizes: list[tuple[int, int]], max_tokens: int, train_on: Any
) -> None:
    contents = [part for n, (q, a) in enumerate(sizes) for part in ("q" * q, f"{n}" + "a" * a)]
    rows = [row_of(*contents, id="any"), row_of("q", "always fits", id="short")]
    split = tokenise_rows(
        rows, tiny_tokenizer, max_tokens=max_tokens, long_rows="truncate_prompt", train_on=train_on
    )
    check_account(split)
    assert all(len(row.input_ids) <= max_tokens for row in split.rows)
    answers = [f"{answer}<|im_end|>" for answer in contents[1::2]]
    for row, spans in zip(split.rows, spans_of(split, tiny_tokenizer), strict=True):
        if row.row_id == "any":
            assert spans == (answers[-len(spans) :] if train_on == "all" else answers[-1:])
