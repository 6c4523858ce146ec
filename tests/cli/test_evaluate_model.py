"""`finetune eval model`: any model on a suite, and two models against each other."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from finetune.cli.main import main


@pytest.fixture
def suite(make_showing_suite: Callable[..., Path]) -> Path:
    return make_showing_suite("text_match", "yes", 6)


def test_a_model_by_itself_has_an_interval_and_is_asked_once(
    suite: Path, call: Any, tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, told = call("eval", "model", tiny_model_folder, "--suite", suite)
    assert (code, told["arms"][0]["arm"], told["arms"][0]["n"]) == (0, "few_shot", 6)
    held = told["arms"][0]["metrics"]["text_match"]
    assert held["low"] <= held["mean"] <= held["high"] and held["method"]
    monkeypatch.setattr("finetune.pipeline.answerer.load_model", None)  # answers come from the store
    assert call("eval", "model", tiny_model_folder, "--suite", suite) == (0, told)


def test_a_merged_model_is_compared_with_the_run_it_was_made_of(
    suite: Path,
    call: Any,
    make_finished_run: Any,
    make_tiny_model: Any,
    tiny_model_folder: Path,
    tmp_path: Path,
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run = make_finished_run(suite)
    base = AutoModelForCausalLM.from_pretrained(tiny_model_folder, dtype="float32")
    merged = PeftModel.from_pretrained(base, run / "adapter").merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    AutoTokenizer.from_pretrained(tiny_model_folder).save_pretrained(tmp_path / "merged")
    code, told = call(
        "eval", "model", tmp_path / "merged", "--suite", suite, "--arm", "tuned", "--against", run
    )
    one = told["comparison"]["comparisons"][0]
    assert code in (11, 12) and (one["n"], one["difference"]) == (6, 0.0)
    assert told["comparison"]["against"] == "tuned" and told["against"] == str(run)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--arm", "best"], "there is no arm 'best'"),
        (["--against", "nowhere/model"], "nowhere/model"),
    ],
)
def test_what_is_not_there_is_named(
    suite: Path, call: Any, tiny_model_folder: Path, arguments: list[str], told: str
) -> None:
    code, answer = call("eval", "model", tiny_model_folder, "--suite", suite, *arguments)
    assert code == 2 and told in json.dumps(answer)


def test_a_run_is_asked_as_it_was_trained(suite: Path, call: Any, make_finished_run: Any) -> None:
    run = make_finished_run(suite)
    code, told = call("eval", "model", run, "--suite", suite)
    assert (code, told["arms"][0]["arm"]) == (0, "tuned")
    assert told["arms"][0]["adapter_sha256"]


def test_a_merge_can_be_verified_on_a_suite(
    suite: Path, make_finished_run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_finished_run(suite)
    merging = ["merge", "adapter", str(run), "--dtype", "fp32", "--verify", str(suite), "--json"]
    with pytest.raises(SystemExit) as stop:
        main([*merging, "--out", str(tmp_path / "merged")])
    told = json.loads(capsys.readouterr().out)
    verified = told["verified"]
    assert stop.value.code == verified["exit_code"] in (0, 11)  # six items may be too few to exclude a loss
    assert verified["suites"][0]["difference"] == 0.0
    merging[2] = str(run / "adapter")
    with pytest.raises(SystemExit) as stop:
        main([*merging, "--out", str(tmp_path / "again")])
    assert stop.value.code == 2 and "is no run" in capsys.readouterr().out
    assert not (tmp_path / "again").exists()
