"""The benchmark for GPUs: all of it runs on a CPU with two layers, every cell has both contenders, and nothing is claimed."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from finetune.plan.architecture import read_architecture

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def gpu() -> ModuleType:
    spec = importlib.util.spec_from_file_location("benchmarks_gpu", ROOT / "benchmarks" / "gpu.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


def test_every_cell_runs_with_both_contenders_and_is_written_down(
    gpu: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gpu.main(["--tiny", "--steps", "2", "--models", "Qwen3-4B", "--out", str(tmp_path)]) == 0
    (numbers,) = tmp_path.glob("gpu-cpu-*.json")
    record = json.loads(numbers.read_text())
    assert record["left_out"] == []
    found = {(one["method"], one["tuning"], one["contender"]) for one in record["results"]}
    assert found == {(m, t, c) for m in ("sft", "dpo") for t in ("LoRA", "QLoRA") for c in ("TRL", "ours")}
    for one in record["results"]:
        assert one["tokens_per_second"] > 0 and one["mfu"] > 0 and one["peak_bytes"] > 0
        assert one["forecast_bytes"] is None  # a forecast of the GPU is not held against a CPU
    assert "| Qwen3-4B | DPO | QLoRA | ours |" in capsys.readouterr().out


def test_a_budget_that_is_used_up_names_what_was_not_run(gpu: ModuleType, capsys: Any) -> None:
    assert gpu.main(["--tiny", "--budget-seconds", "-1"]) == 0
    out = capsys.readouterr().out
    assert out.count("the budget of -1 s was used up") == 8


def test_without_a_gpu_the_real_sizes_are_not_tried(
    gpu: ModuleType, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert gpu.main([]) == 2
    assert "there is no GPU here" in capsys.readouterr().out


@pytest.mark.parametrize(("name", "billions"), [("Llama-3-8B", 8.03), ("Qwen3-4B", 4.02)])
def test_the_shapes_are_those_of_their_names(gpu: ModuleType, name: str, billions: float) -> None:
    assert read_architecture(gpu.SHAPES[name]).n_parameters / 1e9 == pytest.approx(billions, abs=0.01)


@pytest.mark.parametrize("method", ["sft", "dpo"])
def test_both_contenders_are_given_the_same_rows_in_every_step(gpu: ModuleType, method: str) -> None:
    shape = gpu.SHAPES["Qwen3-4B"] | gpu._TINY
    cell = gpu.Cell("Qwen3-4B", method, "LoRA", shape, gpu.SMALL, 2, torch.device("cpu"))
    if method == "sft":
        assert [len(pack["input_ids"]) for pack in gpu._packs(cell)] == cell.step_tokens()
        joined = [token for row in cell.rows() for token in row]
        assert [token for pack in gpu._packs(cell) for token in pack["input_ids"]] == joined
    ours, theirs = gpu.our_trainer(cell, False), gpu.trl_trainer(cell, False)
    sizes = [trainer.args.per_device_train_batch_size for trainer in (ours, theirs)]
    assert sizes == [1, cell.sizes.rows if method == "sft" else cell.sizes.pairs]
    assert len(ours.train_dataset) == 2 and len(theirs.train_dataset) == 2 * sizes[1]


def test_no_result_is_claimed_that_is_not_in_the_folder() -> None:
    folder = ROOT / "benchmarks" / "results"
    pages = [path for path in folder.glob("*.md") if path.name != "README.md"]
    says_none = "None yet." in (folder / "README.md").read_text()
    assert says_none == (not pages)
