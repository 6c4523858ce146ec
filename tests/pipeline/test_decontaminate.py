"""A recipe's suites are compared with the dataset: whole train rows go, and the run says so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from finetune.cli.data import app
from finetune.data.build import open_build
from finetune.evaluation.suite import load_suite
from finetune.evaluation.suite_data import load_suite_data
from finetune.pipeline.decontaminate import build_of_recipe, contaminated_line, suite_questions

FOREIGN = """\
suite: 1
name: foreign
items: {jsonl: foreign.jsonl}
scorers: [exact_match]
primary_metric: exact_match
"""


@pytest.fixture
def recipe(project: Any) -> Path:
    """The project's recipe with a second suite, which asks two questions that are in the data."""
    folder = project.folder
    items = [
        {
            "id": f"item {n}",
            "messages": [{"role": "system", "content": "Be brief."}, row_turn(row)],
            "reference": "x",
        }
        for n, row in enumerate(rows_of(folder)[:2])
    ]
    (folder / "foreign.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    (folder / "foreign.yaml").write_text(FOREIGN)
    text = project.recipe.read_text().replace("suites: [suite.yaml]", "suites: [suite.yaml, foreign.yaml]")
    project.recipe.write_text(text)
    return Path(project.recipe)


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]


def row_turn(row: dict[str, Any]) -> dict[str, str]:
    turn: dict[str, str] = (
        row["messages"][0] if "messages" in row else {"role": "user", "content": row["prompt"]}
    )
    return turn


def test_train_rows_that_a_suite_asks_are_left_out(recipe: Path) -> None:
    build, report = build_of_recipe(str(recipe), recipe.parent / "builds")
    asked = {row_turn(row)["content"] for row in rows_of(recipe.parent)[:2]}
    trained = {row.messages[0]["content"] for row in build.iter_rows("train")}
    assert not asked & trained
    assert list(report["evaluations"]) == [
        "foreign"
    ]  # the dataset's own test side is kept apart by the split
    assert "foreign (2 questions)" in contaminated_line(report)
    assert build.manifest["ledger"]["dropped"].get("quotes_foreign", 0) == len(report["rows"])


def test_the_command_builds_for_a_recipe(recipe: Path) -> None:
    answer = CliRunner().invoke(
        app, ["build", "--recipe", str(recipe), "--builds", str(recipe.parent / "builds"), "--json"]
    )
    assert answer.exit_code == 0, answer.output
    folder = Path(json.loads(answer.stdout)["folder"])
    build, _ = build_of_recipe(str(recipe), recipe.parent / "builds")
    assert open_build(folder).digest == build.digest
    said = CliRunner().invoke(
        app, ["build", "--recipe", str(recipe), "--builds", str(recipe.parent / "builds")]
    )
    assert "train rows held a question of foreign (2 questions)" in said.stdout


def test_texts_are_compared_as_a_whole(tmp_path: Path) -> None:
    suite = tmp_path / "texts.yaml"
    suite.write_text(
        "suite: 1\nname: texts\ntask: text\nrole: forgetting\nitems: {jsonl: texts.jsonl}\n"
        "scorers: [nll_per_token]\nprimary_metric: nll_per_token\n"
    )
    (tmp_path / "texts.jsonl").write_text('{"id": "a", "reference": "a text"}\n')
    (questions,) = suite_questions([load_suite_data(load_suite(str(suite)))], tmp_path / "spec.yaml")
    assert (questions.name, list(questions.texts), list(questions.ids)) == ("texts", ["a text"], ["a"])
