"""A word of a spec that can mean nothing is refused where it stands, with the words that can."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from finetune.data.build import DatasetBuild, load_spec
from finetune.errors import UserError

Build = Callable[..., DatasetBuild]
ROWS = [{"prompt": f"p{n}", "completion": f"c{n}", "topic": f"t{n % 3}"} for n in range(30)]


@pytest.mark.parametrize(
    ("sections", "place", "what", "fix"),
    [
        ({"source": {"delimiter": "ab"}}, "source.delimiter", "'ab' cannot part columns", "';'"),
        ({"source": {"delimiter": ""}}, "source.delimiter", "'' cannot part columns", "tab"),
        ({"source": {"delimiter": '"'}}, "source.delimiter", "cannot part columns", "auto"),
        ({"source": {"delimiter": "\n"}}, "source.delimiter", "cannot part columns", "auto"),
        (
            {"source": {"columns": {"promt": "q"}}},
            "source.columns",
            "no shape has the key 'promt'",
            "'prompt'",
        ),
        ({"source": {"roles": {"Agent": "asistant"}}}, "source.roles", "the role 'asistant'", "'assistant'"),
        ({"curate": {"languages": ["en", "xx"]}}, "curate.languages", "'xx' is no language", "known: af"),
        ({"curate": {"region": "ZZ"}}, "curate.region", "'ZZ' is no ISO country code", ""),
        ({"curate": {"region": "de"}}, "curate.region", "'de' is no ISO country code", ""),
    ],
)
def test_values_that_mean_nothing_are_refused(
    write_spec: Callable[..., Path], sections: dict[str, Any], place: str, what: str, fix: str
) -> None:
    spec = write_spec(ROWS, **sections)
    with pytest.raises(UserError) as caught:
        load_spec(spec)
    (fault,) = caught.value.faults
    assert fault.where.startswith(f"{spec}:1:")
    assert what in fault.what and fix in fault.fix
    column = int(fault.where.rsplit(":", 1)[1])
    key = place.rpartition(".")[2]
    assert spec.read_text()[column - 1 :].startswith((f'"{key}"', "{", "[", '"')), fault.where


@pytest.mark.parametrize("delimiter", ["auto", "tab", "\\t", ";", "\t", " ", "¦"])
def test_delimiters(write_spec: Callable[..., Path], delimiter: str) -> None:
    assert load_spec(write_spec(ROWS, source={"delimiter": delimiter})).value.sources[0].kind == "jsonl"


@pytest.mark.parametrize(
    "sections",
    [
        {"split": {"stratify_by": "topc", "shares": {"train": 1.0}}},
        {"split": {"unique_by": ["topic", "topc"], "shares": {"train": 1.0}}},
        {"split": {"unite_by": "topc", "shares": {"train": 1.0}}},
        {"select": {"balance_by": "topc", "rows": {"train": 5}}},
        {"curate": {"consistent_within": "topc"}},
    ],
    ids=lambda sections: next(iter(sections)),
)
def test_a_tag_that_no_row_has_is_refused(build: Build, sections: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="no row has the tag 'topc'") as caught:
        build(ROWS, source={"tags": ["topic"]}, **sections)
    (fault,) = caught.value.faults
    assert "mine.yaml:1:" in fault.where and fault.fix == "did you mean 'topic'?"
    with pytest.raises(UserError, match=r"source\.tags: \[top"):
        build(ROWS, **sections)


def test_a_declared_tag_that_no_row_has_cannot_guarantee_anything(build: Build) -> None:
    with pytest.raises(UserError, match="mood"):
        build(ROWS, source={"tags": ["mood"]}, split={"unique_by": "mood", "shares": {"train": 1.0}})


def test_an_assignment_that_is_none_is_not_asked_to_be_deleted(build: Build, tmp_path: Path) -> None:
    (tmp_path / "lines.json").write_text("{}\n{}\n")
    with pytest.raises(UserError, match=r"is not the assignment\.json of a dataset build"):
        build(ROWS, split={"frozen_from": "lines.json", "shares": {"train": 1.0}})


def test_a_fault_of_a_file_says_which_key_names_it(build: Build, tmp_path: Path) -> None:
    (tmp_path / "other.bin").write_bytes(b"\x00\x01\x02")
    for sections in (
        {"source": {"kind": "files", "files": ["other.bin"]}},
        {"split": {"guard": {"files": ["other.bin"]}, "shares": {"train": 1.0}}},
    ):
        with pytest.raises(UserError, match="cannot tell the format") as caught:
            build(ROWS, **sections)
        assert "mine.yaml:1:" in caught.value.faults[0].where
    with pytest.raises(UserError, match="/dev/null is no file"):
        build(ROWS, source={"files": ["/dev/null"]})


def test_the_schema_takes_its_own_json(write_spec: Callable[..., Path]) -> None:
    spec = write_spec(ROWS, source={"roles": {"Agent": "assistant"}}, curate={"region": "DE"})
    loaded = load_spec(spec).value
    again = spec.with_name("again.yaml")
    again.write_text(json.dumps(loaded.model_dump(mode="json")))
    assert load_spec(again).value == loaded
