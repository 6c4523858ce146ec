"""Weights that changed behind a run's back: its saved answers are not theirs, and nothing judges them as such."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from finetune.cli.main import main

SUITE = """\
suite: 1
name: task
items: {jsonl: task.jsonl}
decoding: {max_new_tokens: 3}
scorers: [text_match]
primary_metric: text_match
"""


@pytest.fixture
def run(make_finished_run: Any, tmp_path: Path) -> Path:
    folder = tmp_path / "eval"
    folder.mkdir()
    lines = [{"id": f"i{n}", "prompt": f"q{n}", "reference": "yes"} for n in range(5)]
    (folder / "task.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "task.yaml").write_text(SUITE)
    made: Path = make_finished_run(folder / "task.yaml")
    return made


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    def made(*arguments: str | Path) -> tuple[int, str]:
        with pytest.raises(SystemExit) as stop:
            main([*map(str, arguments), "--json"])
        answer = json.loads(capsys.readouterr().out)
        return int(str(stop.value.code)), answer["error"][0]["what"] if "error" in answer else ""

    return made


def _scaled(path: Path, factor: float) -> None:
    from safetensors.torch import load_file, save_file

    tensors = {name: tensor * factor for name, tensor in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})


def test_a_changed_adapter_is_not_the_one_that_answered(run: Path, call: Any) -> None:
    assert call("eval", "run", run)[0] in (11, 12)
    assert call("eval", "gate", run)[0] in (11, 12)
    weights = run / "adapter" / "adapter_model.safetensors"
    kept = weights.read_bytes()
    _scaled(weights, 2.0)
    code, what = call("eval", "run", run)
    assert (code, "was changed after the training" in what) == (2, True)
    code, what = call("eval", "gate", run)
    assert (code, "are not of the adapter" in what) == (2, True)
    weights.write_bytes(kept)
    assert call("eval", "gate", run)[0] in (11, 12)


def test_a_changed_base_is_not_the_one_that_was_trained_on(
    run: Path, call: Any, tiny_model_folder: Path, make_tiny_model: Any
) -> None:
    assert call("eval", "run", run)[0] in (11, 12)
    make_tiny_model(seed=5).save_pretrained(tiny_model_folder)
    code, what = call("eval", "run", run)
    assert (code, "is not the one that this run was trained on" in what) == (2, True)


def test_an_adapter_that_does_nothing_fails_loudly(run: Path, call: Any) -> None:
    from finetune.digest import digest_file
    from finetune.paths import read_json, write_json

    weights = run / "adapter" / "adapter_model.safetensors"
    _scaled(weights, 0.0)
    manifest = read_json(run / "manifest.json")  # as if it had been trained like that
    outputs = manifest["stages"]["train"]["outputs"]
    outputs["adapter/adapter_model.safetensors"] = digest_file(weights)
    write_json(run / "manifest.json", manifest)
    code, what = call("eval", "run", run)
    assert (code, what) == (
        2,
        "the tuned model answers like its base: largest logit difference 0",
    )
    assert not (run / "eval").exists()


def test_half_an_adapter_is_a_user_error(tiny_model: Any, tmp_path: Path, run: Path) -> None:
    from finetune.errors import UserError
    from finetune.model.adapter_files import load_adapter

    weights = run / "adapter" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(UserError, match="weights cannot be read"):
        load_adapter(tiny_model, run / "adapter")
