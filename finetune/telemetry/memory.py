"""Peak memory of this process: resident set on CPU, allocator peak on CUDA."""

from __future__ import annotations

from pathlib import Path

import psutil
import torch

_CLEAR_REFS = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")
_RESET_PEAK = "5"


def reset_peak_memory() -> None:
    """Start a new peak. Linux only for the resident set; elsewhere the peak stays that of the whole process."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    try:
        _CLEAR_REFS.write_text(_RESET_PEAK)
    except OSError:  # not Linux, or a sandbox that forbids it
        return


def peak_memory_bytes() -> int:
    """Highest bytes since the last reset: CUDA allocator when there is a GPU, else resident set (VmHWM)."""
    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    try:
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return current_memory_bytes()


def current_memory_bytes() -> int:
    """Bytes now: CUDA allocated when there is a GPU, else resident set."""
    if torch.cuda.is_available():
        return int(torch.cuda.memory_allocated())
    return int(psutil.Process().memory_info().rss)


def memory_basis() -> str:
    """What `peak_memory_bytes` counts: 'cuda' or 'rss'."""
    return "cuda" if torch.cuda.is_available() else "rss"
