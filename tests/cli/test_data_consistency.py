"""`finetune data consistency` and `finetune data lengths`, as a user types them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from finetune.cli.data_consistency import consistency
from finetune.cli.data_lengths import lengths
from finetune.errors import UserError

app = typer.Typer()
app.command()(consistency)
app.command()(lengths)


def row(question: str, answer: str, **keys: str) -> dict[str, Any]:
    return {"prompt": question, "completion": answer, **keys}


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """80 answers in JSON, 20 in prose; one question twice with different answers."""
    rows = [row(f"Turn on lamp {n}", f'{{"intent": "on", "lamp": {n}}}', task="json") for n in range(80)]
    rows += [row(f"Tell me about lamp {n}", f"Lamp {n} stands in the hall.", task="prose") for n in range(18)]
    rows += [
        row("Which lamp?", "The lamp in the hall.", task="prose"),
        row("which  lamp?", "None of them.", task="prose"),
    ]
    path = tmp_path / "mixed.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    return path


def run(*arguments: str) -> Any:
    result = CliRunner().invoke(app, [*arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_both_piles_are_shown_with_examples_and_counts(mixed: Path) -> None:
    said = run("consistency", str(mixed)).output
    assert "format: WARNING, 20.0% differ from the majority" in said
    assert "80  80.0%  JSON" in said
    assert "20  20.0%  prose" in said
    assert '{"intent": "on"' in said and "stands in the hall." in said
    assert "contradictions: 1 questions in 2 rows" in said
    assert "'None of them.'" in said
    assert "1 warning: a minority form from 5 % on" in said


def test_the_answer_for_machines(mixed: Path) -> None:
    found = json.loads(run("consistency", str(mixed), "--json").output)
    formats = next(mix for mix in found["mixes"] if mix["aspect"] == "format")
    assert (found["rows"], found["warnings"], formats["warned"]) == (100, 1, True)
    assert [(pile["value"], pile["n"]) for pile in formats["piles"]] == [("JSON", 80), ("prose", 20)]
    assert all(len(pile["rows"]) == 3 and pile["rows"][0]["answer"] for pile in formats["piles"])
    (first,) = found["contradictions"]["first"]
    assert {answer["answer"] for answer in first["answers"]} == {"The lamp in the hall.", "None of them."}
    assert "which lamp?" in first["prompt"]


def test_rows_of_one_form_are_not_warned_of(tmp_path: Path) -> None:
    path = tmp_path / "one.jsonl"
    path.write_text("".join(json.dumps(row(f"q{n}", f'{{"n": {n}}}')) + "\n" for n in range(30)))
    assert "no warning" in run("consistency", str(path)).output


def test_a_build_is_looked_at_by_split_and_by_tag(mixed: Path, tmp_path: Path) -> None:
    spec = {
        "dataset": 1, "name": "mixed", "source": {"kind": "jsonl", "files": ["mixed.jsonl"], "tags": ["task"]},
        "split": {"shares": {"train": 0.5, "test": 0.5}},
    }  # fmt: skip
    (tmp_path / "mixed.yaml").write_text(json.dumps(spec))
    builds = ["--builds", str(tmp_path / "builds")]
    whole = json.loads(run("consistency", str(tmp_path / "mixed.yaml"), *builds, "--json").output)
    (folder,) = (one for one in (tmp_path / "builds").iterdir() if (one / "manifest.json").is_file())
    test = json.loads(run("consistency", str(folder), "--split", "test", "--json").output)
    assert 95 <= whole["rows"] + test["rows"] <= 100
    parted = json.loads(run("consistency", str(folder), "--by", "task", "--json").output)
    assert (whole["warnings"], parted["warnings"]) == (1, 0)
    with pytest.raises(UserError, match="no row has the tag 'tasks'") as caught:
        run("consistency", str(folder), "--by", "tasks")
    assert "did you mean 'task'" in str(caught.value)


def test_rows_without_answers_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "text.jsonl"
    path.write_text('{"text": "running text"}\n')
    with pytest.raises(UserError, match="none of 1 rows has an answer"):
        run("consistency", str(path))


def test_lengths_before_training(mixed: Path, tiny_model_folder: Path) -> None:
    arguments = ["lengths", str(mixed), "--model", str(tiny_model_folder), "--limit", "120", "--limit", "60"]
    found = json.loads(run(*arguments, "--json").output)
    assert [at["max_tokens"] for at in found["limits"]] == [60, 120]
    assert found["limits"][0]["cut"] == 100
    assert found["rows"] == 100
    said = run(*arguments).output
    assert "100 rows" in said and "lose their end" in said
    with pytest.raises(UserError, match="use all or last"):
        run(*arguments, "--train-on", "some")
