"""Start the processes of a run through accelerate's launcher, and end with the exit code of the one that has something to say.

`accelerate launch` itself ends every run whose processes do not all end with 0 in a traceback, also one whose exit code
is its verdict.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from finetune.errors import ExitCode, UserError, did_you_mean
from finetune.paths import shipped_root
from finetune.training.processes import FAILURE_FILE
from finetune.training.sharding import check_sharding, check_zero

_SUPPORTED = {"NO", "MULTI_GPU", "MULTI_CPU", "FSDP", "DEEPSPEED"}
# A step and a checkpoint have to end within it after Ctrl-C; torch's default is 30.
_SHUTDOWN_SECONDS = "600"


def find_launch(name: str) -> Path:
    """An accelerate config by path, or by the name of a shipped one (recipes/launch). Raises UserError."""
    folder = shipped_root() / "recipes" / "launch"
    bases = (Path(name).expanduser(), shipped_root() / name, folder / name, folder / f"{name}.yaml")
    found = next((path for path in bases if path.is_file()), None)
    if found is None:
        known = sorted(path.stem for path in folder.glob("*.yaml"))
        raise UserError(f"no such launch config: '{name}'", where="--launch", fix=did_you_mean(name, known))
    return found


def read_launch(path: Path, overrides: Sequence[str] = ()) -> Any:
    """accelerate's own reading of its config, with keys overridden as `key=value`. Raises UserError, which names the key."""
    from accelerate.commands.config.config_args import ClusterConfig

    parser = YAML(typ="safe", pure=True)
    try:
        content = parser.load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, YAMLError) as error:
        raise UserError(f"it cannot be read: {error}", where=str(path)) from None
    if not isinstance(content, dict) or "distributed_type" not in content:
        raise UserError(
            "it is no accelerate config: it has no distributed_type",
            where=str(path),
            fix="start from a file of recipes/launch, or make one with `accelerate config`",
        )
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals:
            raise UserError(f"'{override}' is not key=value", where="--launch-set")
        content[key] = parser.load(value)
    known = ClusterConfig.__dataclass_fields__
    for key in content:
        if key not in known:
            raise UserError(f"unknown key '{key}'", where=str(path), fix=did_you_mean(key, known))
    try:
        config = ClusterConfig(**ClusterConfig.process_config(content))
    except ValueError as error:
        raise UserError(str(error), where=str(path)) from None
    _check(config, path)
    return config


def _check(config: Any, path: Path) -> None:
    import torch

    kind = str(config.distributed_type.value)
    if config.compute_environment.value != "LOCAL_MACHINE" or kind not in _SUPPORTED:
        raise UserError(
            f"distributed_type {kind} on {config.compute_environment.value} is not supported",
            where=str(path),
            fix=f"one of {', '.join(sorted(_SUPPORTED))} with compute_environment: LOCAL_MACHINE",
        )
    if config.num_processes < 1:
        raise UserError("num_processes is missing", where=str(path), fix="--launch-set num_processes=2")
    if config.num_machines > 1 and not config.main_process_ip:
        raise UserError(
            f"{config.num_machines} machines need to know where the first one is",
            where=str(path),
            fix="--launch-set main_process_ip=HOST --launch-set machine_rank=N, another N on every machine",
        )
    on_cuda = torch.cuda.is_available()
    version = str(config.fsdp_config.get("fsdp_version", 1))
    if kind in ("FSDP", "DEEPSPEED"):
        check_sharding(
            "deepspeed" if kind == "DEEPSPEED" else "fsdp2" if version == "2" else "fsdp1", on_cuda
        )
    if kind == "DEEPSPEED":
        check_zero(config.deepspeed_config)
    if on_cuda and (config.use_cpu or kind == "MULTI_CPU"):
        raise UserError(
            "training on the CPU of a machine with GPUs is asked for",
            where=str(path),
            why="the processes would take the GPUs all the same",
            fix="hide them: CUDA_VISIBLE_DEVICES= finetune run …",
        )
    here = config.num_processes // config.num_machines
    if on_cuda and here > torch.cuda.device_count():
        raise UserError(
            f"{here} processes for {torch.cuda.device_count()} GPUs",
            where=str(path),
            fix=f"--launch-set num_processes={torch.cuda.device_count() * config.num_machines}",
        )


def launch_processes(name: str, overrides: Sequence[str], arguments: Sequence[str]) -> int:
    """Run `finetune <arguments>` in the processes of a launch config; returns the exit code of the run.

    Raises UserError for a config that cannot be used; KeyboardInterrupt after Ctrl-C, once all processes have ended.
    """
    path = find_launch(name)
    config = read_launch(path, overrides)
    if config.num_processes == 1:
        raise UserError("one process needs no launcher", where=str(path), fix="leave out --launch")
    options = _options(config)
    with tempfile.TemporaryDirectory(prefix="finetune-launch-") as folder:
        if overrides:
            path = Path(folder) / path.name
            config.to_yaml_file(str(path))
        failure = Path(folder) / "failure"
        os.environ[FAILURE_FILE] = str(failure)
        os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", _SHUTDOWN_SECONDS)
        try:
            return _launch(["--config_file", str(path), *options], arguments, failure)
        finally:
            del os.environ[FAILURE_FILE]


def _options(config: Any) -> list[str]:
    """Options of `accelerate launch` that the config leaves open."""
    import psutil
    import torch

    options = []
    if config.main_process_port is None and config.num_machines == 1:
        options += ["--main_process_port", "0"]  # any free one: two runs on one machine do not meet
    if not torch.cuda.is_available():
        if config.distributed_type.value != "DEEPSPEED":
            options.append("--multi_gpu")  # without it accelerate starts a single process on the CPU
        if "OMP_NUM_THREADS" not in os.environ:
            cores = psutil.cpu_count(logical=False) or 1
            here = config.num_processes // config.num_machines
            options += ["--num_cpu_threads_per_process", str(max(cores // here, 1))]
    return options


def _launch(options: list[str], arguments: Sequence[str], failure: Path) -> int:
    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)
    known = launch_command_parser().parse_args([*options, "-m", "finetune.cli.main", *arguments])
    try:
        launch_command(known)
    except SignalException:
        raise KeyboardInterrupt from None
    except ChildFailedError as error:
        if failure.is_file():  # told already, by the process that failed first
            return int(failure.read_text(encoding="utf-8"))
        _, first = error.get_first_failure()
        if first.exitcode > 0:
            return int(first.exitcode)
        print(
            f"error: process {first.local_rank} was killed by signal {-first.exitcode}\n"
            "  why: by the system when memory runs out, or by somebody\n"
            "  fix: run the same command again; training continues from the last checkpoint",
            file=sys.stderr,
        )
        return int(ExitCode.INTERRUPTED)
    return int(ExitCode.DONE)
