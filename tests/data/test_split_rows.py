"""Long rows as several: every answer is learnt once, in a part that fits, asked with what stood before it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from finetune.data.row_tokens import IGNORED
from finetune.data.rows import Row
from finetune.data.tokenise import TokenisedSplit, tokenise_row, tokenise_rows
from finetune.errors import UserError


def row_of(*contents: str, id: str = "r", system: str | None = None) -> Row:
    turns = [{"role": "system", "content": system}] if system is not None else []
    turns += [{"role": "assistant" if n % 2 else "user", "content": c} for n, c in enumerate(contents)]
    return Row(id=id, messages=tuple(turns), group=id, source="made")


def split_at(rows: list[Row], tokenizer: Any, max_tokens: int, train_on: Any = "all") -> TokenisedSplit:
    return tokenise_rows(rows, tokenizer, max_tokens=max_tokens, long_rows="split", train_on=train_on)


def answers_of(split: TokenisedSplit, tokenizer: Any) -> list[str]:
    return [tokenizer.decode(row.input_ids[a:b]) for row in split.rows for a, b in row.spans()]


def test_every_answer_is_learnt_once_and_the_system_turn_leads_each_part(tiny_tokenizer: Any) -> None:
    contents = [part for n in range(6) for part in (f"question {n}", f"answer {n}")]
    row = row_of(*contents, system="Be brief.")
    split = split_at([row], tiny_tokenizer, 200)
    assert answers_of(split, tiny_tokenizer) == [f"{answer}<|im_end|>" for answer in contents[1::2]]
    assert len(split.rows) > 1
    assert [part.row_id for part in split.rows] == [f"r#{n}" for n in range(len(split.rows))]
    for part in split.rows:
        assert len(part.input_ids) <= 200
        assert tiny_tokenizer.decode(part.input_ids).startswith("<|im_start|>system\nBe brief.")
    assert split.counts == {
        "read": 1, "kept": 1, "dropped_too_long": 0, "truncated": 0, "split": 1, "parts": len(split.rows),
        "lost_targets": 0, "dropped_no_target": 0,
    }  # fmt: skip


def test_later_parts_see_what_was_said_just_before(tiny_tokenizer: Any) -> None:
    contents = [part for n in range(6) for part in (f"question {n}", f"answer {n}")]
    split = split_at([row_of(*contents, system="s")], tiny_tokenizer, 160)
    second = tiny_tokenizer.decode(split.rows[1].input_ids)
    first_learnt = answers_of(TokenisedSplit(split.rows[1:2], {}), tiny_tokenizer)[0]
    before = second[: second.index(first_learnt)]
    assert "answer" in before  # read as context
    assert before.count("<|im_start|>assistant") >= 2


def test_a_row_that_fits_is_left_whole(tiny_tokenizer: Any) -> None:
    rows = [row_of("q", "a", id="short"), row_of("q" * 150, "a", "q" * 150, "b", id="long")]
    split = split_at(rows, tiny_tokenizer, 250)
    assert split.rows[0].input_ids == tokenise_row(rows[0], tiny_tokenizer).input_ids
    assert [part.row_id for part in split.rows] == ["short", "long#0", "long#1"]


def test_an_exchange_too_long_by_itself_has_its_prompt_cut_or_its_answer_left_out(
    tiny_tokenizer: Any,
) -> None:
    row = row_of("q", "first", "p" * 500, "second", "q", "a" * 500, "q", "last")
    split = split_at([row], tiny_tokenizer, 200)
    assert answers_of(split, tiny_tokenizer) == ["first<|im_end|>", "second<|im_end|>", "last<|im_end|>"]
    assert split.counts["lost_targets"] == 501
    assert all(len(part.input_ids) <= 200 for part in split.rows)
    alone = split_at([row_of("q", "a" * 500, id="lost"), row_of("q", "a")], tiny_tokenizer, 200)
    assert (alone.counts["kept"], alone.counts["dropped_too_long"], alone.dropped[0]["id"]) == (1, 1, "lost")


def test_where_only_the_last_answer_counts_the_prompt_is_shortened(tiny_tokenizer: Any) -> None:
    row = row_of("q" * 100, "first", "q", "last")
    split = split_at([row], tiny_tokenizer, 150, "last")
    assert answers_of(split, tiny_tokenizer) == ["last<|im_end|>"]
    assert (split.counts["truncated"], split.counts["split"]) == (1, 0)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 80), st.integers(1, 50), st.booleans()), min_size=1, max_size=7),
    st.integers(150, 300),
)
def test_any_conversation(tiny_tokenizer: Any, sizes: list[tuple[int, int, bool]], max_tokens: int) -> None:
    turns: list[dict[str, Any]] = []
    for n, (asked, said, is_trained) in enumerate(sizes):
        turns.append({"role": "user", "content": "q" * asked})
        turns.append(
            {"role": "assistant", "content": f"{n}" + "a" * said} | ({} if is_trained else {"train": False})
        )
    row = Row("any", tuple(turns), "g", "made")
    split = split_at([row, row_of("q", "fits", id="short")], tiny_tokenizer, max_tokens)
    assert all(len(part.input_ids) <= max_tokens for part in split.rows)
    expected = [f"{turn['content']}<|im_end|>" for turn in turns[1::2] if turn.get("train", True)]
    learnt = answers_of(split, tiny_tokenizer)
    assert learnt == [*expected, "fits<|im_end|>"]
    assert split.counts["lost_targets"] == 0


def text_row(text: str, id: str = "t") -> Row:
    return Row(id, (), id, "made", kind="text", text=text)


def test_running_text_is_learnt_whole_and_ends_with_eos(tiny_tokenizer: Any) -> None:
    done = tokenise_row(text_row("Some text."), tiny_tokenizer)
    assert tiny_tokenizer.decode(done.input_ids) == "Some text.<|im_end|>"
    assert done.labels == [IGNORED, *done.input_ids[1:]]
    assert done.n_targets == len(done.input_ids) - 1


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=120), st.integers(2, 60))
def test_stretches_of_text_lose_no_target(tiny_tokenizer: Any, text: str, max_tokens: int) -> None:
    whole = tokenise_row(text_row(text), tiny_tokenizer)
    split = split_at([text_row(text)], tiny_tokenizer, max_tokens)
    assert all(len(part.input_ids) <= max_tokens for part in split.rows)
    learnt = [label for part in split.rows for label in part.labels if label != IGNORED]
    assert learnt == [label for label in whole.labels if label != IGNORED]
    assert split.counts["lost_targets"] == 0


def test_rows_of_tokens_are_taken_as_they_are(tiny_tokenizer: Any) -> None:
    row = Row("k", (), "k", "made", kind="tokens", input_ids=(5, 6, 7, 8), labels=(5, -100, 7, 8))
    done = tokenise_row(row, tiny_tokenizer)
    assert (done.input_ids, done.labels, done.n_targets) == ([5, 6, 7, 8], [IGNORED, IGNORED, 7, 8], 2)


@pytest.mark.parametrize("kind", ["preference", "kto", "stepwise"])
def test_answers_that_are_not_wanted_are_never_learnt_by_mistake(tiny_tokenizer: Any, kind: Any) -> None:
    messages = ({"role": "user", "content": "q"}, {"role": "assistant", "content": "bad"})
    with pytest.raises(UserError, match=rf"row r \(made\): a row of kind {kind} is not learnt") as caught:
        tokenise_row(Row("r", messages, "g", "made", kind=kind, label=False), tiny_tokenizer)
    assert "preference method" in str(caught.value)
