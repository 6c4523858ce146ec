"""A build that was damaged is told as what it is, with the file and the remedy, and is made anew by the next build."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from finetune.data.build import DatasetBuild, build_dataset, open_build
from finetune.data.check import check_build
from finetune.errors import UserError

Build = Callable[..., DatasetBuild]
ROWS = [{"prompt": f"question {n}", "completion": f"answer {n}"} for n in range(5)]


@pytest.fixture
def made(build: Build) -> DatasetBuild:
    return build(ROWS)


def without(*keys: str) -> Callable[[dict[str, Any]], Any]:
    return lambda manifest: {key: value for key, value in manifest.items() if key not in keys}


def having(**changes: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda manifest: manifest | changes


@pytest.mark.parametrize(
    "change",
    [
        lambda manifest: {},
        lambda manifest: [],
        lambda manifest: None,
        lambda manifest: 3,
        without("digest"),
        without("splits"),
        without("ledger"),
        having(splits={}),
        having(splits=5),
        having(splits={"train": {"rows": 5, "digest": "x"}}),
        having(splits={"train": {}}),
        having(ledger={"read": "x"}),
        having(ledger={"read": 5, "kept": 5, "dropped": [], "quarantined": 0}),
        having(files=[1]),
        having(files={"train.jsonl": {}}),
        having(guard={"x": 1}),
        having(unique_by=3),
        having(leaks=None),
        having(source={"ignored_keys": 1}),
    ],
)
def test_a_manifest_that_is_none_is_named_with_what_is_wrong(
    made: DatasetBuild, change: Callable[[dict[str, Any]], Any]
) -> None:
    path = made.folder / "manifest.json"
    path.write_text(json.dumps(change(made.manifest)))
    with pytest.raises(UserError, match="not the manifest of a dataset build: ") as caught:
        open_build(made.folder)
    assert str(path) in str(caught.value)
    again = build_dataset(made.folder.parents[1] / "mine.yaml", made.folder.parent)
    assert again.manifest == made.manifest
    assert check_build(again).passed


def test_a_manifest_cut_in_the_middle_is_made_anew(made: DatasetBuild) -> None:
    path = made.folder / "manifest.json"
    path.write_text(path.read_text()[:100])
    assert build_dataset(made.folder.parents[1] / "mine.yaml", made.folder.parent).manifest == made.manifest


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("train.jsonl", {}, "not a row: 'id'"),
        ("train.jsonl", {"id": 1}, "not a row: id, group, source and text are texts"),
        ("train.jsonl", {"group": None}, "not a row: id, group"),
        ("train.jsonl", {"messages": "x"}, "not a row: a turn is no object"),
        ("train.jsonl", {"messages": [{}]}, "not a row: a turn is no object"),
        ("train.jsonl", {"messages": []}, "not a row: it has no assistant turn"),
        ("train.jsonl", {"kind": "other"}, "not a row: there is no kind 'other'"),
        ("train.jsonl", {"kind": "stepwise", "steps": ["x"]}, "not a row: a step is no object"),
        ("train.jsonl", {"tags": []}, "the train rows are not those of the manifest"),
        ("ledger.jsonl", {}, "not an entry of the ledger: 'reason'"),
        ("ledger.jsonl", [], "not an entry of the ledger"),
        ("wording.json", [1], "no list of runs"),
        ("wording.json", {"a": 1}, "no list of runs"),
    ],
)
def test_a_file_that_was_damaged_is_named(made: DatasetBuild, file: str, content: Any, message: str) -> None:
    path = made.folder / file
    if file == "train.jsonl" and content:
        content = json.loads(path.read_text().splitlines()[0]) | content
    if file == "ledger.jsonl" and content == {}:
        content = {"kind": "dropped"}
    path.write_text(json.dumps(content) + "\n")
    with pytest.raises(UserError, match=message) as caught:
        result = check_build(made)
        raise UserError(result.faults())
    assert str(path) in str(caught.value)


def test_a_name_too_long_for_the_disk_is_a_user_error(made: DatasetBuild, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot write"):
        build_dataset(tmp_path / "mine.yaml", tmp_path / ("x" * 300))
