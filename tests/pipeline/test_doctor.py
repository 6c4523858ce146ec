"""`finetune doctor` on a whole project: a sound recipe passes, planted faults are all found at once, and --fix mends."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from finetune.cli.doctor import app
from finetune.doctor import trials
from finetune.doctor.rates import UsualRate
from finetune.recipe.resolve import load_recipe


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the trained base is kept once a test has made it."""
    return tmp_path_factory.mktemp("kept") / "model"


@pytest.fixture
def learnable(project: Any, kept: Path, make_tiny_model: Callable[..., Any], tiny_tokenizer: Any) -> Any:
    """The project with a base that was trained a little: over a random frozen head no adapter is ever sure of an answer."""
    if not kept.is_dir():
        rows = [
            json.loads(line)["messages"] for line in (project.folder / "rows.jsonl").read_text().splitlines()
        ]
        texts = [tiny_tokenizer.apply_chat_template(messages, tokenize=False) for messages in rows]
        batch = tiny_tokenizer(texts, add_special_tokens=False, padding=True, return_tensors="pt")
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        model = make_tiny_model().train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(60):
            model(**batch, labels=labels).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        model.save_pretrained(kept)
    shutil.copytree(kept, project.folder / "tiny-model", dirs_exist_ok=True)
    return project


def examine(project: Any, *arguments: str) -> tuple[dict[str, Any], int]:
    result = CliRunner().invoke(app, [str(project.recipe), "--json", *arguments], catch_exceptions=False)
    return json.loads(result.stdout), result.exit_code


def by_check(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {finding["check"]: finding for finding in found["findings"]}


def test_a_sound_recipe_passes_every_check(learnable: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # So small a base takes larger steps than any that is in use, and a busy machine more time.
    monkeypatch.setattr(trials, "usual_rate", lambda *args: UsualRate(1e-2, 2e-2, ""))
    monkeypatch.setattr(trials, "OVERFIT_STEPS", 100)
    monkeypatch.setattr(trials, "_OVERFIT_SECONDS", 600.0)
    found, code = examine(learnable)
    assert [finding for finding in found["findings"] if finding["status"] == "fault"] == []
    assert code == found["exit_code"] == found["faults"] == 0
    checks = by_check(found)
    for name in (
        "versions", "disk", "recipe", "BOS once", "EOS is a target", "pad token", "vocabulary", "train = serve",
        "targets are the answers", "contradictions", "leaks", "memory forecast", "trained part",
        "weights", "gradients", "resume", "8 examples by heart", "save and reload", "accumulation", "packing",
    ):  # fmt: skip
        assert checks[name]["status"] == "ok", checks[name]
    # The peak is the process's, which holds what earlier tests left in it: more than forecast is a warning.
    assert checks["longest batch"]["status"] in ("ok", "warning")
    assert checks["number of rows"]["status"] == "warning"  # 36 rows
    assert checks["power of digits"]["status"] == "warning"  # 12 items
    assert checks["resume"]["measured"] == 0.0
    assert checks["accumulation"]["measured"] <= checks["accumulation"]["limit"]
    assert not list(learnable.folder.glob("runs/recipe-*"))  # looking leaves no run behind


FAULTY = """\
recipe: 1
model:
  id: tiny-model
  dtype: fp16  # needs a GPU
adapter: {rank: 8, alpha: 16}
data: {spec: digits.yaml, max_tokens: 64}  # too short
train:
  learning_rate: 1e-2
  pack_tokens: 64
  fp8: true
  report_to: [wandb]
eval:
  suites: [suite.yaml]
"""


def test_all_faults_come_at_once_and_fix_writes_what_is_safe(
    learnable: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.integrations.is_wandb_available", lambda: False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    learnable.recipe.write_text(FAULTY)
    found, code = examine(learnable)
    assert code == 2
    wrong = {finding["where"] for finding in found["findings"] if finding["status"] == "fault"}
    assert wrong == {"model.dtype", "train.fp8", "train.report_to", "data.max_tokens"}
    assert all(finding["remedy"] for finding in found["findings"] if finding["status"] == "fault")
    assert by_check(found)["longest batch"]["status"] == "skipped"
    assert found["patch"] == ""

    monkeypatch.setattr("finetune.pipeline.doctor.try_training", lambda material, say: iter(()))
    found, code = examine(learnable, "--fix")
    assert (code, found["faults"]) == (0, 0), found
    text = learnable.recipe.read_text()
    assert "dtype: bf16  # needs a GPU" in text and "# too short" in text
    recipe = load_recipe(learnable.recipe)
    assert (recipe.train.fp8, recipe.train.report_to) == (False, [])
    assert recipe.data.max_tokens == recipe.train.pack_tokens > 64
    assert "+  dtype: bf16  # needs a GPU" in found["patch"] and "-  fp8: true" in found["patch"]


def test_a_recipe_that_cannot_be_read_is_told_with_the_machine(project: Any) -> None:
    project.recipe.write_text(
        "recipe: 1\nmodel: {id: tiny-model}\ndata: {spec: digits.yaml, max_tokenz: 3}\n"
    )
    found, code = examine(project)
    assert code == 2
    faults = [finding for finding in found["findings"] if finding["status"] == "fault"]
    assert {finding["group"] for finding in faults} == {"recipe"}
    assert len(faults) == 2  # the key that is not known, and the section that is not there
    assert by_check(found)["versions"]["status"] == "ok"


def test_what_does_not_fit_has_its_own_exit_code(project: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from finetune.doctor.memory import Room

    monkeypatch.setattr("finetune.pipeline.checks.read_room", lambda: Room(10**8, 10**8, "memory"))
    found, code = examine(project)
    assert code == found["exit_code"] == 13
    assert by_check(found)["memory forecast"]["status"] == "fault"
    assert by_check(found)["evaluation forecast"]["status"] == "fault"


def test_a_model_that_no_forecast_is_known_for_is_trained_all_the_same(project: Any) -> None:
    """A mixture of experts: told once, and what it used is in the report."""
    import torch
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 259, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    config = MixtralConfig(
        **sizes, num_attention_heads=4, num_key_value_heads=2, num_local_experts=2, num_experts_per_tok=1
    )
    MixtralForCausalLM(config).save_pretrained(project.folder / "tiny-model")
    outcome = project.run("train.max_steps=1", "eval.max_items=2")
    told = [line for line in project.said if "no memory model for model_type 'mixtral'" in line]
    assert len(told) == 1 and "finetune doctor" in told[0]
    assert "no forecast, used" in outcome.report.read_text()


def test_a_run_says_the_warnings_and_stops_at_the_faults(
    project: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from finetune.errors import UserError
    from finetune.pipeline import checks

    project.run()
    assert any(line.startswith("warning: number of rows: 36 train rows are few") for line in project.said)
    project.run()
    assert not any(line.startswith("warning: number of rows") for line in project.said)  # told once

    monkeypatch.setattr(
        checks, "check_tokens", lambda *args, **kwargs: iter([checks.Finding("x", "fault", "y", remedy="z")])
    )
    with pytest.raises(UserError, match="x: y"):
        project.run("train.learning_rate=2e-2")


def test_a_model_that_does_not_learn_is_found(learnable: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients that never reach the weights: the loss stays, and eight examples tell."""
    monkeypatch.setattr(trials.Trials, "probe", lambda *args: ())
    monkeypatch.setattr(trials.Trials, "resume", lambda *args: ())
    monkeypatch.setattr("finetune.pipeline.doctor_trials._quick", lambda *args: iter(()))
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self, closure=None: None)
    monkeypatch.setattr(trials, "OVERFIT_STEPS", 3)
    found, code = examine(learnable)
    assert code == 2
    assert by_check(found)["8 examples by heart"]["status"] == "fault"


def test_text_for_people(project: Any, tmp_path: Path) -> None:
    project.recipe.write_text("recipe: 1\n")
    result = CliRunner().invoke(app, [str(project.recipe)], catch_exceptions=False)
    assert result.exit_code == 2
    lines = result.stdout.splitlines()
    assert lines[0] == "environment" and "recipe" in lines
    assert any(line.startswith("          fix: ") for line in lines)
    assert "faults" in lines[-1]
