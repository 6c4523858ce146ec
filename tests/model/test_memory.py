"""What is freed while a model is made goes back to the system, and no weight file stays mapped behind a quantized model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from finetune.model.load import load_model
from finetune.model.memory import leave_weight_files
from finetune.model.source import resolve_model

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="about glibc's heap and /proc")

# Blocks that come and go, each followed by a larger one that stays: growth of the resident set over what stays.
GROW = """
import contextlib, psutil
from finetune.model.memory import no_holes
block = b"x" * 30_000_000
del block  # from here on glibc keeps blocks of up to this size
before, kept = psutil.Process().memory_info().rss, []
with no_holes() if {held} else contextlib.nullcontext():
    for number in range(60):
        size = 500_000 + 20_000 * number
        passing = bytes([number]) * size
        kept.append(bytes([number]) * (size + 10_000))
        del passing
print((psutil.Process().memory_info().rss - before) / sum(map(len, kept)))
"""


def printed_by(script: str) -> float:
    """The number that a fresh process prints: the heap of this one has a history."""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=300
    )
    return float(done.stdout)


def growth(*, held: bool) -> float:
    return printed_by(GROW.format(held=held))


def test_blocks_in_passing_leave_no_holes_behind_what_stays() -> None:
    if growth(held=False) < 1.5:
        pytest.skip("this C library leaves no holes")
    assert growth(held=True) < 1.1


# Kept blocks of ever other sizes among passing ones, all freed after each round: growth over the most that was ever there.
ROUNDS = """
import psutil, random
from finetune.model.memory import keep_freed_memory, mapped_activations
keep_freed_memory()
draw, process, most, peak = random.Random(1), psutil.Process(), 0, 0
before = process.memory_info().rss
with mapped_activations({device!r}):
    for _ in range(30):
        kept, unit = [], draw.randrange(600_000, 2_600_000)
        for layer in range(20):
            passing = [bytes([1]) * (unit + 50_000 * layer)]
            kept.append(bytes([2]) * unit)
            passing.append(bytes([1]) * (2 * unit + 70_000 * layer))
            kept.append(bytes([2]) * 600_000)
            del passing
        most = max(most, sum(map(len, kept)))
        peak = max(peak, process.memory_info().rss - before)
print(peak / most)
"""


def peak_over_kept(device: str) -> float:
    return printed_by(ROUNDS.format(device=device))


def test_activations_of_ever_other_lengths_leave_no_holes_on_a_cpu() -> None:
    if peak_over_kept("cuda") < 1.2:
        pytest.skip("this C library leaves no holes")
    assert peak_over_kept("cpu") < 1.1


def mapped(folder: Path) -> bool:
    return any(str(folder) in line for line in Path("/proc/self/maps").read_text().splitlines())


def test_a_quantized_model_leaves_its_file_and_keeps_its_tied_head(tiny_model_folder: Path) -> None:
    model = load_model(resolve_model(str(tiny_model_folder)), quantize="nf4")
    assert not mapped(tiny_model_folder)
    plain = load_model(resolve_model(str(tiny_model_folder)))
    embedding = plain.get_input_embeddings().weight
    tied = embedding is plain.get_output_embeddings().weight
    before = {name: tensor.clone() for name, tensor in plain.state_dict().items()}
    leave_weight_files(plain)
    assert not mapped(tiny_model_folder)
    assert (plain.get_input_embeddings().weight is plain.get_output_embeddings().weight) == tied
    after: dict[str, Any] = plain.state_dict()
    assert all(tensor.equal(after[name]) for name, tensor in before.items())
    assert model.get_input_embeddings().weight.equal(embedding)


# Rounds of blocks as a batch of 400 tokens has them, below the usual threshold: what stays resident behind the last one.
SHORT = """
import psutil
from finetune.model.memory import keep_freed_memory, mapped_activations
keep_freed_memory()
process, small = psutil.Process(), []
before = process.memory_info().rss
with mapped_activations("cpu"):
    with mapped_activations("cpu", {block}):
        kept = []
        for _ in range(200):
            kept.append(bytes([1]) * 400_000)
            small.append(bytes([2]) * 4_000)
        del kept
    print((process.memory_info().rss - before) / 80_000_000)
"""


def test_a_short_batch_leaves_no_holes_either() -> None:
    if printed_by(SHORT.format(block=1 << 19)) < 0.5:
        pytest.skip("this C library leaves no holes")
    assert printed_by(SHORT.format(block=400_000)) < 0.1


# The threshold of the outer block is in force again behind an inner one: a large block that is freed is gone.
NESTED = """
import psutil
from finetune.model.memory import keep_freed_memory, mapped_activations
keep_freed_memory()
process = psutil.Process()
with mapped_activations("cpu"):
    with mapped_activations("cpu", 100_000):
        pass
    before = process.memory_info().rss
    kept, small = [], []
    for _ in range(20):
        kept.append(bytes([1]) * 4_000_000)
        small.append(bytes([2]) * 4_000)
    del kept
    print((process.memory_info().rss - before) / 80_000_000)
"""


def test_an_inner_threshold_ends_with_its_block() -> None:
    assert printed_by(NESTED) < 0.1
