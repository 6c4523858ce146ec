"""What a run does about its evaluation: shared baselines, early stops, several answers, proof that the model was tuned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from finetune.digest import digest_folder
from finetune.errors import UserError
from finetune.evaluation.records import read_records, read_summary
from finetune.paths import read_json
from finetune.pipeline import stages, trainable
from finetune.pipeline.screen import last_screen


def _edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_another_recipe_on_the_same_base_loads_no_model_for_its_baseline(
    project: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = project.run()
    loaded: list[str] = []
    original = stages.load_model

    def counted(*args: Any, **options: Any) -> Any:
        loaded.append("a model")
        return original(*args, **options)

    for module in (stages, trainable):
        monkeypatch.setattr(module, "load_model", counted)
    again = project.run("adapter.rank=4", "train.epochs=1")
    assert "baseline digits" in again.worked
    assert len(loaded) == 2  # one to train, one to evaluate
    assert digest_folder(again.folder / "baseline") == digest_folder(first.folder / "baseline")


def test_a_suite_that_may_stop_early_is_judged_by_bets_from_end_to_end(project: Any) -> None:
    suite = project.folder / "suite.yaml"
    suite.write_text(suite.read_text() + "stop_early: {block_items: 4}\nmargin: 0.9\nrole: regression\n")
    outcome = project.run()
    one = next(one for one in outcome.comparison["comparisons"] if one["baseline"] == "few_shot")
    assert one["test"].startswith("e-process")
    assert one["sequential"]["stopped"]
    summary = read_summary(outcome.folder / "eval/digits", "tuned")
    assert summary.stopped is not None
    assert (
        summary.stopped["answered"] == one["n"] == len(read_records(outcome.folder / "eval/digits", "tuned"))
    )
    assert one["noninferiority"] == "pass"
    screen = last_screen(outcome.folder, outcome.comparison, outcome.report)
    assert f"items    stopped after {one['n']} of {one['sequential']['of']} items" in screen
    assert project.run().worked == ()


def test_several_answers_an_item_from_end_to_end(project: Any) -> None:
    _edit(
        project.folder / "suite.yaml",
        "{max_new_tokens: 8}",
        "{max_new_tokens: 8, temperature: 1, repeats: 3}",
    )
    outcome = project.run()
    one = outcome.comparison["comparisons"][0]
    summary = read_summary(outcome.folder / "eval/digits", "tuned")
    assert (summary.n, summary.repeats) == (3 * one["n"], 3)
    assert one["noise"]["repeats"] == pytest.approx(3.0)
    screen = last_screen(outcome.folder, outcome.comparison, outcome.report)
    assert "noise    3 answers an item: sampling makes" in screen
    page = outcome.report.read_text()
    assert "few-shot" in page and "Traceback" not in page


def test_cut_answers_of_one_arm_alone_are_a_warning_on_the_last_screen(project: Any) -> None:
    outcome = project.run()
    path = outcome.folder / "eval/digits/tuned.summary.json"
    summary = read_json(path)
    comparison = dict(outcome.comparison)
    comparison["suites"] = [
        dict(comparison["suites"][0], notes=["warning: the token limit cut 50.0% of …", "other"])
    ]
    screen = last_screen(outcome.folder, comparison, outcome.report)
    assert "fair?    digits: warning: the token limit cut 50.0%" in screen
    assert "other" not in screen
    cut = summary["finish_reasons"].get("length", 0) / summary["n"]
    assert outcome.comparison["cut"]["arm"] == cut
    json.dumps(outcome.comparison, allow_nan=False)


def test_a_fully_tuned_model_that_answers_like_its_base_is_refused(project: Any) -> None:
    tuned = ("adapter.kind=none", "train.learning_rate=1e-3", "train.epochs=1")
    assert project.run(*tuned).comparison["verdict"]
    with pytest.raises(UserError, match="answers like its base"):
        project.run("adapter.kind=none", "train.learning_rate=1e-12", "train.epochs=1")
