"""Datasets of the hub: a local folder stands in for one, and text is what its files say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from finetune.errors import UserError
from finetune.evaluation.hub_records import hub_records
from finetune.evaluation.item_source import ItemsSection
from finetune.evaluation.suite import load_suite
from finetune.evaluation.suite_data import load_suite_data

TEXTS = ["42", "007", "null", "2024-01-05", "NA", " x ", 'a "b", c']
SUITE = """\
suite: 1
name: hub
items:
  hub: {hub}
  revision: v1.0
  split: test
  prompt: question
  reference: answer
few_shot: {{k: 2, split: train}}
scorers: [text_match]
primary_metric: text_match
"""


def _jsonl(folder: Path, split: str, lines: list[dict[str, str]]) -> None:
    folder.mkdir(exist_ok=True)
    (folder / f"{split}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def _rows(prefix: str) -> list[dict[str, str]]:
    return [{"question": f"{prefix} {number}", "answer": text} for number, text in enumerate(TEXTS)]


def _section(name: str) -> ItemsSection:
    return ItemsSection(hub=name, revision="v1.0", prompt="question", reference="answer")


@pytest.mark.parametrize("form", ["jsonl", "json", "csv"])
def test_no_text_is_taken_for_something_else(form: str, tmp_path: Path) -> None:
    import csv

    folder = tmp_path / form
    folder.mkdir()
    rows = _rows("q")
    if form == "jsonl":
        _jsonl(folder, "test", rows)
    elif form == "json":
        (folder / "test.json").write_text(json.dumps(rows))
    else:
        with (folder / "test.csv").open("w", newline="") as stream:
            writer = csv.DictWriter(stream, ["question", "answer"])
            writer.writeheader()
            writer.writerows(rows)
    found = hub_records(_section(form), "test", where="suite.yaml", folder=tmp_path)
    assert [record["answer"] for record in found] == TEXTS


def test_parquet_keeps_its_own_types(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    (tmp_path / "ds").mkdir()
    table = pyarrow.table({"question": ["a", "b"], "answer": ["007", "2024-01-05"], "level": [1, 2]})
    pyarrow.parquet.write_table(table, tmp_path / "ds" / "test.parquet")
    found = hub_records(_section("ds"), "test", where="suite.yaml", folder=tmp_path)
    assert [dict(record) for record in found] == table.to_pylist()


def test_a_suite_asks_one_split_and_shows_another(tmp_path: Path) -> None:
    _jsonl(tmp_path / "ds", "test", _rows("asked"))
    _jsonl(tmp_path / "ds", "train", _rows("shown"))
    (tmp_path / "hub.yaml").write_text(SUITE.format(hub="ds"))
    data = load_suite_data(load_suite(tmp_path / "hub.yaml"), max_items=3)
    assert [item.reference for item in data.items] == TEXTS[:3]
    assert data.items[0].source == "ds@v1.0"
    assert [row.messages[0]["content"] for row in data.few_shot_rows][:2] == ["shown 0", "shown 1"]


def test_records_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    (tmp_path / "ds").mkdir()
    (tmp_path / "ds" / "test.jsonl").write_text('{"question": "a", "answer": "b"}\n{"question": \n')
    with pytest.raises(UserError, match=r"test\.jsonl:2"):
        hub_records(_section("ds"), "test", where="suite.yaml", folder=tmp_path)


def test_a_split_that_is_not_there_is_named(tmp_path: Path) -> None:
    _jsonl(tmp_path / "ds", "test", _rows("q"))
    with pytest.raises(UserError, match="no split 'tset'") as caught:
        hub_records(_section("ds"), "tset", where="suite.yaml", folder=tmp_path)
    assert "did you mean 'test'" in str(caught.value)


def test_without_a_network_the_remedy_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"owner/nothing at revision v1\.0 cannot be fetched") as caught:
        hub_records(_section("owner/nothing"), "test", where="suite.yaml", folder=tmp_path)
    assert "name its folder as items.hub" in str(caught.value)
    assert "HF_HUB_OFFLINE" in str(caught.value)
