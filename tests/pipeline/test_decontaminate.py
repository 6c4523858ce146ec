"""A recipe's suites are compared with the dataset: whole train rows go, and the run says so."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from typer.testing import CliRunner

from finetune.cli.data import app
from finetune.data.build import build_dataset, default_builds_root, open_build
from finetune.data.rows import Row
from finetune.errors import UserError
from finetune.evaluation.suite import load_suite
from finetune.evaluation.suite_data import SuiteData, load_suite_data
from finetune.pipeline import run as run_module
from finetune.pipeline.decontaminate import (
    build_of_recipe,
    contaminated_line,
    show_trained_rows,
    suite_questions,
)
from finetune.pipeline.reevaluate import FinishedRun
from finetune.pipeline.stages import RunContext

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


@pytest.fixture
def shown(recipe: Path) -> Path:
    """The recipe with a foreign suite that shows examples from the recipe's dataset."""
    (recipe.parent / "foreign.yaml").write_text(FOREIGN + "few_shot: {k: 2}\n")
    return recipe


def prompts(rows: Iterable[Row]) -> set[str]:
    return {row.messages[0]["content"] for row in rows}


def test_no_example_of_the_few_shot_arm_holds_a_question_of_its_suite(
    shown: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both in a run and when its suites are asked again: examples are rows that the run trained on."""
    asked = {row_turn(row)["content"] for row in rows_of(shown.parent)[:2]}
    found: dict[str, SuiteData] = {}

    def stop(context: RunContext, suites: Sequence[SuiteData]) -> None:
        found.update({data.suite.name: data for data in suites})
        found_context.append(context)
        raise UserError("seen enough")

    found_context: list[RunContext] = []
    monkeypatch.setattr(run_module, "baseline_stage", stop)
    with pytest.raises(UserError, match="seen enough"):
        run_module.run_recipe(str(shown), (), say=lambda line: None)
    (context,) = found_context
    trained = open_build(context.folder / "data")
    assert asked & prompts(open_build(base_of(shown)).iter_rows("train")), "they are in the base build"
    for data in found.values():
        assert list(data.few_shot_rows) == trained.rows("train")
    assert not asked & prompts(found["foreign"].few_shot_rows)
    again = FinishedRun(context, cast("Any", None), 1)
    for suite in context.inputs.suites:
        assert again.data_of(suite).few_shot_rows == found[suite.name].few_shot_rows
    # A suite that the run did not have: what was not compared then is compared now.
    more = shown.parent / "more.yaml"
    more.write_text((FOREIGN + "few_shot: {k: 2}\n").replace("foreign", "more"))
    held = trained.rows("train")[0]
    item = {"id": "i", "messages": [{"role": "system", "content": "s"}, held.messages[0]], "reference": "x"}
    (shown.parent / "more.jsonl").write_text(json.dumps(item) + "\n")
    others = again.data_of(load_suite(str(more))).few_shot_rows
    assert prompts(others) == prompts(trained.iter_rows("train")) - prompts([held])


def base_of(recipe: Path) -> Path:
    """The folder of the build that the recipe's spec makes."""
    return build_dataset(recipe.parent / "digits.yaml", default_builds_root()).folder


def test_examples_of_another_side_are_compared_as_well(shown: Path) -> None:
    build, _ = build_of_recipe(str(shown), shown.parent / "builds")
    held = build.rows("validation")[0]
    item = {"id": "i", "messages": [{"role": "system", "content": "s"}, held.messages[0]], "reference": "x"}
    (shown.parent / "foreign.jsonl").write_text(json.dumps(item) + "\n")
    text = FOREIGN + "few_shot: {k: 2, split: validation}\n"
    (shown.parent / "foreign.yaml").write_text(text)
    spec = shown.parent / "digits.yaml"
    data = load_suite_data(load_suite(str(shown.parent / "foreign.yaml")), dataset_spec=spec)
    clean = show_trained_rows(data, build, spec, compared=True)
    assert prompts(clean.few_shot_rows) == prompts(build.iter_rows("validation")) - prompts([held])


def test_texts_are_compared_as_a_whole(tmp_path: Path) -> None:
    suite = tmp_path / "texts.yaml"
    suite.write_text(
        "suite: 1\nname: texts\ntask: text\nrole: forgetting\nitems: {jsonl: texts.jsonl}\n"
        "scorers: [nll_per_token]\nprimary_metric: nll_per_token\n"
    )
    (tmp_path / "texts.jsonl").write_text('{"id": "a", "reference": "a text"}\n')
    (questions,) = suite_questions([load_suite_data(load_suite(str(suite)))], tmp_path / "spec.yaml")
    assert (questions.name, list(questions.texts), list(questions.ids)) == ("texts", ["a text"], ["a"])
