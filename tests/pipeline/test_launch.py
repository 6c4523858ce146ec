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


def launched(
    project: Any, *arguments: str, launch: str = "ddp_2", **environment: str
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "finetune.cli.main", "run", str(project.recipe)]
    return subprocess.run(
        [*command, "--launch", f"recipes/launch/{launch}.yaml", *arguments],
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


@pytest.mark.slow
def test_a_whole_run_under_deepspeed_is_that_of_one_process(project: Any) -> None:
    """The weights are spread, trained, gathered and saved, then evaluated by the first process alone."""
    pytest.importorskip(
        "deepspeed", reason="DeepSpeed is not installed: pip install 'finetune-pipeline[deepspeed]'"
    )
    two = launched(project, "--launch-set", "num_processes=2", "--json", launch="zero3_8")
    assert "run" in two.stdout, two.stderr[-3000:]
    answer = json.loads(two.stdout)
    assert two.returncode == answer["exit_code"]
    one = project.run(run_dir=project.folder / "one")
    expected = load_file(one.folder / "adapter/adapter_model.safetensors")
    found = load_file(Path(answer["run"]) / "adapter/adapter_model.safetensors")
    assert expected.keys() == found.keys()
    for name, tensor in found.items():
        assert (tensor - expected[name]).abs().max() < 1e-3, name


def test_shipped_configs_are_what_accelerate_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    monkeypatch.setattr("finetune.training.sharding.is_deepspeed_installed", lambda: True)
    here = ["machine_rank=1", "main_process_ip=10.0.0.1"]
    for path in sorted((shipped_root() / "recipes" / "launch").glob("*.yaml")):
        config = read_launch(find_launch(path.stem), here)
        name, _, count = path.stem.rpartition("_")
        machines, _, each = count.rpartition("x")
        assert config.num_machines == int(machines or 1)
        assert config.num_processes == int(machines or 1) * int(each)
        kinds = {"ddp": "MULTI_GPU", "fsdp2": "FSDP", "zero2": "DEEPSPEED", "zero3": "DEEPSPEED"}
        kind = kinds[name.removesuffix("_offload")]
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


@pytest.mark.parametrize("name", ["zero2_8", "zero3_8", "zero3_offload_8", "zero3_2x8"])
def test_deepspeeds_own_loader_takes_the_zero_configs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the file through accelerate's variables and plugin into DeepSpeed's reader, with what a trainer fills in."""
    pytest.importorskip(
        "deepspeed", reason="DeepSpeed is not installed: pip install 'finetune-pipeline[deepspeed]'"
    )
    import torch
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils import DeepSpeedPlugin
    from accelerate.utils.launch import prepare_deepspeed_cmd_env
    from deepspeed.runtime.config import DeepSpeedConfig

    from finetune.training.sharding import check_zero, zero_of_environment
    from finetune.training.zero import settle_zero

    path = shipped_root() / "recipes" / "launch" / f"{name}.yaml"
    options = ["--config_file", str(path), "--main_process_port", "0", "--machine_rank", "0", "-m", "x"]
    parsed = launch_command_parser().parse_args(options)
    known, defaults, _ = _validate_launch_command(parsed)
    known.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config)
    _, environment = prepare_deepspeed_cmd_env(known)
    for key, value in environment.items():
        if key.startswith("ACCELERATE_"):
            monkeypatch.setenv(key, value)
    check_zero(zero_of_environment(environment))
    plugin = DeepSpeedPlugin()
    assert plugin.zero3_init_flag is False
    plugin.fill_match("gradient_accumulation_steps", gradient_accumulation_steps=2)
    settle_zero(plugin, torch.bfloat16, 0.5)
    sizes = {"train_micro_batch_size_per_gpu": 1, "train_batch_size": 2}
    read = DeepSpeedConfig(plugin.deepspeed_config | sizes)
    assert int(read.zero_config.stage) == int(name[4])
    assert (read.zero_config.offload_optimizer.device == "cpu") is ("offload" in name)
    assert read.gradient_clipping == 0.5
    assert read.torch_autocast_enabled and read.torch_autocast_dtype == torch.bfloat16
    assert not read.bfloat16_config.enabled and not read.float16_config.enabled


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
        (
            "distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config: {zero_stage: 1}\n",
            [],
            "zero_stage: 1 is not supported",
        ),
        (
            "distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config: {zero_stage: 3}\n",
            [],
            "zero3_init_flag: true is not supported",
        ),
        (
            "distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config: {zero_stage: 2, gradient_clipping: 2.0}\n",
            [],
            "gradient_clipping: 2.0 is not supported",
        ),
        (
            "distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config: {deepspeed_config_file: my.json}\n",
            [],
            "deepspeed_config_file: my.json is not supported",
        ),
        ("[", [], "cannot be read"),
    ],
)
def test_a_config_that_cannot_be_used_is_refused_before_a_process_starts(
    content: str, overrides: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("finetune.training.sharding.is_deepspeed_installed", lambda: True)
    path = tmp_path / "launch.yaml"
    path.write_text(content)
    with pytest.raises(UserError, match=message):
        read_launch(path, overrides)


def test_deepspeed_that_is_not_installed_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("finetune.training.sharding.is_deepspeed_installed", lambda: False)
    with pytest.raises(UserError, match="DeepSpeed is not installed") as caught:
        read_launch(find_launch("zero2_8"), ["num_processes=2"])
    assert "finetune-pipeline[deepspeed]" in caught.value.faults[0].fix


def test_the_nearest_shipped_config_is_named() -> None:
    with pytest.raises(UserError, match=r"did you mean 'fsdp2_8'\?"):
        find_launch("fsdp_8")


ZERO = {"ACCELERATE_USE_DEEPSPEED": "true"}


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
        (ZERO, {"train": {"optimizer": "ademamix"}}, "train.optimizer"),
        (ZERO, {"train": {"gradient_checkpointing": "selective"}}, "train.gradient_checkpointing"),
        (ZERO, {"model": {"id": "t", "quantize": "nf4"}}, "model.quantize"),
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
    stop, before = StopWhenAsked(), signal.default_int_handler
    outer = signal.signal(signal.SIGINT, before)  # a shell's background job is born deaf to Ctrl-C
    try:
        with pytest.raises(KeyboardInterrupt), session.finish_step_on_signal(stop):
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGTERM)
            assert stop.asked
            monkeypatch.setattr(session, "_SAME_SIGNAL_SECONDS", -1.0)
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is before
    finally:
        signal.signal(signal.SIGINT, outer)
