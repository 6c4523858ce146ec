"""The forecast itself: named terms that add up, and the allowances for the process and its allocator.

Those of the CPU were read off the allocator while a run trained, and are checked on others by
benchmarks/memory_forecast.py; those of CUDA are allowances.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from finetune.plan.architecture import Architecture

Device = Literal["cpu", "cuda"]

TERMS = (
    "weights",
    "quantization_constants",
    "master_copy",
    "adapters",
    "teacher",
    "gradients",
    "optimizer",
    "activations",
    "logits",
    "buffers",
    "kv_cache",
    "fragmentation",
    "kernel_cache",
    "process",
)

# Resident set of a process that has imported all of a run, measured its products and saved once, without weights: 180 MB of
# libraries, the rest objects on the heap, Python's own arenas, code and stacks (by mallinfo2 and /proc/self/status, while
# SmolLM2-135M was trained); and what bitsandbytes adds.
CPU_PROCESS_BYTES = 680_000_000
CPU_QUANTIZED_BYTES = 10_000_000
# Context, kernels and library workspaces of a CUDA process; an allowance, not seen by the allocator's own counters.
CUDA_PROCESS_BYTES = 600_000_000
# Freed blocks that CUDA's allocator keeps; what a CPU's keeps is in heap.py.
CUDA_FRAGMENTATION = 0.05


@dataclass(frozen=True, slots=True)
class Forecast:
    """Bytes on one device at the worst moment. `terms_bytes` adds up to `total_bytes`.

    `basis` says what a measurement has to count: 'rss' the resident set of the process, 'cuda' the device's memory.
    `moments_bytes` is what each moment takes by itself, without what the allocator keeps; the validation is one of them.
    """

    terms_bytes: dict[str, int]
    total_bytes: int
    basis: Literal["rss", "cuda"]
    moment: str
    n_parameters: int
    n_trainable: int
    host_bytes: int = 0
    assumptions: dict[str, str | int | float] = field(default_factory=dict)
    moments_bytes: dict[str, int] = field(default_factory=dict)

    @property
    def allocated_bytes(self) -> int:
        """What the tensors need, without the process and the allocator's slack: CUDA's `max_memory_allocated`."""
        outside = ("process", "fragmentation", "kernel_cache")
        return self.total_bytes - sum(self.terms_bytes[name] for name in outside)

    def to_dict(self) -> dict[str, Any]:
        """The run folder's forecast.json; `used_peak_bytes` is filled in after the run."""
        return {
            "terms_bytes": {name: size for name, size in self.terms_bytes.items() if size},
            "total_bytes": self.total_bytes,
            "used_peak_bytes": None,
            "basis": self.basis,
            "moment": self.moment,
            "moments_bytes": dict(self.moments_bytes),
            "host_bytes": self.host_bytes,
            "n_parameters": self.n_parameters,
            "n_trainable": self.n_trainable,
            "assumptions": dict(self.assumptions),
        }


def finish(
    terms: dict[str, int],
    *,
    device: Device,
    moment: str,
    architecture: Architecture,
    n_trainable: int,
    host_bytes: int,
    assumptions: dict[str, str | int | float],
    moments: Mapping[str, Mapping[str, int]] | None = None,
) -> Forecast:
    """Add the allowances to `terms` and total them; `terms` of a CPU have their fragmentation already."""
    on_cpu = device == "cpu"
    if on_cpu:
        quantized = terms["quantization_constants"] > 0
        terms["process"] = CPU_PROCESS_BYTES + (CPU_QUANTIZED_BYTES if quantized else 0)
    else:
        coming_and_going = sum(terms[name] for name in ("activations", "logits", "buffers", "kv_cache"))
        terms["fragmentation"] = round(CUDA_FRAGMENTATION * coming_and_going)
        terms["process"] = CUDA_PROCESS_BYTES
    return Forecast(
        terms_bytes={name: terms[name] for name in TERMS},
        total_bytes=sum(terms.values()),
        basis="rss" if on_cpu else "cuda",
        moment=moment,
        n_parameters=architecture.n_parameters,
        n_trainable=n_trainable,
        host_bytes=host_bytes,
        assumptions=assumptions,
        moments_bytes={
            name: sum({**terms, **one, "fragmentation": 0}.values()) for name, one in (moments or {}).items()
        },
    )
