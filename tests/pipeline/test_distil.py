"""A student cut from a tuned teacher learns what it says, and is compared with what it was and with its teacher."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from finetune.errors import UserError
from finetune.paths import read_json
from finetune.telemetry.events import read_events

DISTIL = """\
extends: recipe.yaml
name: distil
adapter: {kind: none, rank: 32, alpha: 32}
train:
  method: distil
  epochs: 4
  learning_rate: 3e-3
distil:
  teacher: {run: runs/recipe, licence: CC0-1.0, dtype: fp32}
  student: {init: "layers[0, 3]"}
  targets: live
eval:
  baselines: [start]
  against: start
"""


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the teacher's run is kept once a test has made it."""
    return tmp_path_factory.mktemp("kept") / "runs"


@pytest.fixture
def distil(project: Any, kept: Path, make_tiny_model: Callable[..., Any]) -> Any:
    """The project with a finished run of a model of four layers, and a recipe that teaches a student of two."""
    make_tiny_model(layers=4).save_pretrained(project.folder / "tiny-model")
    (project.folder / "distil.yaml").write_text(DISTIL)
    if kept.is_dir():
        shutil.copytree(kept, project.folder / "runs")
    else:
        project.run("train.epochs=3")
        shutil.copytree(project.folder / "runs", kept)
    return project


def run(distil: Any, *overrides: str) -> Any:
    from finetune.pipeline.run import run_recipe

    distil.said.clear()
    return run_recipe(str(distil.folder / "distil.yaml"), overrides, say=distil.said.append)


def screen_of(outcome: Any) -> list[str]:
    from finetune.pipeline.screen import last_screen

    return last_screen(outcome.folder, outcome.comparison, outcome.report).splitlines()


def test_a_student_learns_from_a_live_teacher(distil: Any) -> None:
    outcome = run(distil)
    facts = read_json(outcome.folder / "distillation.json")
    assert facts["teacher"]["layers"] == 4
    assert facts["student"]["layers"] == 2
    assert facts["student"]["parameters"] < facts["teacher"]["parameters"]
    assert facts["teacher"]["licence"] == "CC0-1.0"
    assert any("student: layers 0, 3 of runs/recipe" in line for line in distil.said)
    assert not any("licence" in line for line in distil.said)

    steps = [event for event in read_events(outcome.folder / "events.jsonl") if event["event"] == "step"]
    assert steps[-1]["loss"] < 0.5 * steps[0]["loss"]
    assert steps[0]["divergence"] == pytest.approx(steps[0]["loss"])

    arms = {one["baseline"] for one in outcome.comparison["comparisons"]}
    assert arms == {"start", "teacher"}
    (suite,) = outcome.comparison["suites"]
    assert suite["gap"]["before"] == "start"
    assert set(suite["gap"]["metrics"]) == {"exact_match"}
    page = (outcome.folder / "report.html").read_text()
    assert "Teacher runs/recipe, licence CC0-1.0; student cut from its layers 0, 3" in page
    assert "student before" in page
    assert "does not say what the teacher" not in page
    assert any(line.startswith("teacher  digits, exact_match:") for line in screen_of(outcome))

    again = run(distil)
    assert not again.worked
    assert again.comparison == outcome.comparison


def test_a_cache_of_all_tokens_teaches_what_the_live_teacher_does(distil: Any) -> None:
    settings = ["distil.cache.k=259", "distil.cache.dtype=fp32", "train.max_steps=3"]
    cached = run(distil, "distil.targets=cache", *settings)
    assert any("teacher cache: top 259 at every target" in line for line in distil.said)
    facts = read_json(cached.folder / "teacher_cache.json")
    assert facts["coverage"]["1.0"]["mean"] == pytest.approx(1.0)
    live = run(distil, "train.max_steps=3")
    losses = [
        [event["loss"] for event in read_events(one.folder / "events.jsonl") if event["event"] == "step"]
        for one in (cached, live)
    ]
    assert len(losses[0]) == 3
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_runs_that_differ_in_the_loss_share_a_cache_and_the_teachers_answers(
    distil: Any, asked: list[int]
) -> None:
    common = [
        "distil.targets=cache",
        "distil.cache.k=32",
        "distil.cache.temperatures=[2]",
        "train.max_steps=2",
    ]
    run(distil, *common)
    n_asked = len(asked)
    run(distil, *common, "distil.loss.kind=reverse_kl")
    assert len(list((distil.folder / "runs" / "teachers").iterdir())) == 1
    assert len(asked) == n_asked + 1  # the tuned student alone


def test_what_cannot_teach_is_refused_with_a_remedy(distil: Any) -> None:
    with pytest.raises(UserError, match="no finished run 'runs/nothing'") as caught:
        run(distil, "distil.teacher.run=runs/nothing")
    assert "finetune run" in caught.value.faults[0].fix
    with pytest.raises(UserError, match="the teacher has no layer 4"):
        run(distil, "distil.student.init=layers[0,4]")
    with pytest.raises(UserError, match="share a vocabulary of 259"):
        run(distil, "distil.targets=cache", "distil.cache.k=260")
    with pytest.raises(UserError, match=r"the top 2 hold .* less than distil.cache.coverage"):
        run(distil, "distil.targets=cache", "distil.cache.k=2", "distil.cache.coverage=0.999")


def test_a_teachers_adapter_of_another_base_is_refused_before_anything_runs(
    distil: Any, make_tiny_model: Callable[..., Any], make_tiny_tokenizer: Callable[..., Any]
) -> None:
    make_tiny_model(seed=9, layers=4).save_pretrained(distil.folder / "other")
    make_tiny_tokenizer().save_pretrained(distil.folder / "other")
    settings = ["distil.teacher.run=null", "distil.teacher.id=other", "distil.teacher.adapter=runs/recipe"]
    with pytest.raises(UserError, match="the adapter was trained on") as caught:
        run(distil, *settings, "distil.student.init=model")
    assert caught.value.faults[0].fix.startswith("set distil.teacher.id to ")
    assert not any("run folder" in line for line in distil.said)


def test_a_student_that_is_its_teacher_is_warned_of(distil: Any) -> None:
    from finetune.pipeline.distil import teaches_itself
    from finetune.pipeline.inputs import gather_inputs

    def itself(*overrides: str) -> bool:
        return teaches_itself(
            gather_inputs(str(distil.folder / "distil.yaml"), overrides, say=lambda line: None)
        )

    same = ("distil.teacher.run=null", "distil.teacher.id=tiny-model", "distil.student.init=model")
    assert itself(*same)
    assert not itself(*same[:2])
    assert not itself("distil.student.init=model")
    assert not itself(*same, "distil.teacher.quantize=nf4")


def test_an_unknown_licence_is_warned_of_and_filling_it_in_trains_nothing(distil: Any) -> None:
    outcome = run(distil, "distil.teacher.licence=null", "train.max_steps=2")
    assert any("warning: distil.teacher.licence is not given" in line for line in distil.said)
    assert "does not say what the teacher" in (outcome.folder / "report.html").read_text()
    again = run(distil, "distil.teacher.licence=MIT", "train.max_steps=2")
    assert again.folder == outcome.folder
    assert again.worked == ("teacher",)
    assert "licence MIT" in (outcome.folder / "report.html").read_text()


TAUGHT = """\
dataset: 1
name: taught
source:
  kind: generated
  name: taught
  prompts: digits.yaml
  model: {run: runs/recipe}
  sampling: {answers: 2, max_new_tokens: 12, seed: 3}
  verifier: {kind: function, function: "verify.py:judge"}
  write: chat
  keep: {filter: false, rows_per_prompt: 2, prefer: shortest}
split:
  shares: {train: 0.8, validation: 0.2}
"""


def test_a_student_learns_what_its_teacher_writes_and_the_check_is_told(distil: Any) -> None:
    (distil.folder / "taught.yaml").write_text(TAUGHT)
    (distil.folder / "verify.py").write_text(
        "def judge(row):\n    return len(row['messages'][-1]['content']) % 2 == 0, 'odd'\n"
    )
    outcome = run(
        distil, "distil.way=answers", "data.spec=taught.yaml", "distil.targets=cache", "train.max_steps=3"
    )
    (found,) = read_json(outcome.folder / "distillation.json")["generated"]
    assert found["filter"] is False
    assert found["rows"] > 0
    assert sum(counts["prompts"] for counts in found["difficulty"].values()) == found["answers"] / 2
    page = (outcome.folder / "report.html").read_text()
    assert "the filter is off: all are learnt" in page
    assert {one["baseline"] for one in outcome.comparison["comparisons"]} == {"start", "teacher"}


def test_a_dataset_that_another_model_has_answered_is_refused(distil: Any) -> None:
    settings = ["distil.way=answers", "distil.targets=cache"]
    with pytest.raises(UserError, match="holds no answers of a teacher"):
        run(distil, *settings)
    (distil.folder / "taught.yaml").write_text(TAUGHT.replace("runs/recipe", "runs/other"))
    with pytest.raises(UserError, match="is answered by runs/other, and the teacher is runs/recipe"):
        run(distil, *settings, "data.spec=taught.yaml")
