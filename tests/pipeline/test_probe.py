"""`finetune plan RECIPE --probe`: a few real steps tell the tokens, the steps, the time and the price of all of them."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from typer.testing import CliRunner

from finetune.cli.plan import app
from finetune.errors import UserError
from finetune.pipeline.probe import Probe, probe_training
from finetune.recipe.resolve import load_recipe

PROBE = Probe(
    train_tokens=10_000,
    n_rows=100,
    n_examples=24,
    total_steps=48,
    step_tokens=(400, 400, 440),
    step_seconds=(9.0, 2.0, 2.0),
    peak_bytes=10**9,
    basis="rss",
)


def test_the_first_step_warms_up_and_the_packs_are_those_that_there_are() -> None:
    recipe = load_recipe("sft/home_intents_lora", ["train.epochs=2"])
    time = PROBE.time(recipe)
    assert PROBE.tokens_per_second == pytest.approx((200 + 220) / 2)
    assert (time.tokens, time.steps, time.basis) == (20_000, 48, "probe of 3 steps")
    assert time.seconds == pytest.approx(20_000 / 210)
    shorter = PROBE.time(load_recipe("sft/home_intents_lora", ["train.epochs=2", "train.max_steps=12"]))
    assert shorter.tokens == 5_000


def test_several_devices_share_the_work() -> None:
    recipe = load_recipe("sft/home_intents_lora", ["train.epochs=2"])
    time = PROBE.time(recipe, n_devices=2)
    assert (time.tokens, time.steps) == (20_000, 24)
    assert time.seconds == pytest.approx(PROBE.time(recipe).seconds / 2)


def test_a_plan_with_a_probe_counts_what_the_run_will_do(
    project: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("finetune.telemetry.progress._QUIET_SECONDS", 0.0)
    result = CliRunner().invoke(
        app,
        [str(project.recipe), "--device", "cpu", "--probe", "--price-per-hour", "3600", "--json"],
        catch_exceptions=False,
    )
    assert result.exit_code == 0, result.output
    # Of its own steps, not the time of a training that does not take place.
    assert "probe: 3/3 steps" in result.stderr and "train:" not in result.stderr
    plan = json.loads(result.stdout)
    probe, time = plan["probe"], plan["time"]
    assert len(probe["step_tokens"]) == 3 and probe["peak_bytes"] > 0
    assert time["steps"] == probe["total_steps"] > 3
    assert time["tokens"] == round(probe["train_tokens"] * load_recipe(str(project.recipe)).train.epochs)
    assert time["seconds"] == pytest.approx(time["tokens"] / probe["tokens_per_second"])
    assert plan["cost"] == pytest.approx(time["seconds"])
    assert not list(project.folder.glob("runs/recipe-*"))  # a probe leaves no run behind


def test_what_a_probe_cannot_tell_is_refused(project: Any) -> None:
    with pytest.raises(UserError, match="1 steps tell no rate"):
        probe_training(str(project.recipe), n_steps=1, say=lambda line: None)
    with pytest.raises(UserError, match="the plan is for h100"):
        CliRunner().invoke(app, [str(project.recipe), "--device", "h100", "--probe"], catch_exceptions=False)


def test_a_training_shorter_than_a_probe_says_so(project: Any) -> None:
    with pytest.raises(UserError, match="too few to tell a rate"):
        probe_training(str(project.recipe), ["train.max_steps=1"], say=lambda line: None)


def test_the_probe_is_told_beside_the_forecast() -> None:
    faster = replace(PROBE, step_seconds=(9.0, 1.0, 1.0))
    assert faster.to_dict()["tokens_per_second"] == pytest.approx(2 * PROBE.tokens_per_second)
