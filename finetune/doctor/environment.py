"""The machine: versions of packages, the GPU and its driver, room on the disk."""

from __future__ import annotations

import importlib.metadata
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from finetune.doctor.finding import Finding, fault, ok, warning
from finetune.paths import shipped_root
from finetune.units import format_bytes

PACKAGE = "finetune-pipeline"
CONSTRAINTS = "constraints.txt"
_SHOWN = 5
_NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
# What an optimizer keeps beside a trained fp32 weight in a checkpoint: two moments.
_CHECKPOINT_BYTES, _RESULT_BYTES = 12, 4
_PLENTY = 2.0


@dataclass(frozen=True, slots=True)
class Machine:
    """What torch sees of the accelerator. `driver`: whether an NVIDIA driver is loaded; `built_for`: torch's CUDA version."""

    driver: bool
    built_for: str | None
    devices: tuple[str, ...]
    has_bf16: bool


def installed_versions() -> dict[str, str]:
    """Canonical name -> version of every installed package."""
    return {
        canonicalize_name(one.metadata["Name"]): one.version
        for one in importlib.metadata.distributions()
        if one.metadata["Name"]
    }


def check_versions(installed: Mapping[str, str], required: Sequence[str] | None = None) -> Iterator[Finding]:
    """Whether every package that this one needs is there in a version that it allows."""
    if required is None:
        required = importlib.metadata.requires(PACKAGE) or []
    needed = [Requirement(text) for text in required]
    needed = [one for one in needed if one.marker is None or one.marker.evaluate({"extra": ""})]
    wrong = 0
    for one in needed:
        found = installed.get(canonicalize_name(one.name))
        if found is not None and one.specifier.contains(found, prereleases=True):
            continue
        wrong += 1
        has = f"{found} is installed" if found else "it is not installed"
        yield fault(
            "versions",
            f"{one.name} has to be {one.specifier or 'there'}, {has}",
            f"pip install '{one}'",
            where=sys.prefix,
        )
    if not wrong:
        yield ok("versions", f"{len(needed)} packages are in the versions that this one needs")


def check_pins(installed: Mapping[str, str], pinned: str | None = None) -> Iterator[Finding]:
    """Whether versions are those that were tested together (constraints.txt of a checkout); others may work as well."""
    path = shipped_root() / CONSTRAINTS
    if pinned is None:
        if not path.is_file():
            return
        pinned = path.read_text(encoding="utf-8")
    lines = [line.partition("#")[0].strip() for line in pinned.splitlines()]
    pairs = [line.split("==") for line in lines if "==" in line]
    there = [(name, version, installed.get(canonicalize_name(name))) for name, version in pairs]
    other = [
        f"{name} {found} (tested: {version})"
        for name, version, found in there
        if found and Version(found).public != Version(version).public
    ]
    if other:
        more = f" and {len(other) - _SHOWN} more" if len(other) > _SHOWN else ""
        yield warning(
            "tested versions",
            f"other than tested: {', '.join(other[:_SHOWN])}{more}",
            f"pip install -c {CONSTRAINTS} -e .",
            where=sys.prefix,
        )
    else:
        yield ok("tested versions", "packages are in the versions that were tested together")


def read_machine() -> Machine:
    """The accelerator as torch sees it."""
    there = torch.cuda.is_available()
    names = (
        tuple(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
        if there
        else ()
    )
    return Machine(
        _NVIDIA_DRIVER.exists(), torch.version.cuda, names, there and torch.cuda.is_bf16_supported()
    )


def check_accelerator(machine: Machine, dtype: str) -> Finding:
    """Whether a GPU that is there can be used, in the recipe's type."""
    name = "accelerator"
    if machine.devices:
        if dtype == "bf16" and not machine.has_bf16:
            return fault(
                name,
                f"{machine.devices[0]} has no bf16",
                "set model.dtype: fp16",
                where="model.dtype",
                changes={"model.dtype": "fp16"},
            )
        return ok(name, f"{len(machine.devices)} × {machine.devices[0]}, CUDA {machine.built_for}")
    if machine.driver and machine.built_for is None:
        return warning(
            name,
            "an NVIDIA driver is loaded, but this torch was built without CUDA, so everything runs on the CPU",
            "install torch's build for your CUDA version",
            where=f"torch {torch.__version__}",
        )
    if machine.driver:  # which a container without its GPUs sees too, so that it need not be wrong
        return warning(
            name,
            f"an NVIDIA driver is loaded, but torch (built for CUDA {machine.built_for}) sees no GPU: everything runs on the CPU",
            "if there should be one: give it to the container, look at CUDA_VISIBLE_DEVICES, and compare the driver's CUDA "
            "version in `nvidia-smi` with torch's",
            where=f"torch {torch.__version__}",
        )
    return ok(name, "no GPU; everything runs on the CPU")


def check_disk(
    folder: Path, n_trainable: int, kept_checkpoints: int, *, free_bytes: int | None = None
) -> Finding:
    """Whether the checkpoints (weights and two moments in fp32, and one being written) and the result have room."""
    below = next(path for path in [folder.absolute(), *folder.absolute().parents] if path.exists())
    free = shutil.disk_usage(below).free if free_bytes is None else free_bytes
    needed = n_trainable * (_CHECKPOINT_BYTES * (kept_checkpoints + 1) + _RESULT_BYTES)
    said = f"{folder} has {format_bytes(free)} free; checkpoints and the result need about {format_bytes(needed)}"
    remedy = "free some space, lower train.keep_checkpoints, or set FINETUNE_RUNS to another disk"
    if free < needed:
        return fault("disk", said, remedy, where=str(folder))
    if free < _PLENTY * needed:
        return warning("disk", said, remedy, where=str(folder))
    return ok("disk", said)
