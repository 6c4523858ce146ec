"""Torch's cache of CPU kernels is bounded before torch is loaded, and the bound is what keeps memory from growing."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from finetune.plan.kernel_cache import (
    BYTES_PER_KERNEL,
    KERNEL_CACHE_ENTRIES,
    SHAPES_PER_LENGTH,
    kernel_cache_bytes,
    limit_kernel_caches,
)

GROW = """
import psutil, torch
from finetune.plan.kernel_cache import limit_kernel_caches
if {limited}:
    limit_kernel_caches()
x = torch.randn(700, 64, dtype=torch.bfloat16)
weight = torch.randn(64, 64, dtype=torch.bfloat16)
torch.nn.functional.linear(x[:100], weight)
before = psutil.Process().memory_info().rss
for n_rows in range(100, 600):
    torch.nn.functional.linear(x[:n_rows], weight)
print(psutil.Process().memory_info().rss - before)
"""


def growth(*, limited: bool) -> int:
    clean = {name: value for name, value in os.environ.items() if not name.endswith("CACHE_CAPACITY")}
    done = subprocess.run(
        [sys.executable, "-c", GROW.format(limited=limited)],
        capture_output=True, text=True, env=clean, check=True, timeout=300,
    )  # fmt: skip
    return int(done.stdout)


def test_a_limited_cache_stops_growing() -> None:
    free = growth(limited=False)
    if free < 100 * BYTES_PER_KERNEL:
        pytest.skip("this processor keeps no kernels for bf16 products")
    assert growth(limited=True) < free / 2


def test_what_the_user_has_set_is_kept() -> None:
    environment = {"LRU_CACHE_CAPACITY": "7"}
    limit_kernel_caches(environment)
    assert environment["LRU_CACHE_CAPACITY"] == "7"
    assert environment["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == str(KERNEL_CACHE_ENTRIES)


def test_the_forecast_follows_the_limit() -> None:
    unlimited, limited = {}, {}  # type: dict[str, str], dict[str, str]
    limit_kernel_caches(limited)
    assert kernel_cache_bytes(environment=unlimited) == 1024 * BYTES_PER_KERNEL
    assert kernel_cache_bytes(environment=limited) == KERNEL_CACHE_ENTRIES * BYTES_PER_KERNEL
    assert kernel_cache_bytes(1, unlimited) == SHAPES_PER_LENGTH * BYTES_PER_KERNEL


def test_the_command_line_sets_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    from finetune.cli.main import main

    monkeypatch.delenv("LRU_CACHE_CAPACITY", raising=False)
    monkeypatch.setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
    with pytest.raises(SystemExit):
        main(["--version"])
    assert os.environ.pop("LRU_CACHE_CAPACITY") == str(KERNEL_CACHE_ENTRIES)
    assert os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == "64"
