"""Does the diagnosis name what was planted? A confusion table over real runs of a tiny model.

    python benchmarks/diagnose.py [--short] [--half building|held-out|both]

308 runs: 13 faults, 8 of each in either half, and 50 healthy runs in either half. The thresholds of
`finetune/doctor/diagnosis` were chosen on the building half (even seeds); the held-out half (odd seeds) says how right they
are. Targets: at least 95 % right, at most 2 % of the healthy runs with an alarm. `--short` makes 17 runs of the building half.
What is planted, and what of it is emulated, stands in planted_runs.py and planted_faults.py.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from planted_faults import FAULTS, planted
from planted_runs import run
from results import table, write_section

from finetune.doctor.diagnosis import diagnose
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


def judge(tally: Tally, fault: str, seed: int, folder: Path) -> None:
    """Make one run and count what is said of it."""
    plan, events_file = planted(fault, seed), folder / f"{seed}.jsonl"
    run(plan, events_file)
    events = read_events(events_file)
    first = diagnose(events)[0]
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
        tally.named += set(first.rows) <= set(plan.notes["rows"])
    if first_divergence([float(event["loss"]) for event in events if event["event"] == "step"]) is not None:
        tally.stopped[fault] += 1
    if not is_right:
        tally.wrong.append(f"seed {seed}, {fault}: {first.shape} ({first.why})")


def report(half: str, tally: Tally, seconds: float) -> list[str]:
    """The confusion table of one half in words."""
    rows = [
        [fault, FAULTS[fault].shape, ", ".join(f"{shape} {count}" for shape, count in said.most_common())]
        for fault, said in tally.said.items()
    ]
    share, alarms = tally.right / tally.n, tally.false_alarms / max(tally.healthy, 1)
    stopped = ", ".join(f"{fault} {count}" for fault, count in tally.stopped.items()) or "none"
    return [
        f"**{half} half**: {tally.right} of {tally.n} right ({share:.1%}, target {RIGHT:.0%}); {tally.false_alarms} false alarms on "
        f"{tally.healthy} healthy runs ({alarms:.1%}, target {FALSE_ALARMS:.0%}); {seconds / tally.n:.1f} s a run.",
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
    arguments = parser.parse_args()
    halves = HALVES if arguments.half == "both" else (arguments.half,)
    each, healthy = (SHORT_EACH, SHORT_HEALTHY) if arguments.short else (EACH, HEALTHY)
    torch.set_num_threads(1)
    lines = [
        "Tiny language models (width 16-32, 1-2 layers) tuned for 80-150 steps with one fault planted; fp16 is emulated by rounding "
        "scaled gradients, leaking throughput is real work measured in CPU time. 'Healthy' is right when nothing is alarmed: a "
        "plateau or steps at epochs are shapes of healthy runs.",
        "",
    ]
    for half in halves[:1] if arguments.short else halves:
        tally, start = Tally(), time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            for fault in FAULTS:
                for seed in seeds(fault, half, healthy if fault == "healthy" else each):
                    judge(tally, fault, seed, Path(folder))
                print(f"{half}: {fault}: {dict(tally.said[fault])}", flush=True)
        lines += report(half, tally, time.monotonic() - start)
    if arguments.short:
        print("\n".join(lines))
    else:
        write_section("Diagnosis: planted faults", lines)


if __name__ == "__main__":
    main()
