"""`finetune eval run RUN --serve vllm`, and lm-eval tasks, on a finished run."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from finetune.cli.evaluate import app
from finetune.errors import UserError
from finetune.evaluation.records import read_summary
from finetune.paths import read_jsonl, write_jsonl

SUITE = """\
suite: 1
name: task
items: {jsonl: task.jsonl}
decoding: {max_new_tokens: 6}
scorers: [text_match]
primary_metric: text_match
"""
TASK = """\
task: larger
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{prompt}} Answer:"
doc_to_choice: ["yes", "no"]
doc_to_target: 0
"""


@pytest.fixture
def suite_path(tmp_path: Path) -> Path:
    items = [{"id": f"i{n}", "prompt": f"q{n}", "reference": "tuned"} for n in range(12)]
    write_jsonl(tmp_path / "task.jsonl", items)
    (tmp_path / "task.yaml").write_text(SUITE)
    return tmp_path / "task.yaml"


def call(*arguments: str | Path) -> dict[str, Any]:
    result = CliRunner().invoke(
        app, [str(one) for one in (*arguments, "--json")], catch_exceptions=False, standalone_mode=False
    )
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def _ended(calls: Path) -> bool:
    for one in read_jsonl(calls):
        try:
            os.kill(one["pid"], 0)
        except ProcessLookupError:
            continue
        return False
    return True


def test_base_and_adapter_are_answered_by_one_server(
    make_finished_run: Callable[..., Path], suite_path: Path, vllm_calls: Path
) -> None:
    run = make_finished_run(suite_path)
    comparison = call("run", run, "--serve", "vllm", "--serve-argument=--seed=1")
    assert comparison["comparisons"][0]["fixed"] == 12
    (started,) = read_jsonl(vllm_calls)
    assert f"tuned={run / 'adapter'}" in started["arguments"]
    assert started["arguments"][-1] == "--seed=1"
    assert _ended(vllm_calls)
    folder = run / "eval" / "task" / "server"
    assert {record["output"] for record in read_jsonl(folder / "tuned.jsonl")} == {"tuned"}
    assert read_summary(folder, "tuned").backend == "server"
    assert (run / "eval" / "comparison-base-server.json").is_file()
    again = call("run", run, "--serve", "vllm", "--serve-argument=--seed=1")
    assert again["comparisons"] == comparison["comparisons"]
    assert len(read_jsonl(vllm_calls)) == 1  # everything was saved: nothing is started


def test_a_full_model_is_served_after_the_base(
    make_finished_run: Callable[..., Path], suite_path: Path, vllm_calls: Path
) -> None:
    run = make_finished_run(suite_path, kind="none")
    assert call("run", run, "--serve", "vllm")["comparisons"][0]["fixed"] == 12
    first, second = (one["arguments"] for one in read_jsonl(vllm_calls))
    assert first[first.index("--served-model-name") + 1] == "base"
    assert second[second.index("--served-model-name") + 1] == "tuned"
    assert second[1] == str(run / "model")
    assert "--enable-lora" not in first + second
    assert _ended(vllm_calls)


def test_the_server_is_ended_when_answering_fails(
    make_finished_run: Callable[..., Path],
    suite_path: Path,
    vllm_calls: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from finetune.evaluation.answering import Answering

    def failing(*_: Any) -> None:
        raise RuntimeError("no answers")

    monkeypatch.setattr(Answering, "answers", failing)
    run = make_finished_run(suite_path)
    with pytest.raises(RuntimeError, match="no answers"):
        call("run", run, "--serve", "vllm")
    assert len(read_jsonl(vllm_calls)) == 1
    assert _ended(vllm_calls)


def test_adapters_that_vllm_cannot_serve_are_refused(
    make_finished_run: Callable[..., Path], suite_path: Path, vllm_calls: Path
) -> None:
    run = make_finished_run(suite_path, kind="dora")
    with pytest.raises(UserError, match="does not serve adapters of kind dora"):
        call("run", run, "--serve", "vllm")
    assert not vllm_calls.exists()


def test_serving_needs_vllm_and_no_other_server(
    suite_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(UserError, match="vllm is not installed"):
        call("run", tmp_path, "--serve", "vllm")
    with pytest.raises(UserError, match="either a server that runs or one to start"):
        call("run", tmp_path, "--serve", "vllm", "--server", "http://127.0.0.1:1/v1")


def test_a_run_is_evaluated_on_an_lm_eval_task(
    make_finished_run: Callable[..., Path], suite_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "larger.yaml").write_text(TASK.replace("DATA", str(tmp_path / "task.jsonl")))
    (tmp_path / "larger.yaml").write_text(
        "suite: 1\nname: larger\nrole: regression\nitems: {lm_eval: larger, include_path: tasks}\n"
    )
    run = make_finished_run(suite_path)
    comparison = call("run", run, "--suite", tmp_path / "larger.yaml")
    assert [one["metric"] for one in comparison["comparisons"]] == ["acc", "acc_norm"]
    assert comparison["comparisons"][0]["n"] == 12
    records = read_jsonl(run / "eval" / "larger" / "tuned.jsonl")
    assert records[3]["item"] == "3"
    assert set(records[3]["task_scores"]) == {"acc,none", "acc_norm,none"}
