"""Limits, balance and weights choose rows by what they say and by the seed, never by where they stood."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from finetune.data.rows import SIDES, Row
from finetune.data.spec_split import SelectSection
from finetune.data.stages.choose import choose
from finetune.data.stages.settle import Verdicts
from finetune.data.stages.table import RowTable

MakeTable = Callable[..., RowTable]


def made_row(prompt: str, answer: str, group: str, **tags: str) -> Row:
    turns = ({"role": "user", "content": prompt}, {"role": "assistant", "content": answer})
    return Row(id=f"{group}/{prompt}/{answer}", messages=turns, group=group, source="made", tags=tags)


def chosen(
    table: RowTable,
    section: SelectSection,
    *,
    side: str = "train",
    seed: int = 17,
    weights: Sequence[float] | None = None,
) -> tuple[list[Row], dict[str, int]]:
    """The rows used of a table whose rows are all on one side, and what was dropped; every row is accounted for."""
    codes = np.full(len(table), SIDES.index(side), np.int8)  # type: ignore[arg-type]
    verdicts = Verdicts(len(table))
    used = choose(table, codes, section, seed, verdicts, weights)[side]  # type: ignore[index]
    assert sorted(set(used.tolist())) == verdicts.kept.tolist()
    return [table.row(row) for row in used.tolist()], verdicts.counts()


def test_limits_balance_and_take_turns_between_groups(make_table: MakeTable) -> None:
    table = make_table(
        [
            made_row(f"{value} {group} {n}", "a", f"{value}{group}", kind=value)
            for value, n_groups in (("many", 16), ("few", 1))
            for group in range(n_groups)
            for n in range(10)
        ]
    )

    def counted(power: float, **limits: Any) -> tuple[Counter[str], Counter[str]]:
        section = SelectSection(rows={"train": 50}, balance_by="kind", balance_power=power, **limits)
        kept, _ = chosen(table, section)
        return Counter(row.tags["kind"] for row in kept), Counter(row.group for row in kept)

    assert counted(0.0)[0] == {"many": 40, "few": 10}  # 'few' has no more
    assert counted(0.5)[0] == {"many": 40, "few": 10}
    assert counted(1.0)[0] == {"many": 47, "few": 3}
    by_group = counted(1.0)[1]
    assert max(n for group, n in by_group.items() if group != "few0") == 3
    assert max(counted(0.0, rows_per_group={"train": 2})[1].values()) == 2


def test_selection_ignores_the_order_of_rows(make_table: MakeTable) -> None:
    rows = [made_row(f"p{n}", "a", f"g{n % 7}", kind=str(n % 3)) for n in range(60)]
    section = SelectSection(rows={"train": 25}, balance_by="kind", balance_power=0.5)
    forward, backward = make_table(rows), make_table(rows[40::-1], rows[:40:-1])
    assert chosen(forward, section) == chosen(backward, section)
    other_seed, _ = chosen(forward, section, seed=18)
    assert [row.id for row in other_seed] != [row.id for row in chosen(forward, section)[0]]


def test_rows_over_a_limit_are_counted(make_table: MakeTable) -> None:
    table = make_table([made_row(f"p{n}", "a", f"g{n}") for n in range(10)])
    kept, dropped = chosen(table, SelectSection(rows={"test": 4}), side="test")
    assert (len(kept), dropped) == (4, {"over_limit": 6})


def test_pinned_rows_are_always_used(make_table: MakeTable) -> None:
    drawn = [made_row(f"p{n}", "a", f"g{n}") for n in range(10)]
    pinned = [made_row(f"q{n}", "a", f"h{n}") for n in range(6)]
    table = make_table(drawn, pinned, pinned=[False, True])
    kept, dropped = chosen(table, SelectSection(rows={"regressions": 8}), side="regressions")
    assert {row.id for row in pinned} <= {row.id for row in kept}
    assert (len(kept), dropped) == (8, {"over_limit": 8})


def sources(*sizes: int, words: Sequence[int] = (1, 1, 1)) -> list[list[Row]]:
    return [
        [made_row("w " * words[source], f"a{n}", f"s{source}g{n}", source=str(source)) for n in range(size)]
        for source, size in enumerate(sizes)
    ]


def mixed(table: RowTable, weights: Sequence[float], **keys: Any) -> tuple[Counter[str], dict[str, int]]:
    kept, dropped = chosen(table, SelectSection(**keys), weights=weights)
    return Counter(row.tags["source"] for row in kept), dropped


def test_sources_are_mixed_in_the_proportions_of_their_weights(make_table: MakeTable) -> None:
    table = make_table(*sources(100, 100, 100), origins=[0, 1, 2])
    assert mixed(table, [3, 1, 1]) == ({"0": 100, "1": 33, "2": 33}, {"over_weight": 134})
    assert mixed(table, [3, 1, 1], rows={"train": 50})[0] == {"0": 30, "1": 10, "2": 10}


def test_a_scarce_source_is_repeated_up_to_its_limit(make_table: MakeTable) -> None:
    table = make_table(*sources(90, 20), origins=[0, 1])
    assert mixed(table, [1, 1])[0] == {"0": 20, "1": 20}
    assert mixed(table, [1, 1], max_repeats=3)[0] == {"0": 60, "1": 60}
    assert mixed(table, [1, 1], max_repeats=9)[0] == {"0": 90, "1": 90}  # no source beyond once for nothing
    kept, _ = chosen(table, SelectSection(max_repeats=3), weights=[1, 1])
    times = Counter(row.id for row in kept)
    assert {times[row.id] for row in kept if row.tags["source"] == "1"} == {3}


def test_weights_of_tokens_are_shares_of_words(make_table: MakeTable) -> None:
    table = make_table(*sources(100, 100, words=(40, 10)), origins=[0, 1])
    by_rows, by_tokens = mixed(table, [1, 1])[0], mixed(table, [1, 1], mix_by="tokens")[0]
    assert by_rows == {"0": 100, "1": 100}
    assert by_tokens["1"] == 100
    assert by_tokens["0"] / by_tokens["1"] == pytest.approx(12 / 42, rel=0.1)


def test_evaluation_rows_are_neither_weighed_nor_repeated(make_table: MakeTable) -> None:
    table = make_table(*sources(30, 10), origins=[0, 1])
    section = SelectSection(max_repeats=3)
    kept, dropped = chosen(table, section, side="test", weights=[1, 1])
    assert (len(kept), sum(dropped.values())) == (40, 0)
