"""Several processes over gloo train what one does; runs go on with other numbers of them; FSDP2 spreads the weights."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from finetune.data.prefixes import shared_beginnings
from finetune.digest import digest_folder
from finetune.telemetry.events import read_events

# The first test waits for every group of processes of the module, each of which loads torch anew.
pytestmark = pytest.mark.timeout(1800)
WORKER = Path(__file__).with_name("worker.py")
SAME = ["curve", "packed", "one_pack", "preference", "full", "ramp", "preference_ramp", "best"]


def load_worker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("several_worker", WORKER)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def start(folder: Path, n: int, scenarios: Sequence[str]) -> list[subprocess.Popen[str]]:
    """The processes of one group. `where:scenario` runs a scenario in another folder than that of its name."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {
        "WORLD_SIZE": str(n),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    shared |= {"CUDA_VISIBLE_DEVICES": "", "TRL_EXPERIMENTAL_SILENCE": "1"}
    return [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(folder), *scenarios],
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(n)
    ]


def finish(processes: Sequence[subprocess.Popen[str]]) -> None:
    said = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), "\n".join(said)[-4000:]


def steps_of(folder: Path) -> list[dict[str, Any]]:
    return [event for event in read_events(folder / "events.jsonl") if event["event"] == "step"]


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    """What was trained. The embedding of a base without a folder is saved along where a process holds it whole."""
    (file,) = [*folder.glob("adapter/*.safetensors"), *folder.glob("model/*.safetensors")]
    trained = "lora_" if file.parent.name == "adapter" else ""
    return {name: tensor for name, tensor in load_file(str(file)).items() if trained in name}


def same_training(one: Path, other: Path) -> None:
    """Equal curves, rows, counts and validation losses, and equal weights, to fp32's rounding."""
    for expected, found in zip(steps_of(one), steps_of(other), strict=True):
        assert found["loss"] == pytest.approx(expected["loss"], abs=1e-5)
        assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
        for name in ("step", "tokens", "target_tokens", "learning_rate"):
            assert found[name] == expected[name]
        assert sorted(found.get("rows", ())) == sorted(expected.get("rows", ()))
    validations = [
        [event["loss"] for event in read_events(folder / "events.jsonl") if event["event"] == "validation"]
        for folder in (one, other)
    ]
    assert validations[1] == pytest.approx(validations[0], abs=1e-5) and validations[0]
    expected, found = weights_of(one), weights_of(other)
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert (found[name] - tensor).abs().max() < 1e-4, name


def same_movement(one: Path, other: Path) -> None:
    """Also where each process holds a part of the weights."""
    for expected, found in zip(steps_of(one), steps_of(other), strict=True):
        for name in ("weight_norm", "update_ratio", "update_ratio_median"):
            assert found[name] == pytest.approx(expected[name], rel=1e-3)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every training of this module: in one process here, in two beside it, then here again what those two began."""
    folder = tmp_path_factory.mktemp("several")
    worker = load_worker()
    one, two = folder / "one", folder / "two"
    one.mkdir()
    two.mkdir()
    worker.begun(two / "from-one")
    worker.begun(two / "from-one-sharded")
    scenarios = [*SAME, "from-two:begun", "from-one:continued"]
    scenarios += ["dropout", "dropout_resumed", "interrupted", "interrupted:continued_rarely"]
    scenarios += [
        "half",
        "fsdp",
        "fsdp_packed",
        "fsdp_half",
        "fsdp_full",
        "from-sharded:fsdp_begun",
        "from-one-sharded:fsdp_continued",
    ]
    processes = start(two, 2, scenarios)
    for name in SAME:
        worker.SCENARIOS[name](one / name)
    finish(processes)
    for name in ("from-two", "from-sharded"):
        worker.continued(two / name)
    return folder


@pytest.mark.parametrize("name", SAME)
def test_two_processes_train_what_one_does(runs: Path, name: str) -> None:
    same_training(runs / "one" / name, runs / "two" / name)


def test_packs_of_these_trainings_share_a_system_prompt(runs: Path) -> None:
    """Also the parts of a pack that two processes have, in which it is then computed twice."""
    worker = load_worker()
    rows = worker.rows_of(worker.tiny().build_tiny_tokenizer())
    repeated = [length for _, length in shared_beginnings([(row.input_ids, row.labels) for row in rows])]
    assert repeated[0] == 0 and min(repeated[1:]) > 20
    assert worker.recipe_of(packing=True).shares_prefixes
    assert [len(step["rows"]) for step in steps_of(runs / "two" / "packed")] == [7, 2, 7, 2]
    assert [len(step["rows"]) for step in steps_of(runs / "two" / "one_pack")] == [4, 5, 5, 4]


def test_the_last_step_of_an_epoch_has_too_few_rows_for_two_processes(runs: Path) -> None:
    """Then one of them computes along and counts nothing: else rows would be repeated, or a process would wait forever."""
    counts = [len(step["rows"]) for step in steps_of(runs / "two" / "curve")]
    assert counts == [4, 4, 1, 4, 4, 1]


def test_several_processes_stop_early_at_one_step_and_take_the_same_result(runs: Path) -> None:
    for folder in (runs / "one" / "best", runs / "two" / "best"):
        events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
        (result,) = [event for event in events if event["event"] == "result"]
        assert result["step"] < steps_of(folder)[-1]["step"] < 24


def test_a_growing_batch_has_the_same_rows_in_every_step(runs: Path) -> None:
    counts = [len(step["rows"]) for step in steps_of(runs / "two" / "ramp")]
    assert counts == [len(step["rows"]) for step in steps_of(runs / "one" / "ramp")]
    assert counts[:4] == [1, 1, 2, 2] and max(counts) == 3 and sum(counts) == 18


@pytest.mark.parametrize("name", ["from-one", "from-two"])
def test_another_number_of_processes_continues_without_losing_or_repeating_a_row(
    runs: Path, name: str
) -> None:
    same_training(runs / "one" / "curve", runs / "two" / name)
    resumed = [json.loads(line) for line in (runs / "two" / name / "events.jsonl").read_text().splitlines()]
    assert [event["step"] for event in resumed if event["event"] == "resume"] == [4]


def test_two_processes_resume_to_the_same_bytes_with_dropout(runs: Path) -> None:
    whole, resumed = (runs / "two" / name for name in ("dropout", "dropout_resumed"))
    assert digest_folder(resumed / "adapter") == digest_folder(whole / "adapter")
    assert [s["loss"] for s in steps_of(resumed)] == [s["loss"] for s in steps_of(whole)]


def test_ctrl_c_that_one_process_hears_stops_all_at_one_step(runs: Path) -> None:
    folder = runs / "two" / "interrupted"
    assert {path.name for path in folder.glob("interrupted-*")} == {"interrupted-0", "interrupted-1"}
    same_training(runs / "one" / "curve", folder)
    resumed = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    assert [event["step"] for event in resumed if event["event"] == "resume"] == [3]


def test_only_the_first_process_writes(runs: Path) -> None:
    folder = runs / "two" / "curve"
    assert [step["step"] for step in steps_of(folder)] == [1, 2, 3, 4, 5, 6]
    assert {path.name for path in folder.iterdir()} == {
        "adapter",
        "checkpoints",
        "events.jsonl",
        "validation_rows.json",
    }


@pytest.mark.parametrize(
    ("name", "unsharded"), [("fsdp", "curve"), ("fsdp_packed", "packed"), ("fsdp_full", "full")]
)
def test_weights_spread_by_fsdp2_train_what_ddp_does(runs: Path, name: str, unsharded: str) -> None:
    same_training(runs / "two" / unsharded, runs / "two" / name)


def test_fsdp2_watches_how_far_a_step_moves_the_weights(runs: Path) -> None:
    same_movement(runs / "two" / "curve", runs / "two" / "fsdp")


def test_bf16_under_fsdp2_keeps_trained_weights_in_fp32(runs: Path) -> None:
    """Products are rounded at other places than under autocast, so that the curves agree to bf16 only."""
    spread, whole = (steps_of(runs / "two" / name) for name in ("fsdp_half", "half"))
    assert [s["loss"] for s in spread] == pytest.approx([s["loss"] for s in whole], abs=0.03)
    assert {tensor.dtype for tensor in weights_of(runs / "two" / "fsdp_half").values()} == {torch.float32}


@pytest.mark.parametrize("name", ["from-sharded", "from-one-sharded"])
def test_checkpoints_of_fsdp2_and_of_one_process_are_the_same(runs: Path, name: str) -> None:
    same_training(runs / "one" / "curve", runs / "two" / name)


def test_no_checkpoint_holds_pickle(runs: Path) -> None:
    files = [path for path in runs.rglob("checkpoints/**/*") if path.is_file()]
    assert {path.suffix for path in files} == {".safetensors", ".json", ".jinja"}


ZERO = ["zero2", "zero3", "zero3_offload"]
OTHERS = ["lion", "momentum"]  # optimizers


@pytest.fixture(scope="module")
def zero(runs: Path) -> Path:
    """Trainings under DeepSpeed in two processes; what they began goes on without it, and the other way round."""
    pytest.importorskip(
        "deepspeed", reason="DeepSpeed is not installed: pip install 'finetune-pipeline[deepspeed]'"
    )
    worker, folder = load_worker(), runs / "zero"
    folder.mkdir()
    worker.begun(folder / "from-one")
    scenarios = [f"{kind}:{kind}+curve" for kind in ZERO]
    scenarios += [f"{kind}_full:{kind}+full" for kind in ZERO[:2]]
    scenarios += [f"{kind}_half:{kind}+half" for kind in ZERO[:2]]
    scenarios += [f"{kind}_diverged:{kind}+diverged" for kind in ZERO[:2]]
    scenarios += ["from-one:zero3+begun_again", "from-one:zero2+continued", "from-zero:zero3+begun"]
    scenarios += ["dropout:zero3+dropout", "dropout_resumed:zero3+dropout_resumed"]
    scenarios += [f"{kind}_{name}:{kind}+{name}_resumed" for kind in ZERO[:2] for name in OTHERS]
    finish(start(folder, 2, scenarios))
    worker.continued(folder / "from-zero")
    for name in OTHERS:
        worker.SCENARIOS[f"{name}_resumed"](folder / name)
    return folder


@pytest.mark.parametrize("kind", ZERO)
def test_zero_trains_what_ddp_does(runs: Path, zero: Path, kind: str) -> None:
    same_training(runs / "two" / "curve", zero / kind)


@pytest.mark.parametrize("kind", ZERO[:2])
def test_zero_tunes_all_weights_as_ddp_does(runs: Path, zero: Path, kind: str) -> None:
    same_training(runs / "two" / "full", zero / f"{kind}_full")


@pytest.mark.parametrize("kind", ZERO[:2])
@pytest.mark.parametrize("name", OTHERS)
def test_other_optimizers_step_and_resume_under_zero(zero: Path, name: str, kind: str) -> None:
    same_training(zero / name, zero / f"{kind}_{name}")


@pytest.mark.parametrize("kind", ZERO[:2])
def test_bf16_under_zero_is_that_of_ddp(runs: Path, zero: Path, kind: str) -> None:
    """Products in bf16, trained weights and the sum of their gradients in fp32."""
    spread, whole = (steps_of(folder) for folder in (zero / f"{kind}_half", runs / "two" / "half"))
    assert [s["loss"] for s in spread] == pytest.approx([s["loss"] for s in whole], abs=1e-3)
    assert [s["grad_norm"] for s in spread] == pytest.approx([s["grad_norm"] for s in whole], rel=1e-3)
    assert {tensor.dtype for tensor in weights_of(zero / f"{kind}_half").values()} == {torch.float32}


@pytest.mark.parametrize("kind", ZERO[:2])
def test_zero_watches_how_far_a_step_moves_the_weights(runs: Path, zero: Path, kind: str) -> None:
    same_movement(runs / "two" / "curve", zero / kind)


@pytest.mark.parametrize("kind", ZERO[:2])
def test_a_gradient_that_is_not_finite_stops_zero_before_the_step(zero: Path, kind: str) -> None:
    folder = zero / f"{kind}_diverged"
    assert "the gradient of step 3 is not finite" in (folder / "stopped").read_text()
    assert len(steps_of(folder)) == 2
    before = load_file(str(folder / "checkpoints/step-2/adapter_model.safetensors"))
    now = load_file(str(folder / "stopped.safetensors"))
    assert before
    for name, tensor in now.items():
        assert torch.equal(before[name.replace(".default", "")], tensor), name


def test_zero_resumes_to_the_same_bytes_with_dropout(zero: Path) -> None:
    whole, resumed = (zero / name for name in ("dropout", "dropout_resumed"))
    assert digest_folder(resumed / "adapter") == digest_folder(whole / "adapter")
    assert [s["loss"] for s in steps_of(resumed)] == [s["loss"] for s in steps_of(whole)]


@pytest.mark.parametrize("name", ["from-one", "from-zero"])
def test_zero_continues_what_others_began_and_others_what_it_began(runs: Path, zero: Path, name: str) -> None:
    """One process begins, ZeRO-3 goes on, then ZeRO-2; and ZeRO-3 begins, one process goes on."""
    same_training(runs / "one" / "curve", zero / name)


def test_no_checkpoint_of_zero_holds_pickle(zero: Path) -> None:
    files = [path for path in zero.rglob("checkpoints/**/*") if path.is_file()]
    assert {path.suffix for path in files} == {".safetensors", ".json", ".jinja"}


@pytest.mark.slow
def test_four_processes_train_what_one_does(runs: Path, tmp_path: Path) -> None:
    finish(start(tmp_path, 4, ["curve"]))
    same_training(runs / "one" / "curve", tmp_path / "curve")
