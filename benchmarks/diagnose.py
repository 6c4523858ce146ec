"""Does the diagnosis name what was planted? A confusion table over real runs of a tiny model.

    python benchmarks/diagnose.py [--short] [--half building|held-out|both] [--jobs 4]

308 runs: 13 faults, 8 of each in either half, and 50 healthy runs in either half. The thresholds of
`finetune/doctor/diagnosis` were chosen on the building half (even seeds); the held-out half (odd seeds) says how right they
are. Targets: at least 95 % right, at most 2 % of the healthy runs with an alarm. `--short` makes 17 runs of the building half.
What is planted, and what of it is emulated, stands in planted_runs.py and planted_faults.py.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path

import torch
from planted_faults import FAULTS, N_PROMPT, SIZES, planned
from planted_runs import base_state, run
from results import table, write_section

from finetune.doctor.diagnosis import Diagnosis, diagnose
from finetune.telemetry.divergence import first_divergence
from finetune.telemetry.events import read_events

EACH, HEALTHY = 8, 50
SHORT_EACH, SHORT_HEALTHY = 1, 4
HALVES = ("building", "held-out")
RIGHT, FALSE_ALARMS = 0.95, 0.02


@dataclass
class Tally:
    """What one half came to. `named` counts poisoned runs whose named rows are all poisoned ones."""

    said: dict[str, Counter[str]] = field(default_factory=dict)
    right: int = 0
    n: int = 0
    false_alarms: int = 0
    healthy: int = 0
    poisoned: int = 0
    named: int = 0
    stopped: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


def seeds(fault: str, half: str, count: int) -> Iterator[int]:
    """Even seeds to build on, odd ones held out; no seed serves two faults."""
    start = 1000 * list(FAULTS).index(fault) + HALVES.index(half)
    yield from range(start, start + 2 * count, 2)


@dataclass(frozen=True)
class Made:
    """One run: what was planted and what is said of it."""

    fault: str
    seed: int
    first: Diagnosis
    poisoned: frozenset[str]
    is_stopped: bool


def make(task: tuple[str, int, str]) -> Made:
    """Make one run (fault, seed, folder) and read its curve."""
    fault, seed, folder = task
    torch.set_num_threads(1)
    plan, events_file = planned(fault, seed), Path(folder) / f"{seed}.jsonl"
    run(plan, events_file)
    events = read_events(events_file)
    losses = [float(event["loss"]) for event in events if event["event"] == "step"]
    poisoned = frozenset(plan.notes.get("rows", ()))
    return Made(fault, seed, diagnose(events)[0], poisoned, first_divergence(losses) is not None)


def count(tally: Tally, made: Made) -> None:
    """Add a run to the table."""
    fault, first = made.fault, made.first
    expected = FAULTS[fault].shape
    is_right = not first.is_alarm if expected == "healthy" else first.shape == expected
    tally.n += 1
    tally.right += is_right
    tally.said.setdefault(fault, Counter())[first.shape] += 1
    if expected == "healthy":
        tally.healthy += 1
        tally.false_alarms += first.is_alarm
    if first.shape == expected == "recurring_spikes":
        tally.poisoned += 1
        tally.named += set(first.rows) <= made.poisoned
    if made.is_stopped:
        tally.stopped[fault] += 1
    if not is_right:
        tally.wrong.append(f"seed {made.seed}, {fault}: {first.shape} ({first.why})")


def _missed(is_missed: bool) -> str:
    return ", missed" if is_missed else ""


def report(half: str, tally: Tally) -> list[str]:
    """The confusion table of one half in words."""
    rows = [
        [fault, FAULTS[fault].shape, ", ".join(f"{shape} {count}" for shape, count in said.most_common())]
        for fault, said in tally.said.items()
    ]
    share, alarms = tally.right / tally.n, tally.false_alarms / max(tally.healthy, 1)
    stopped = ", ".join(f"{fault} {count}" for fault, count in tally.stopped.items()) or "none"
    return [
        f"**{half} half**: {tally.right} of {tally.n} right ({share:.1%}, target {RIGHT:.0%}{_missed(share < RIGHT)}); {tally.false_alarms} false alarms on "
        f"{tally.healthy} healthy runs ({alarms:.1%}, target {FALSE_ALARMS:.0%}{_missed(alarms > FALSE_ALARMS)}).",
        "",
        *table(["planted", "should be", "diagnosed, runs"], rows),
        "",
        f"Rows named are poisoned ones only: {tally.named} of {tally.poisoned} runs. Runs that `train.on_divergence` would have "
        f"ended: {stopped}.",
        *(["", *(f"- wrong: {line}" for line in tally.wrong)] if tally.wrong else []),
        "",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--short", action="store_true", help="17 runs of the building half; RESULTS.md stays."
    )
    parser.add_argument("--half", choices=(*HALVES, "both"), default="both")
    parser.add_argument("--jobs", type=int, default=1, help="Processes; runs do not depend on their number.")
    arguments = parser.parse_args()
    halves = HALVES if arguments.half == "both" else (arguments.half,)
    each, healthy = (SHORT_EACH, SHORT_HEALTHY) if arguments.short else (EACH, HEALTHY)
    lines = [
        "Tiny language models (width 16-32, 1-2 layers) tuned for 80-150 steps with one fault planted; fp16 is emulated by rounding "
        "scaled gradients, leaking throughput is real work measured in CPU time. 'Healthy' is right when nothing is alarmed: a "
        "plateau or steps at epochs are shapes of healthy runs.",
        "",
    ]
    for half in halves[:1] if arguments.short else halves:
        tally = Tally()
        for width, layers in SIZES:
            base_state(width, layers, N_PROMPT)  # before processes are forked, which then have them all
        with (
            tempfile.TemporaryDirectory() as folder,
            ProcessPoolExecutor(arguments.jobs, mp_context=get_context("fork")) as pool,
        ):
            tasks = [
                (fault, seed, folder)
                for fault in FAULTS
                for seed in seeds(fault, half, healthy if fault == "healthy" else each)
            ]
            for place, made in enumerate(pool.map(make, tasks), start=1):
                count(tally, made)
                if place == len(tasks) or tasks[place][0] != made.fault:
                    print(f"{half}: {made.fault}: {dict(tally.said[made.fault])}", flush=True)
        lines += report(half, tally)
    if arguments.short or arguments.half == "building":  # what was built on says nothing of how right it is
        print("\n".join(lines))
    else:
        write_section("Diagnosis: planted faults", lines)


if __name__ == "__main__":
    main()
