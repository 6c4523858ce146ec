"""The matrix kernels that torch keeps on CPUs: one for every shape it has seen, which is memory that a run grows into.

In bf16, oneDNN generates code for each shape of a product and keeps 1,024 of them; torch keeps as many handles. Packs of ever
other lengths fill both. Measured on AVX512-BF16 cores with torch 2.13: 0.67 MB a shape, 0.69 GB when full, no growth in fp32;
a new kernel costs about a millisecond. One length needs some 25 shapes, which every layer uses again, so a small cache
costs nothing.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping

KERNEL_CACHE_ENTRIES = 128
BYTES_PER_KERNEL = 670_000
SHAPES_PER_LENGTH = 25

_DEFAULT_ENTRIES = 1024
_LIMITS = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")


def limit_kernel_caches(environment: MutableMapping[str, str] = os.environ) -> None:
    """Keep 128 kernels in place of 1,024, unless the user has said how many. Takes effect only before torch's first product."""
    for name in _LIMITS:
        environment.setdefault(name, str(KERNEL_CACHE_ENTRIES))


def kernel_cache_bytes(
    distinct_lengths: int | None = None, environment: MutableMapping[str, str] = os.environ
) -> int:
    """Bytes of the kernels that a bf16 run keeps, whose forward passes have `distinct_lengths` lengths (None: many)."""
    limits = [environment.get(name, "") for name in _LIMITS]
    entries = max(int(limit) if limit.isdigit() else _DEFAULT_ENTRIES for limit in limits)
    if distinct_lengths is not None:
        entries = min(entries, distinct_lengths * SHAPES_PER_LENGTH)
    return entries * BYTES_PER_KERNEL
