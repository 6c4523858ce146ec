"""Giving memory back to the operating system between two large models."""

from __future__ import annotations

import ctypes
import gc
import sys


def release_memory() -> None:
    """Collect reference cycles and return freed heap pages; without it glibc keeps what the last model used."""
    gc.collect()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
