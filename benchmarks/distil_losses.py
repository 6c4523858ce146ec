"""The distillation loss beside the one that holds all logits: memory that it adds, time, and whether both are the same.

    python benchmarks/distil_losses.py [--targets 1024] [--repeats 5]

Each measurement is a process of its own: student and teacher states and heads are made first (49,152 tokens, 576 wide, bf16, as
in training), then loss and gradient of the student's states. Its memory is the highest resident set over that before.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from results import table, write_section
from torch import Tensor

from finetune.distil.cache.coding import keep_top_k
from finetune.distil.cache.measure import read_back
from finetune.distil.cache.write import coding_of
from finetune.distil.losses import chunked_distillation_loss
from finetune.distil.targets import TeacherTargets
from finetune.model.memory import release_memory
from finetune.telemetry.memory import current_memory_bytes, memory_basis, peak_memory_bytes, reset_peak_memory

VOCABULARY, WIDTH, K, TEMPERATURE = 49_152, 576, 64, 2.0
NAIVE, LIVE, CACHED = "all logits of both", "ours, live teacher", "ours, cached top 64"


def naive(hidden: Tensor, head: Tensor, teacher: TeacherTargets) -> Tensor:
    """The textbook: both sets of logits, both softmaxes, `kl_div`."""
    logits = torch.nn.functional.linear(hidden, head).float()
    with torch.no_grad():
        assert teacher.hidden is not None and teacher.head is not None
        wanted = torch.nn.functional.linear(teacher.hidden, teacher.head).float()
        log_p = torch.log_softmax(wanted / TEMPERATURE, dim=-1)
    log_q = torch.log_softmax(logits / TEMPERATURE, dim=-1)
    return torch.nn.functional.kl_div(log_q, log_p, reduction="batchmean", log_target=True) * TEMPERATURE**2


def ours(hidden: Tensor, head: Tensor, teacher: TeacherTargets) -> Tensor:
    ids = torch.zeros(len(hidden), dtype=torch.long, device=hidden.device)
    return chunked_distillation_loss(
        hidden, head, teacher, ids, kind="forward_kl", temperature=TEMPERATURE
    ).loss


def tensors(n_targets: int) -> tuple[Tensor, Tensor, TeacherTargets]:
    """Student states and head, and a live teacher near it: what both have learnt is alike."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    states, head = random(n_targets, WIDTH), 0.5 * random(VOCABULARY, WIDTH)  # probable tokens are few
    other = states + 0.2 * random(n_targets, WIDTH)
    student, teacher, head = (one.bfloat16().to(device) for one in (states, other, head))
    return student, head, TeacherTargets.live(teacher, head.clone())


def cached(teacher: TeacherTargets) -> TeacherTargets:
    """What a cache would give of the same teacher, made chunk by chunk."""
    coding = coding_of(k=K, vocabulary=VOCABULARY, temperatures=[TEMPERATURE])
    parts = []
    for start in range(0, len(teacher), 64):
        logits = teacher.part(start, start + 64).logits
        assert logits is not None
        parts.append(read_back(keep_top_k(logits, coding), coding, TEMPERATURE))
    joined = [torch.cat([getattr(part, name) for part in parts]) for name in ("ids", "logits", "logsumexp")]
    return TeacherTargets.top_k(*joined)


def measure(way: str, n_targets: int) -> dict[str, float]:
    """In this process: bytes added, seconds, loss, and the size of the gradient."""
    hidden, head, teacher = tensors(n_targets)
    if way == CACHED:
        teacher = cached(teacher)
    loss: Callable[[Tensor, Tensor, TeacherTargets], Tensor] = naive if way == NAIVE else ours
    loss(
        hidden[:8].clone().requires_grad_(), head, teacher_of(teacher, 8)
    ).backward()  # libraries load, threads start
    hidden.requires_grad_()
    release_memory()
    before = current_memory_bytes()
    reset_peak_memory()
    start = time.perf_counter()
    value = loss(hidden, head, teacher)
    value.backward()
    found = float(value.detach())  # waits for the device
    seconds = time.perf_counter() - start
    assert hidden.grad is not None
    return {
        "bytes": peak_memory_bytes() - before,
        "seconds": seconds,
        "loss": found,
        "gradient": float(hidden.grad.float().norm()),
    }


def teacher_of(teacher: TeacherTargets, n: int) -> TeacherTargets:
    """Its first n targets, in the same form."""
    return teacher.part(0, n) if teacher.is_top_k else TeacherTargets.live(teacher.hidden[:n], teacher.head)  # type: ignore[index,arg-type]


def in_processes(way: str, options: argparse.Namespace) -> list[dict[str, float]]:
    found = []
    for _ in range(options.repeats):
        command = [sys.executable, __file__, "--targets", str(options.targets), "--way", way]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        found.append(json.loads(done.stdout.splitlines()[-1]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--targets", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--way", help="measure this one in this process")
    options = parser.parse_args()
    if options.way:
        print(json.dumps(measure(options.way, options.targets)))
        return
    results = {way: in_processes(way, options) for way in (NAIVE, LIVE, CACHED)}
    middle = {
        way: {name: statistics.median(one[name] for one in found) for name in found[0]}
        for way, found in results.items()
    }
    plain = middle[NAIVE]
    lines = table(
        ["loss", "memory it adds", "of the naive", "seconds", "loss, nats", "gradient's size"],
        [
            [
                way,
                f"{one['bytes'] / 1e6:.0f} MB",
                f"{one['bytes'] / plain['bytes']:.2f}",
                f"{one['seconds']:.2f}",
                f"{one['loss']:.4f}",
                f"{one['gradient']:.4e}",
            ]
            for way, one in middle.items()
        ],
    )
    basis = {"rss": "the resident set", "cuda": "the allocator"}[memory_basis()]
    lines += [
        "",
        f"{options.targets:,} targets, a vocabulary of {VOCABULARY:,}, states of {WIDTH}, bf16; forward KL at temperature "
        f"{TEMPERATURE:g} and its gradient by the student's states, head frozen; medians of {options.repeats} processes, the peak of {basis}.",
        f"Aim: at most 0.3 of the naive memory. The cached loss is a lower bound of the others: all but the top {K} tokens are "
        "one outcome.",
    ]
    write_section("Distillation losses", lines)


if __name__ == "__main__":
    main()
