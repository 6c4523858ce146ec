"""The split is a guarantee: no group, no prompt on two sides, whatever the order of the rows; duplicates are kept once."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from finetune.data.fold import fold_text, normalised_opening
from finetune.data.rows import SIDES, Row, Side
from finetune.data.spec_split import SplitSection
from finetune.data.stages.settle import Verdicts, links_of, settle, shared_keys
from finetune.data.stages.sides import assign_sides
from finetune.data.stages.table import RowTable

MakeTable = Callable[..., RowTable]
HALVES = SplitSection(shares={"train": 0.5, "validation": 0.1, "test": 0.3, "regressions": 0.1})


def made_row(prompt: str, answer: str, group: str, **tags: str) -> Row:
    turns = ({"role": "user", "content": prompt}, {"role": "assistant", "content": answer})
    return Row(id=f"{group}/{prompt}/{answer}", messages=turns, group=group, source="made", tags=tags)


def settled(table: RowTable, split: SplitSection) -> tuple[dict[Side, list[Row]], Verdicts, dict[str, int]]:
    """The kept rows of each side in an order of their own, the verdicts, and what is still on two sides."""
    side = assign_sides(table.group.values, split)[table.group.codes]
    side[table.pinned] = SIDES.index("regressions")
    verdicts, links = Verdicts(len(table)), links_of(table, split)
    settle(table, side, links, verdicts)
    kept = verdicts.kept[np.argsort(table.place[verdicts.kept])]
    by_side: dict[Side, list[Row]] = {
        name: [table.row(row) for row in kept[side[kept] == code].tolist()] for code, name in enumerate(SIDES)
    }
    return by_side, verdicts, shared_keys(side, links, verdicts.kept)


def test_what_folding_means() -> None:
    assert fold_text(" A\u00a0\n B ") == fold_text("a b") == "a b"
    assert fold_text("ﬁ Straße") == fold_text("FI STRASSE")
    assert fold_text("a b") != fold_text("ab")


def test_a_continued_conversation_has_the_same_opening() -> None:
    short = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "x"}]
    longer = [*short, {"role": "user", "content": "more"}, {"role": "assistant", "content": "y"}]
    greeted = [{"role": "assistant", "content": "hello"}, *short]
    assert normalised_opening(short) == normalised_opening(longer)
    assert normalised_opening(greeted) != normalised_opening(short)
    assert normalised_opening(greeted) != normalised_opening([{"role": "assistant", "content": "hello"}])


rows_strategy = st.lists(
    st.tuples(
        st.sampled_from("abcdefgh"),
        st.sampled_from(["x", "y", "z"]),
        st.sampled_from([f"g{n}" for n in range(12)]),
        st.sampled_from(["red", "blue", "green"]),
    ),
    max_size=60,
)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows_strategy, st.booleans(), st.randoms(use_true_random=False))
def test_any_rows_settle_without_leak_add_up_and_ignore_order(
    make_table: MakeTable,
    given_rows: list[tuple[str, str, str, str]],
    unique: bool,
    shuffler: random.Random,
) -> None:
    rows = [made_row(p, a, g, colour=c, phrase=p + c) for p, a, g, c in given_rows]
    split = HALVES.model_copy(update={"unique_by": ["phrase"] if unique else None})
    by_side, verdicts, shared = settled(make_table(rows), split)
    assert not any(shared.values())
    assert sum(map(len, by_side.values())) + sum(verdicts.counts().values()) == len(rows)
    for name_of in (lambda row: row.group, lambda row: row.prompt[0]["content"].casefold()):
        owners: dict[Any, set[Side]] = {}
        for side, members in by_side.items():
            for row in members:
                owners.setdefault(name_of(row), set()).add(side)
        assert all(len(sides) == 1 for sides in owners.values())
    cut = shuffler.randint(0, len(rows))
    shuffled = shuffler.sample(rows, len(rows))
    again, _, _ = settled(make_table(shuffled[:cut], shuffled[cut:]), split)
    assert again == by_side


def test_the_evaluation_side_keeps_a_prompt_that_two_groups_share(make_table: MakeTable) -> None:
    rows = [made_row("same prompt", f"answer {n}", f"group {n}") for n in range(40)]
    by_side, verdicts, _ = settled(make_table(rows), HALVES)
    assert not by_side["train"]
    assert by_side["regressions"]
    dropped = 40 - len(by_side["regressions"])
    assert verdicts.counts() == {"prompt_on_other_side": dropped}
    assert {SIDES[code] for code in verdicts.other_side[verdicts.dropped].tolist()} == {"regressions"}


def test_a_duplicate_names_the_row_that_is_kept(make_table: MakeTable) -> None:
    table = make_table([made_row("p", "a", "g"), made_row("q", "b", "g"), made_row("p", "a", "g")])
    _, verdicts, _ = settled(table, HALVES)
    (dropped,) = verdicts.dropped.tolist()
    assert {dropped, int(verdicts.cause[dropped])} == {0, 2}
    assert verdicts.counts() == {"duplicate": 1}


def test_a_value_that_must_be_unique_stays_on_one_side(make_table: MakeTable) -> None:
    rows = [made_row(f"p{n}", "a", f"g{n}", template="the same") for n in range(30)]
    split = HALVES.model_copy(update={"unique_by": "template"})
    by_side, verdicts, _ = settled(make_table(rows), split)
    assert [side for side, members in by_side.items() if members] == ["regressions"]
    assert verdicts.counts()["template_on_other_side"] == 30 - len(by_side["regressions"])


def test_pinned_rows_are_kept_whatever_their_group_says(make_table: MakeTable) -> None:
    names = [f"g{n}" for n in range(30)]
    drawn: Sequence[Row] = [made_row(f"p{name}", "a", name) for name in names]
    pinned = [made_row(f"pinned {name}", "a", name) for name in names]
    by_side, verdicts, shared = settled(make_table(drawn, pinned, pinned=[False, True]), HALVES)
    assert {row.id for row in pinned} <= {row.id for row in by_side["regressions"]}
    assert not any(shared.values())
    assert verdicts.counts()["group_on_other_side"] == 60 - len(by_side["regressions"])
    assert not by_side["train"]
