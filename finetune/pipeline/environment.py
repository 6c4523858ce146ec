"""What a run ran on: versions, processor, memory, accelerator. Written into the run folder for whoever repeats it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from pathlib import Path
from typing import Any

import psutil
import torch

from finetune import __version__

_PACKAGES = (
    "torch", "transformers", "trl", "peft", "accelerate", "datasets", "bitsandbytes", "tokenizers", "safetensors",
    "numpy", "scipy",
)  # fmt: skip


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def describe_environment() -> dict[str, Any]:
    """Versions and hardware, as plain JSON values; sizes in bytes."""
    devices = [
        {"name": torch.cuda.get_device_name(index), "memory_bytes": torch.cuda.mem_get_info(index)[1]}
        for index in range(torch.cuda.device_count())
    ]
    return {
        "finetune": __version__,
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_bytes": psutil.virtual_memory().total,
        "accelerators": devices,
        "cuda": torch.version.cuda,
        "packages": {name: importlib.metadata.version(name) for name in _PACKAGES},
    }
