"""`finetune run --launch`: a whole run in two processes, its one message when one of them fails, and what is refused before."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from finetune.errors import UserError
from finetune.paths import shipped_root
from finetune.recipe.schema import Recipe
from finetune.telemetry.events import read_events
from finetune.training.launch import find_launch, read_launch
from finetune.training.preflight import check_training
from finetune.training.processes import END, EndedElsewhereError, Processes

# One machine of two that do not share the disk of the runs; imported by every Python of the run.
OTHER_DISK = "import os\nif os.environ.get('RANK') == '1':\n    os.environ['FINETUNE_RUNS'] = '/nowhere'\n"


def launched(project: Any, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "finetune.cli.main", "run", str(project.recipe)]
    return subprocess.run(
        [*command, "--launch", "recipes/launch/ddp_2.yaml", *arguments],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", **environment},
        cwd=project.folder,
        capture_output=True,
        text=True,
    )


@pytest.mark.slow
def test_two_processes_run_as_one_does_and_tell_once_what_fails(project: Any) -> None:
    (project.folder / "sitecustomize.py").write_text(OTHER_DISK)
    failed = launched(project, PYTHONPATH=os.pathsep.join([str(project.folder), str(shipped_root())]))
    assert failed.returncode == 2
    assert failed.stderr.count("error:") == 1
    assert "process 1 does not see the run folder" in failed.stderr
    assert "Traceback" not in failed.stderr and failed.stdout == ""

    two = launched(project, "--json")
    answer = json.loads(two.stdout)
    assert two.returncode == answer["exit_code"], two.stderr
    assert "baseline digits" in answer["skipped"]
    one = project.run(run_dir=project.folder / "one")
    assert one.exit_code == two.returncode
    folder = Path(answer["run"])
    curves = [
        [event["loss"] for event in read_events(where / "events.jsonl") if event["event"] == "step"]
        for where in (folder, one.folder)
    ]
    assert curves[0] == pytest.approx(curves[1], abs=1e-4)
    expected = load_file(one.folder / "adapter/adapter_model.safetensors")
    for name, tensor in load_file(folder / "adapter/adapter_model.safetensors").items():
        assert (tensor - expected[name]).abs().max() < 1e-3, name
    assert two.stderr.count("evaluate: digits") == 1


def test_shipped_configs_are_what_accelerate_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    here = ["machine_rank=1", "main_process_ip=10.0.0.1"]
    for path in sorted((shipped_root() / "recipes" / "launch").glob("*.yaml")):
        config = read_launch(find_launch(path.stem), here)
        name, _, count = path.stem.rpartition("_")
        machines, _, each = count.rpartition("x")
        assert config.num_machines == int(machines or 1)
        assert config.num_processes == int(machines or 1) * int(each)
        kind = {"ddp": "MULTI_GPU", "fsdp2": "FSDP"}[name]
        assert config.distributed_type.value == kind
        assert config.machine_rank == 1


def test_fsdp_configs_make_the_plugin_that_they_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every key reaches accelerate's plugin: one that it does not know would be left out in silence."""
    import torch
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils import FullyShardedDataParallelPlugin
    from accelerate.utils.launch import prepare_multi_gpu_env

    path = shipped_root() / "recipes" / "launch" / "fsdp2_8.yaml"
    parsed = launch_command_parser().parse_args(
        ["--config_file", str(path), "--main_process_port", "0", "-m", "x"]
    )
    known, _, _ = _validate_launch_command(parsed)
    for name in read_fsdp_keys(path):
        assert hasattr(known, name), name
    for name, value in prepare_multi_gpu_env(known).items():
        if name.startswith(("FSDP_", "ACCELERATE_")):
            monkeypatch.setenv(name, value)
    plugin = FullyShardedDataParallelPlugin()
    assert plugin.fsdp_version == 2
    assert plugin.reshard_after_forward is True
    assert plugin.cpu_ram_efficient_loading is False
    assert plugin.state_dict_type == torch.distributed.fsdp.StateDictType.FULL_STATE_DICT
    assert plugin.auto_wrap_policy.__name__ == "transformer_auto_wrap_policy"


def read_fsdp_keys(path: Path) -> list[str]:
    from ruamel.yaml import YAML

    return list(YAML(typ="safe").load(path.read_text())["fsdp_config"])


@pytest.mark.parametrize(
    ("content", "overrides", "message"),
    [
        ("num_processes: 2\n", [], "it has no distributed_type"),
        ("distributed_type: MULTI_GPU\nnum_proceses: 2\n", [], "unknown key 'num_proceses'"),
        ("distributed_type: MULTI_GPU\n", [], "num_processes is missing"),
        ("distributed_type: MULTI_GPU\nnum_processes: 2\n", ["machine_rank"], "is not key=value"),
        (
            "distributed_type: MEGATRON_LM\nnum_processes: 2\n",
            [],
            "MEGATRON_LM on LOCAL_MACHINE is not supported",
        ),
        ("distributed_type: NEWEST\nnum_processes: 2\n", [], "NEWEST"),
        ("distributed_type: MULTI_GPU\nnum_processes: 2\nnum_machines: 2\n", [], "where the first one is"),
        ("distributed_type: FSDP\nnum_processes: 2\nfsdp_config: {fsdp_version: 2}\n", [], "FSDP needs GPUs"),
        ("distributed_type: DEEPSPEED\nnum_processes: 2\n", [], "DeepSpeed"),
        ("[", [], "cannot be read"),
    ],
)
def test_a_config_that_cannot_be_used_is_refused_before_a_process_starts(
    content: str, overrides: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    path = tmp_path / "launch.yaml"
    path.write_text(content)
    with pytest.raises(UserError, match=message):
        read_launch(path, overrides)


def test_the_nearest_shipped_config_is_named() -> None:
    with pytest.raises(UserError, match=r"did you mean 'fsdp2_8'\?"):
        find_launch("fsdp_8")


def recipe_of(**changes: Any) -> Recipe:
    tree: dict[str, Any] = {
        "name": "t",
        "model": {"id": "t"},
        "data": {"spec": "t"},
        "eval": {"suites": ["t"]},
    }
    return Recipe.model_validate(tree | changes)


@pytest.mark.parametrize(
    ("environment", "changes", "where"),
    [
        ({}, {"train": {"packing": False}}, "train.gradient_accumulation_steps"),
        ({}, {"train": {"gradient_accumulation_steps": 8, "auto": True}}, "train.auto"),
        (
            {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"},
            {"model": {"id": "t", "quantize": "nf4"}},
            "model.quantize",
        ),
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}, {"adapter": {"kind": "dora"}}, "adapter.kind"),
        (
            {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"},
            {"adapter": {"init": "pissa"}},
            "adapter.init",
        ),
        (
            {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"},
            {"train": {"optimizer": "muon"}},
            "train.optimizer",
        ),
        (
            {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"},
            {"train": {"result": "best", "validate_every_steps": 5}},
            "train.result",
        ),
    ],
)
def test_what_several_processes_cannot_train_is_refused_by_its_key(
    environment: dict[str, str], changes: dict[str, Any], where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"WORLD_SIZE": "2", "RANK": "0", **environment}.items():
        monkeypatch.setenv(name, value)
    recipe = recipe_of(**changes)
    with pytest.raises(UserError) as caught:
        check_training(recipe)
    assert where in {fault.where for fault in caught.value.faults}
    assert all(fault.fix for fault in caught.value.faults)


class Store(dict[str, bytes]):
    """What of torch's store is used here."""

    def check(self, names: list[str]) -> bool:
        return all(name in self for name in names)

    def set(self, name: str, value: str) -> None:
        self[name] = value.encode()

    def get(self, name: str) -> bytes:  # type: ignore[override]
        return self[name]


def test_a_process_that_waits_hears_that_another_has_failed() -> None:
    store = Store()
    store.set("exit code", "2")
    with pytest.raises(EndedElsewhereError) as caught:
        Processes(1, 2, store).await_any(END)
    assert caught.value.exit_code == 2


def test_one_ctrl_c_that_comes_twice_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the terminal, and once more from the launcher; much later it is a second one."""
    from finetune.training import session
    from finetune.training.exact_trainer import StopWhenAsked

    monkeypatch.setenv("WORLD_SIZE", "2")
    stop, before = StopWhenAsked(), signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), session.finish_step_on_signal(stop):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
        assert stop.asked
        monkeypatch.setattr(session, "_SAME_SIGNAL_SECONDS", -1.0)
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
