"""A whole run: the order of its stages, what a second call does, and how it fails."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from finetune.digest import digest_folder
from finetune.errors import UserError
from finetune.telemetry.events import read_events

ALL_STAGES = ("data", "check", "baseline digits", "train", "evaluate digits", "compare")


def test_a_run_leaves_everything_it_promises(project: Any) -> None:
    outcome = project.run()
    folder = outcome.folder
    assert folder.parent == project.folder / "runs"
    assert outcome.worked == ALL_STAGES
    for name in (
        "recipe.resolved.yaml",
        "manifest.json",
        "environment.json",
        "forecast.json",
        "data/manifest.json",
        "data/ledger.jsonl",
        "baseline/digits/zero_shot.jsonl",
        "baseline/digits/few_shot.summary.json",
        "events.jsonl",
        "adapter/adapter_model.safetensors",
        "adapter/tokenizer.json",
        "eval/digits/tuned.jsonl",
        "eval/comparison.json",
        "report.html",
    ):
        assert (folder / name).is_file(), name
    comparison = json.loads((folder / "eval/comparison.json").read_text())
    assert comparison["against"] == "few_shot"
    assert {one["baseline"] for one in comparison["comparisons"]} == {"zero_shot", "few_shot"}
    assert outcome.exit_code in (0, 10, 11, 12)
    forecast = json.loads((folder / "forecast.json").read_text())
    for of in (forecast, forecast["evaluation"]):
        assert of["used_peak_bytes"] > 0 and of["total_bytes"] > 0


def test_nothing_is_tuned_before_the_baseline_is_stored(
    project: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from finetune.training.sft_trainer import ExactSftTrainer

    stored: list[bool] = []
    original = ExactSftTrainer.training_step

    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        run_folder = self.checkpoint_root.parent
        manifest = json.loads((run_folder / "manifest.json").read_text())
        stored.append(
            bool(manifest["stages"]["baseline digits"]["completed"])
            and (run_folder / "baseline/digits/few_shot.summary.json").is_file()
        )
        return original(self, *args, **kwargs)

    monkeypatch.setattr(ExactSftTrainer, "training_step", watched)
    project.run()
    assert stored and all(stored)


def test_the_same_command_again_does_nothing(project: Any) -> None:
    first = project.run()
    before = digest_folder(first.folder / "adapter")
    second = project.run()
    assert second.worked == () and second.folder == first.folder
    assert any("nothing to do" in line for line in project.said)
    assert digest_folder(first.folder / "adapter") == before
    assert second.comparison == first.comparison


def test_a_changed_input_runs_what_depends_on_it_and_no_more(project: Any) -> None:
    first = project.run()
    suite = project.folder / "suite.yaml"
    suite.write_text(suite.read_text().replace("max_new_tokens: 8", "max_new_tokens: 6"))
    assert project.run().worked == ("baseline digits", "evaluate digits", "compare")

    rows = project.folder / "rows.jsonl"
    rows.write_text(rows.read_text().replace('"two ', '"TWO '))
    again = project.run()
    assert again.folder == first.folder
    assert "train" in again.worked and "data" in again.worked


def test_a_damaged_output_is_made_again(project: Any) -> None:
    first = project.run()
    before = digest_folder(first.folder / "adapter")["adapter_model.safetensors"]
    (first.folder / "adapter" / "adapter_model.safetensors").write_bytes(b"")
    again = project.run()
    assert "train" in again.worked
    assert digest_folder(first.folder / "adapter")["adapter_model.safetensors"] == before


def test_another_rate_is_another_run_that_shares_the_baseline(
    project: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import finetune.evaluation.answering as evaluation

    first = project.run()
    generated: list[Any] = []
    original = evaluation.generate
    monkeypatch.setattr(
        evaluation, "generate", lambda *args, **kwargs: generated.append(args) or original(*args, **kwargs)
    )
    second = project.run("train.learning_rate=5e-3")
    assert second.folder != first.folder
    assert len(generated) == 1  # the tuned arm only
    assert digest_folder(second.folder / "baseline") == digest_folder(first.folder / "baseline")


@pytest.mark.parametrize("stage", ["baseline", "train", "evaluate"])
def test_a_run_that_was_killed_ends_like_one_that_was_not(
    project: Any, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    from finetune.evaluation import records
    from finetune.training import sft_trainer

    whole = project.run(run_dir=project.folder / "whole")
    for path in (project.folder / "runs").glob("baselines/*"):
        for file in path.iterdir():
            file.unlink()

    calls = {"n": 0}

    def dies_at(n: int, original: Any) -> Any:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            calls["n"] += 1
            if calls["n"] == n:
                raise SystemExit
            return original(*args, **kwargs)

        return wrapped

    with monkeypatch.context() as patch:
        if stage == "train":
            patch.setattr(
                sft_trainer.StopWhenAsked, "on_step_end", dies_at(3, sft_trainer.StopWhenAsked.on_step_end)
            )
        else:
            n = 3 if stage == "baseline" else 27
            patch.setattr(records.PartialRecords, "add", dies_at(n, records.PartialRecords.add))
        with pytest.raises(SystemExit):
            project.run(run_dir=project.folder / "killed")
    resumed = project.run(run_dir=project.folder / "killed")
    assert digest_folder(resumed.folder / "adapter") == digest_folder(whole.folder / "adapter")

    def verdict(outcome: Any) -> Any:
        return [
            {key: one[key] for key in ("metric", "baseline", "difference", "low", "high", "n")}
            for one in outcome.comparison["comparisons"]
        ]

    assert verdict(resumed) == verdict(whole)


def test_all_missing_things_are_named_at_once(project: Any) -> None:
    with pytest.raises(UserError) as caught:
        project.run("data.spec=digist.yaml", "eval.suites=[siute.yaml]", "model.id=./no-model")
    text = str(caught.value)
    assert len(caught.value.faults) == 3
    assert "digist.yaml" in text and "siute.yaml" in text and "no-model" in text
    assert not (project.folder / "runs").exists()


def test_a_recipe_without_a_suite_is_refused(project: Any) -> None:
    with pytest.raises(UserError, match="suites"):
        project.run("eval.suites=[]")


def test_a_misspelt_target_is_refused_before_the_baseline(project: Any) -> None:
    with pytest.raises(UserError, match="k_prj"):
        project.run("adapter.target_modules=[q_proj, k_prj]")
    assert not (project.folder / "runs" / "baselines").exists()


def test_a_row_longer_than_the_limit_is_refused_before_the_baseline(project: Any) -> None:
    with pytest.raises(UserError, match=r"longer than data.max_tokens = 40"):
        project.run("data.max_tokens=40")
    assert not (project.folder / "runs" / "baselines").exists()


def test_the_run_folder_of_another_recipe_is_refused(project: Any, tmp_path: Path) -> None:
    project.run(run_dir=tmp_path / "mine")
    with pytest.raises(UserError, match="run folder of another recipe"):
        project.run("seed=3", run_dir=tmp_path / "mine")
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "thesis.txt").write_text("mine")
    with pytest.raises(UserError, match="not empty"):
        project.run(run_dir=tmp_path / "foreign")
    assert [path.name for path in (tmp_path / "foreign").iterdir()] == ["thesis.txt"]


def test_a_run_folder_that_cannot_be_made_is_a_user_error(project: Any) -> None:
    (project.folder / "file").write_text("")
    with pytest.raises(UserError, match="cannot write"):
        project.run(run_dir=project.folder / "file" / "run")


def test_two_processes_cannot_work_in_one_folder(project: Any, tmp_path: Path) -> None:
    from finetune.pipeline.manifest import only_process

    folder = tmp_path / "busy"
    folder.mkdir()
    with only_process(folder), pytest.raises(UserError, match="another process"):
        project.run(run_dir=folder)


def test_the_adapter_that_was_evaluated_is_named(project: Any) -> None:
    outcome = project.run()
    trained = digest_folder(outcome.folder / "adapter")["adapter_model.safetensors"]
    summary = json.loads((outcome.folder / "eval/digits/tuned.summary.json").read_text())
    assert summary["adapter_sha256"] == trained
    assert [event for event in read_events(outcome.folder / "events.jsonl") if event["event"] == "validation"]
