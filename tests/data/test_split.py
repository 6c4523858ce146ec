"""The split is a guarantee: no group, no prompt on two sides, whatever the order of the rows; and it never moves a row."""

from __future__ import annotations

import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from finetune.data.build import DatasetBuild
from finetune.data.fold import fold_text, normalised_opening
from finetune.data.leaks import find_leaks
from finetune.data.rows import SIDES, Ledger, Row, Side
from finetune.data.spec import SelectSection, SplitSection
from finetune.data.split import (
    assign_sides,
    normalised_prompt,
    select_rows,
    split_rows,
)
from finetune.errors import UserError

HALVES = SplitSection(shares={"train": 0.5, "validation": 0.1, "test": 0.3, "regressions": 0.1})


def make_row(prompt: str, answer: str, group: str, **tags: str) -> Row:
    turns = ({"role": "user", "content": prompt}, {"role": "assistant", "content": answer})
    return Row(id=f"{group}/{prompt}/{answer}", messages=turns, group=group, source="made", tags=tags)


def sides_of(by_side: dict[Side, list[Row]]) -> dict[str, Side]:
    return {row.id: side for side, rows in by_side.items() for row in rows}


def test_same_prompts_up_to_case_and_space_stay_together_and_a_duplicate_is_counted(
    build: Callable[..., DatasetBuild],
) -> None:
    """DL08: 20 rows, 3 and 11 the same prompt up to case and white space, 7 twice verbatim, split 70/30."""
    rows = [{"prompt": f"question {n}", "completion": f"answer {n}"} for n in range(19)]
    rows[11]["prompt"] = "  QUESTION\t3 "
    rows.append(dict(rows[7]))
    split = {"shares": {"train": 0.7, "validation": 0.3}}
    made = build(rows, split=split)
    assert made.manifest["ledger"] == {"read": 20, "kept": 19, "dropped": {"duplicate": 1}, "quarantined": 0}
    assert made.manifest["leaks"] == {"exact": 0, "group": 0}
    train, validation = made.rows("train"), made.rows("validation")
    assert train and validation
    assert not {normalised_prompt(row) for row in train} & {normalised_prompt(row) for row in validation}
    shuffled = build(random.Random(5).sample(rows, len(rows)), split=split)
    assert shuffled.digest != made.digest
    assert shuffled.manifest["splits"] == made.manifest["splits"]


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


@settings(deadline=None)
@given(rows_strategy, st.booleans(), st.booleans(), st.randoms(use_true_random=False))
def test_any_rows_split_without_leak_add_up_and_ignore_order(
    given_rows: list[tuple[str, str, str, str]], stratified: bool, unique: bool, shuffler: random.Random
) -> None:
    rows = [make_row(p, a, g, colour=c, phrase=p + c) for p, a, g, c in given_rows]
    split = HALVES.model_copy(
        update={"stratify_by": "colour" if stratified else None, "unique_by": "phrase" if unique else None}
    )
    ledger = Ledger(read=len(rows))
    by_side = split_rows(rows, split, ledger)
    ledger.close(sum(map(len, by_side.values())))
    leaks = find_leaks(by_side, split.unique_by)
    assert not any(leaks.values())
    shuffled = list(rows)
    shuffler.shuffle(shuffled)
    again = split_rows(shuffled, split, Ledger())
    assert {side: [row.to_dict() for row in by_side[side]] for side in SIDES} == {
        side: [row.to_dict() for row in again[side]] for side in SIDES
    }


@given(st.sets(st.text(max_size=5), max_size=40), st.sets(st.text(max_size=5), max_size=40))
def test_growth_never_moves_a_group(first: set[str], more: set[str]) -> None:
    before = assign_sides(dict.fromkeys(first, ""), HALVES)
    after = assign_sides(dict.fromkeys(first | more, ""), HALVES)
    assert {group: after[group] for group in first} == before


def test_the_shares_are_met_by_hash() -> None:
    counted = Counter(assign_sides({f"group {n}": "" for n in range(20000)}, HALVES).values())
    assert {side: pytest.approx(counted[side] / 20000, abs=0.015) for side in SIDES} == HALVES.shares


def test_another_salt_is_another_split() -> None:
    groups = {f"group {n}": "" for n in range(200)}
    other = HALVES.model_copy(update={"salt": "2"})
    assert assign_sides(groups, HALVES) != assign_sides(groups, other)


@given(st.integers(1, 60))
def test_a_stratum_reaches_train_and_an_evaluation_side(n_groups: int) -> None:
    split = SplitSection(
        shares={"train": 0.72, "validation": 0.07, "test": 0.18, "regressions": 0.03}, stratify_by="x"
    )
    counted = Counter(assign_sides({f"g{n}": "s" for n in range(n_groups)}, split).values())
    assert counted["train"] >= 1
    assert counted.total() == n_groups
    if n_groups > 1:
        assert counted["test"] >= 1
    if n_groups >= 10:
        assert all(abs(counted[side] - share * n_groups) <= 1 for side, share in split.shares.items())


def test_the_evaluation_side_keeps_a_prompt_that_two_groups_share() -> None:
    rows = [make_row("same prompt", f"answer {n}", f"group {n}") for n in range(40)]
    ledger = Ledger(read=len(rows))
    by_side = split_rows(rows, HALVES, ledger)
    assert not by_side["train"]
    assert by_side["regressions"]
    assert ledger.dropped["prompt_on_other_side"] == 40 - len(by_side["regressions"])
    assert all(entry["other_side"] == "regressions" for entry in ledger.entries)


def test_sides_do_not_depend_on_the_hash_seed_of_python() -> None:
    code = (
        "from finetune.data.split import assign_sides, SplitSection;"
        "s = SplitSection(stratify_by='x');"
        "print(sorted(assign_sides({f'g{n}': str(n % 3) for n in range(50)}, s).items()))"
    )
    printed = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("0", "1")
    }
    assert len(printed) == 1


def sided(rows: list[Row]) -> dict[Side, list[Row]]:
    return {side: rows if side == "train" else [] for side in SIDES}


def test_limits_balance_and_take_turns_between_groups() -> None:
    rows = [
        make_row(f"{value} {group} {n}", "a", f"{value}{group}", kind=value)
        for value, n_groups in (("many", 16), ("few", 1))
        for group in range(n_groups)
        for n in range(10)
    ]

    def chosen(power: float, **limits: Any) -> tuple[Counter[str], Counter[str]]:
        section = SelectSection(rows={"train": 50}, balance_by="kind", balance_power=power, **limits)
        ledger = Ledger(read=len(rows))
        kept = select_rows(sided(rows), section, 17, ledger)["train"]
        ledger.close(len(kept))
        return Counter(row.tags["kind"] for row in kept), Counter(row.group for row in kept)

    assert chosen(0.0)[0] == {"many": 40, "few": 10}  # 'few' has no more
    assert chosen(0.5)[0] == {"many": 40, "few": 10}
    assert chosen(1.0)[0] == {"many": 47, "few": 3}
    by_group = chosen(1.0)[1]
    assert max(n for group, n in by_group.items() if group != "few0") == 3
    assert max(chosen(0.0, rows_per_group={"train": 2})[1].values()) == 2


def test_selection_ignores_the_order_of_rows() -> None:
    rows = [make_row(f"p{n}", "a", f"g{n % 7}", kind=str(n % 3)) for n in range(60)]
    section = SelectSection(rows={"train": 25}, balance_by="kind", balance_power=0.5)
    forward = select_rows(sided(rows), section, 1, Ledger())["train"]
    backward = select_rows(sided(rows[::-1]), section, 1, Ledger())["train"]
    assert [row.id for row in forward] == [row.id for row in backward]
    other_seed = select_rows(sided(rows), section, 2, Ledger())["train"]
    assert [row.id for row in forward] != [row.id for row in other_seed]


def test_a_split_without_train_rows_is_a_user_error(build: Callable[..., DatasetBuild]) -> None:
    with pytest.raises(UserError, match="no train rows"):
        build([{"prompt": "p", "completion": "c"}], split={"shares": {"train": 1e-9, "test": 1 - 1e-9}})


def test_leaks_are_found_and_named() -> None:
    by_side: dict[Side, list[Row]] = {side: [] for side in SIDES}
    by_side["train"] = [make_row("Turn it  ON", "x", "g1", phrase="p"), make_row("b", "x", "g2")]
    by_side["test"] = [make_row("turn it on", "y", "g3", phrase="p"), make_row("c", "x", "g2")]
    leaks = find_leaks(by_side, "phrase")
    assert {kind: [(leak.first_id, leak.second_id) for leak in found] for kind, found in leaks.items()} == {
        "exact": [("g1/Turn it  ON/x", "g3/turn it on/y")],
        "group": [("g2/b/x", "g2/c/x")],
        "phrase": [("g1/Turn it  ON/x", "g3/turn it on/y")],
    }


def test_a_ledger_that_does_not_add_up_is_refused() -> None:
    ledger = Ledger(read=3)
    ledger.drop("duplicate", id="a")
    with pytest.raises(AssertionError, match="read 3 != kept 1"):
        ledger.close(1)
