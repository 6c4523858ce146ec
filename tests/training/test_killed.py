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
    folder: Path, *, inside: int, writes: int, moments: int, seed: int
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What the whole training left, and what each killed one did."""
    numbers = [str(number) for number in (inside, writes, moments, seed)]
    done = subprocess.run(
        [sys.executable, str(KILLER), str(folder), *numbers],
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
@pytest.mark.timeout(3600)  # twenty trainings each; a busy machine needs ten times what an idle one does
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_killed_at_ten_of_thirty_random_instants_it_ends_in_the_same_bytes(seed: int, tmp_path: Path) -> None:
    whole, killed = kill(tmp_path, inside=3, writes=4, moments=3, seed=seed)
    assert len(killed) == 10
    on_a_write, inside = killed[:7], killed[:3]
    assert [one["codes"][0] for one in on_a_write] == [-9] * 7  # a random moment may come after the end
    assert all("checkpoints/.step-" in one["at"] for one in inside), [one["at"] for one in killed]
    same_as_whole(whole, killed)
