"""What a limit on tokens would cut, against a count over the labels of every row."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from finetune.cli.data_lengths import _lines
from finetune.data.lengths import measure_lengths
from finetune.data.row_tokens import IGNORED
from finetune.data.rows import Row
from finetune.data.tokenise import tokenise_row
from finetune.errors import UserError


def row_of(*contents: str, id: str = "r", **marks: Any) -> Row:
    turns: list[dict[str, Any]] = [
        {"role": "assistant" if n % 2 else "user", "content": c} for n, c in enumerate(contents)
    ]
    turns[-1].update(marks)
    return Row(id, tuple(turns), id, "made")


def test_a_row_is_cut_loses_its_end_or_all_its_targets(tiny_tokenizer: Any) -> None:
    row = row_of("question", "answer", id="only")
    done = tokenise_row(row, tiny_tokenizer)
    first = next(place for place, label in enumerate(done.labels) if label != IGNORED)
    last = max(place for place, label in enumerate(done.labels) if label != IGNORED)
    whole = len(done.input_ids)
    assert last == whole - 2  # a line break follows the end of turn, and is not learnt
    limits = [first, first + 1, last, last + 1, whole]
    found = measure_lengths([row], tiny_tokenizer, limits=limits)
    assert [(at.cut, at.lose_end, at.lose_all_targets) for at in found.limits] == [
        (1, 1, 1), (1, 1, 0), (1, 1, 0), (1, 0, 0), (0, 0, 0),
    ]  # fmt: skip
    assert [at.targets_kept for at in found.limits] == pytest.approx([0, 1 / 7, 6 / 7, 1, 1])
    assert (found.rows, found.tokens, found.targets, found.longest) == (1, whole, 7, (("only", whole),))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=40)
@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 30), st.integers(1, 30)), min_size=1, max_size=3),
        min_size=1,
        max_size=5,
    ),
    st.integers(40, 200),
    st.sampled_from(["all", "last"]),
)
def test_against_the_labels_of_every_row(
    tiny_tokenizer: Any, sizes: list[list[tuple[int, int]]], limit: int, train_on: Any
) -> None:
    rows = [
        row_of(*(part for q, a in row for part in ("q" * q, "a" * a)), id=f"r{n}")
        for n, row in enumerate(sizes)
    ]
    found = measure_lengths(rows, tiny_tokenizer, train_on=train_on, limits=[limit])
    labels = [tokenise_row(row, tiny_tokenizer, train_on=train_on).labels for row in rows]
    targets = [[place for place, label in enumerate(row) if label != IGNORED] for row in labels]
    (at,) = found.limits
    assert at.cut == sum(len(row) > limit for row in labels)
    assert at.lose_end == sum(places[-1] >= limit for places in targets)
    assert at.lose_all_targets == sum(places[0] >= limit for places in targets)
    assert at.targets_kept == pytest.approx(
        sum(place < limit for places in targets for place in places) / sum(map(len, targets))
    )
    assert found.quantiles["1.0"] == max(map(len, labels))


def test_rows_without_targets_and_rows_that_cannot_be_rendered_are_counted(tiny_tokenizer: Any) -> None:
    untrained = row_of("q", "a", id="u", train=False)
    no_answer = Row("n", ({"role": "user", "content": "q"},), "n", "made")
    found = measure_lengths([untrained, no_answer, row_of("q", "a")], tiny_tokenizer)
    assert (found.rows, found.without_targets, found.failed) == (2, 1, 1)
    assert "row n (made)" in found.reasons[0]
    assert all(at.lose_end == at.lose_all_targets == 0 for at in found.limits)
    with pytest.raises(UserError, match="no assistant turn"):
        measure_lengths([no_answer], tiny_tokenizer)
    with pytest.raises(UserError, match="no rows"):
        measure_lengths([], tiny_tokenizer)


def test_rows_with_control_tokens_in_their_text_are_counted(tiny_tokenizer: Any) -> None:
    def row(name: str, asked: str, answer: str) -> Row:
        turns = ({"role": "user", "content": asked}, {"role": "assistant", "content": answer})
        return Row(name, turns, name, "s")

    tiny_tokenizer.add_special_tokens({"additional_special_tokens": ["<|header|>"]})
    tiny_tokenizer.add_tokens(["<think>"])  # no control token: it may stand in answers
    rows = [
        row("plain", "q", "<think>a"),
        row("ended", "q", "a<|im_end|>"),
        row("opened", "<|im_start|>", "a"),
    ]
    found = measure_lengths([*rows, row("headed", "<|header|>", "a")], tiny_tokenizer)
    names = ("ended", "opened", "headed")
    assert (found.with_control_tokens, found.first_with_control_tokens) == (3, names)
    assert found.to_dict()["with_control_tokens"] == 3
    assert any("3 rows hold a control token" in line and "ended, opened" in line for line in _lines(found))
