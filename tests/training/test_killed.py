"""Trainings that kill -9 ended at random instants, also in the middle of writing a checkpoint, end in the same bytes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

KILLER = Path(__file__).parent / "several" / "killer.py"


def kill(
    folder: Path, *, writes: int, moments: int, seed: int
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What the whole training left, and what each killed one did."""
    done = subprocess.run(
        [sys.executable, str(KILLER), str(folder), str(writes), str(moments), str(seed)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    first, *others = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return first["whole"], others


def same_as_whole(whole: dict[str, Any], killed: list[dict[str, Any]]) -> None:
    for one in killed:
        assert one["codes"][1] == 0, (one["at"], one["said"])
        for name in ("adapter", "steps", "checkpoints"):
            assert one[name] == whole[name], (one["at"], name)


@pytest.mark.slow
def test_killed_at_thirty_random_instants_it_ends_in_the_same_bytes(tmp_path: Path) -> None:
    whole, killed = kill(tmp_path, writes=22, moments=8, seed=0)
    assert len(killed) == 30
    assert (
        sum(one["codes"][0] == -9 for one in killed) >= 22
    )  # all that fall on a write; a moment may come after the end
    inside = [one["at"] for one in killed if "checkpoints/.step-" in one["at"]]
    assert len(inside) >= 3, [one["at"] for one in killed]
    same_as_whole(whole, killed)
