"""A group's side depends on its name alone, or on exact quotas that can be frozen; growth never moves a row."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from finetune.data.rows import SIDES, Side
from finetune.data.spec_split import SplitSection
from finetune.data.stages.sides import (
    assign_sides,
    read_assignment,
    salted_hash,
    salted_hashes,
    write_assignment,
)
from finetune.errors import UserError

HALVES = SplitSection(shares={"train": 0.5, "validation": 0.1, "test": 0.3, "regressions": 0.1})
FOUR_WAYS = SplitSection(
    shares={"train": 0.72, "validation": 0.07, "test": 0.18, "regressions": 0.03}, stratify_by="x"
)
NAMES = st.sets(st.text(max_size=5), max_size=40)


def sides_of(names: Iterable[str], split: SplitSection, **given: Any) -> dict[str, Side]:
    """Group -> side; `strata` and `units` are given as group -> number."""
    groups = sorted(names)
    numbers = {
        key: np.array([given[name][group] for group in groups], np.int64)
        for key, name in (("strata", "strata"), ("unit_of", "units"))
        if name in given
    }
    codes = assign_sides(pa.array(groups, pa.large_string()), split, frozen=given.get("frozen"), **numbers)
    return {group: SIDES[code] for group, code in zip(groups, codes.tolist(), strict=True)}


def in_one_stratum(names: Iterable[str]) -> dict[str, int]:
    return dict.fromkeys(names, 0)


def frozen_by(sides: Mapping[str, Side], folder: Path) -> dict[str, Side]:
    """What a later build reads, after a build that found these sides."""
    codes = np.array([SIDES.index(side) for side in sides.values()], np.int8)
    write_assignment(folder / "assignment.json", pa.array(list(sides), pa.large_string()), codes, HALVES)
    return read_assignment(folder / "assignment.json")


@given(NAMES, NAMES)
def test_growth_never_moves_a_group(first: set[str], more: set[str]) -> None:
    before, after = sides_of(first, HALVES), sides_of(first | more, HALVES)
    assert {group: after[group] for group in first} == before


def test_the_shares_are_met_by_hash() -> None:
    counted = Counter(sides_of((f"group {n}" for n in range(20000)), HALVES).values())
    assert {side: pytest.approx(counted[side] / 20000, abs=0.015) for side in SIDES} == HALVES.shares


def test_another_salt_is_another_split() -> None:
    groups = [f"group {n}" for n in range(200)]
    assert sides_of(groups, HALVES) != sides_of(groups, HALVES.model_copy(update={"salt": "2"}))


@given(st.lists(st.text()))
def test_hashes_of_a_column_are_those_of_its_values(keys: list[str]) -> None:
    assert salted_hashes("salt", pa.array(keys, pa.large_string())).tolist() == [
        salted_hash("salt", key) for key in keys
    ]


@given(st.integers(1, 60))
def test_a_stratum_reaches_train_and_an_evaluation_side(n_groups: int) -> None:
    names = [f"g{n}" for n in range(n_groups)]
    counted = Counter(sides_of(names, FOUR_WAYS, strata=in_one_stratum(names)).values())
    assert counted["train"] >= 1
    assert counted.total() == n_groups
    if n_groups > 1:
        assert counted["test"] >= 1
    if n_groups >= 10:
        assert all(abs(counted[side] - share * n_groups) <= 1 for side, share in FOUR_WAYS.shares.items())


@given(st.integers(1, 40), st.integers(1, 60))
def test_frozen_groups_stay_and_new_ones_fill_the_quotas(
    tmp_path_factory: pytest.TempPathFactory, n_before: int, n_more: int
) -> None:
    names = [f"g{n}" for n in range(n_before)]
    before = sides_of(names, FOUR_WAYS, strata=in_one_stratum(names))
    frozen = frozen_by(before, tmp_path_factory.mktemp("frozen"))
    grown = [*names, *(f"new {n}" for n in range(n_more))]
    after = sides_of(grown, FOUR_WAYS, strata=in_one_stratum(grown), frozen=frozen)
    assert {group: after[group] for group in names} == before
    counted = Counter(after.values())
    held = Counter(before.values())
    for side, share in FOUR_WAYS.shares.items():
        assert counted[side] <= max(held[side], share * len(grown) + 2)


def test_quotas_without_freezing_may_move_a_group() -> None:
    """The reason for freezing: exact shares depend on how many groups there are."""
    names = [f"g{n}" for n in range(20)]
    grown = [f"g{n}" for n in range(200)]
    before = sides_of(names, FOUR_WAYS, strata=in_one_stratum(names))
    after = sides_of(grown, FOUR_WAYS, strata=in_one_stratum(grown))
    assert {group: after[group] for group in names} != before


@given(st.lists(st.integers(0, 5), min_size=1, max_size=30), st.booleans())
def test_united_groups_fall_on_one_side(units: list[int], exact: bool) -> None:
    names = [f"g{n}" for n in range(len(units))]
    numbered = {unit: number for number, unit in enumerate(sorted(set(units)))}
    unit_of = {name: numbered[unit] for name, unit in zip(names, units, strict=True)}
    strata = {"strata": in_one_stratum(names)} if exact else {}
    sides = sides_of(names, FOUR_WAYS, units=unit_of, **strata)
    by_unit: dict[int, set[Side]] = {}
    for name, unit in unit_of.items():
        by_unit.setdefault(unit, set()).add(sides[name])
    assert all(len(found) == 1 for found in by_unit.values())


def test_a_new_group_that_unites_two_frozen_sides_joins_the_evaluation(tmp_path: Path) -> None:
    frozen = frozen_by({"a": "train", "b": "test"}, tmp_path)
    sides = sides_of("abc", HALVES, units=dict.fromkeys("abc", 0), frozen=frozen)
    assert sides == {"a": "train", "b": "test", "c": "test"}


def test_what_is_no_assignment_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    path.write_text('{"format": 1, "digest": "x"}')
    with pytest.raises(UserError, match=r"not the assignment\.json"):
        read_assignment(path)


def test_names_of_groups_are_not_written_down(tmp_path: Path) -> None:
    frozen_by({"someone@example.org": "test"}, tmp_path)
    assert "someone" not in (tmp_path / "assignment.json").read_text()


def test_sides_do_not_depend_on_the_hash_seed_of_python() -> None:
    code = (
        "import numpy, pyarrow;"
        "from finetune.data.stages.sides import assign_sides, SplitSection;"
        "names = pyarrow.array([f'g{n}' for n in range(50)]);"
        "print(assign_sides(names, SplitSection(stratify_by='x'), strata=numpy.arange(50) % 3).tolist())"
    )
    printed = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("0", "1")
    }
    assert len(printed) == 1
