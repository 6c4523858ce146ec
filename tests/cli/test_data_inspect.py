"""`finetune data inspect`, as a user calls it: what rows are, why, and a spec that builds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from finetune.cli.data import app
from finetune.errors import UserError


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every test stands in a folder of its own, with a file of questions and answers."""
    lines = [
        "Question;Answer;topic",
        *(f'"How, {n}?";"So [red]{n}[/red]";{"ab"[n % 2]}' for n in range(60)),
        "broken",
    ]
    (tmp_path / "faq.csv").write_text("\n".join(lines))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def call(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)


def test_it_says_what_the_rows_are_and_why() -> None:
    said = call("inspect", "faq.csv").stdout
    for part in (
        "faq.csv: csv, utf-8, cells parted by ';'",
        "rows read: 61, 1 of them not readable",
        "faq.csv:62: the row has 1 cells where the header has 3",
        "→ prompt_completion",
        "60 rows, 0 faulty; 'Question' and 'Answer' are called like a question and its answer",
        "keys read past: topic (60)",
        "assistant: So [red]0[/red]",
        "columns: {prompt: Question, completion: Answer}",
        "max_reject_rate: 0.02  # 1.6% of the rows are faulty",
        "# tags: [topic]",
    ):
        assert part in said, part


def test_the_spec_that_it_writes_builds(here: Path) -> None:
    said = call("inspect", "faq.csv", "--write", "specs/mine.yaml").stdout
    assert "the spec, written to specs/mine.yaml" in said
    assert 'files: ["../faq.csv"]' in (here / "specs" / "mine.yaml").read_text()
    built = json.loads(call("build", "specs/mine.yaml", "--builds", "builds", "--json").stdout)
    assert (built["name"], built["ledger"]["read"], built["ledger"]["quarantined"]) == ("faq", 61, 1)
    with pytest.raises(UserError, match="is there already"):
        call("inspect", "faq.csv", "--write", "specs/mine.yaml")


def test_the_answer_for_machines() -> None:
    found: dict[str, Any] = json.loads(call("inspect", "faq.csv", "--json").stdout)
    assert (found["read"], found["unreadable"], found["complete"]) == (61, 1, True)
    assert found["files"][0]["delimiter"] == ";"
    [reading] = found["readings"]
    assert reading["columns"] == {"prompt": "Question", "completion": "Answer"}
    assert (reading["rows"], reading["kinds"]) == (60, {"chat": 60})
    assert found["first_unreadable"][0]["line"] == 62
    assert found["answer_characters"]["the longest"] == len("So [red]59[/red]")
    assert "shape: prompt_completion" in found["spec"]


def test_rows_and_shape_may_be_limited() -> None:
    found = json.loads(call("inspect", "faq.csv", "--rows", "5", "--json").stdout)
    assert (found["read"], found["complete"]) == (5, False)
    assert "(the first of each file)" in call("inspect", "faq.csv", "--rows", "5").stdout
    with pytest.raises(UserError, match="no shape fits"):
        call("inspect", "faq.csv", "--shape", "messages")
    with pytest.raises(UserError, match="did you mean 'messages'"):
        call("inspect", "faq.csv", "--shape", "mesages")


def test_folders_and_several_files(here: Path) -> None:
    (here / "more").mkdir()
    for n in range(2):
        (here / "more" / f"{n}.jsonl").write_text(json.dumps({"text": f"words {n}"}) + "\n")
    assert json.loads(call("inspect", "more", "--json").stdout)["read"] == 2
    found = json.loads(call("inspect", "more/0.jsonl", "more/1.jsonl", "--json").stdout)
    assert [file["name"] for file in found["files"]] == ["more/0.jsonl", "more/1.jsonl"]
    assert 'files: ["more/0.jsonl", "more/1.jsonl"]' in found["spec"] or "more/0.jsonl" in found["spec"]
    with pytest.raises(UserError, match=r"no such file: faq\.cvs(?s:.*)did you mean 'faq\.csv'"):
        call("inspect", "faq.cvs")


def test_a_copy_of_a_hub_dataset(here: Path) -> None:
    (here / "copy").mkdir()
    for split in ("train", "test"):
        (here / "copy" / f"{split}.jsonl").write_text(
            "".join(json.dumps({"prompt": f"{split} {n}", "completion": "c"}) + "\n" for n in range(30))
        )
    found = json.loads(call("inspect", "copy", "--revision", "v1", "--split", "test", "--json").stdout)
    assert [file["name"] for file in found["files"]] == ["copy/test.jsonl"]
    (here / "spec.yaml").write_text(found["spec"])
    assert "kind: hub\n  id: copy\n  revision: v1\n  split: test" in found["spec"]
    built = json.loads(call("build", "spec.yaml", "--builds", "builds", "--json").stdout)
    assert built["ledger"]["read"] == 30
    with pytest.raises(UserError, match="belongs to one hub dataset"):
        call("inspect", "copy", "more", "--revision", "v1")


@pytest.mark.parametrize(
    ("record", "shown"),
    [
        (
            {"prompt": "p", "chosen": "good", "rejected": "bad"},
            ["user: p", "chosen assistant: good", "rejected assistant: bad"],
        ),
        ({"prompt": "p", "completion": "c", "label": "no"}, ["assistant: c", "label: false"]),
        ({"prompt": "p", "completions": ["s", "t"], "labels": [1, 0]}, ["right step: s", "wrong step: t"]),
        ({"text": "w" * 400 + "\n"}, ["text: " + "w" * 300 + "…"]),
        ({"input_ids": [7, 8]}, ["input_ids: 7 8"]),
    ],
)
def test_samples_of_every_kind(here: Path, record: dict[str, Any], shown: list[str]) -> None:
    (here / "rows.jsonl").write_text(json.dumps(record) + "\n")
    said = call("inspect", "rows.jsonl").stdout
    assert all(part in said for part in shown), said
