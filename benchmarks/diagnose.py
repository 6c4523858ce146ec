"""Does the diagnosis name what was planted? A confusion table over real runs of a tiny model.

    python benchmarks/diagnose.py [--short] [--half development|held-out] [--jobs 4] [--keep FOLDER] [--minutes 8]

456 runs of the held-out half: 13 faults, 12 of each, and 300 healthy runs, enough to show at most 2 % false alarms. The rules of
`finetune/doctor/diagnosis` were made on runs of other seeds (below 350 within each fault's thousand); these, from 350 on, were
looked at once, after the rules were frozen. Targets: at least 95 % right, at most 2 % of the healthy runs with an alarm.
With `--keep` the events of every run are kept and runs are not made twice; `--minutes` begins no run after so long, and
the next call goes on. `--short` makes 17 runs of the development half. What is planted, and what of it is emulated, stands
in planted_runs.py and planted_faults.py.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path

import torch
from planted_faults import FAULTS, N_PROMPT, SIZES, planned
from planted_runs import base_state, keep_base, run
from results import table, write_section

from finetune.doctor.diagnosis import Diagnosis, diagnose
from finetune.stats.means import wilson_interval
from finetune.telemetry.divergence import first_divergence
from finetune.telemetry.events import read_events

EACH, HEALTHY = 12, 300
SHORT_EACH, SHORT_HEALTHY = 1, 4
FIRST_SEED = {"development": 0, "held-out": 350}  # within each fault's thousand
RIGHT, FALSE_ALARMS = 0.95, 0.02


@dataclass
class Tally:
    """What one half came to. `named` counts poisoned runs whose named rows are all poisoned ones; `healthy_spikes` healthy runs
    that are called a spike, be it a note."""

    said: dict[str, Counter[str]] = field(default_factory=dict)
    right: int = 0
    n: int = 0
    false_alarms: int = 0
    healthy: int = 0
    poisoned: int = 0
    named: int = 0
    healthy_spikes: int = 0
    stopped: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


def seeds(fault: str, half: str, count: int) -> range:
    """No seed serves two faults."""
    start = 1000 * list(FAULTS).index(fault) + FIRST_SEED[half]
    return range(start, start + count)


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
    if not events_file.exists():
        unfinished = events_file.with_suffix(".unfinished")
        unfinished.unlink(missing_ok=True)
        run(plan, unfinished)
        unfinished.rename(events_file)
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
        tally.healthy_spikes += first.shape == "spike"
    if first.shape == expected == "recurring_spikes":
        tally.poisoned += 1
        tally.named += set(first.rows) <= made.poisoned
    if made.is_stopped:
        tally.stopped[fault] += 1
    if not is_right:
        tally.wrong.append(f"seed {made.seed}, {fault}: {first.shape} ({first.why})")


def _counted(hits: int, n: int) -> str:
    """A share with Wilson's 95 % interval."""
    low, high = wilson_interval(hits, n)
    return f"{hits} of {n} ({hits / n:.1%} [{low:.1%}, {high:.1%}]"


def _missed(is_missed: bool) -> str:
    return ", missed)" if is_missed else ")"


def _shown(tally: Tally) -> str:
    """What the interval of the false alarms leaves open."""
    if wilson_interval(tally.false_alarms, tally.healthy)[1] <= FALSE_ALARMS:
        return ""
    return (
        f" The upper end of its interval lies above {FALSE_ALARMS:.0%}: so many runs do not prove that rate."
    )


def report(half: str, tally: Tally) -> list[str]:
    """The confusion table of one half in words."""
    rows = [
        [fault, FAULTS[fault].shape, ", ".join(f"{shape} {count}" for shape, count in said.most_common())]
        for fault, said in tally.said.items()
    ]
    share, alarms = tally.right / tally.n, tally.false_alarms / tally.healthy
    planted = tally.n - tally.healthy
    right_of_planted = tally.right - (tally.healthy - tally.false_alarms)
    strictly = tally.right - (tally.healthy_spikes - _spike_alarms(tally))
    stopped = ", ".join(f"{fault} {count}" for fault, count in tally.stopped.items()) or "none"
    return [
        f"**{half} half**, with 95 % intervals (Wilson): {_counted(tally.right, tally.n)}, target {RIGHT:.0%}{_missed(share < RIGHT)} right; false alarms on "
        f"healthy runs {_counted(tally.false_alarms, tally.healthy)}, target {FALSE_ALARMS:.0%}{_missed(alarms > FALSE_ALARMS)}.{_shown(tally)}",
        "",
        f"Of the runs with a fault alone: {_counted(right_of_planted, planted)}) right. A spike that recovers is told as a note, with nothing to do: "
        f"of {tally.healthy} healthy runs {tally.healthy_spikes} are called a spike. Counted as wrong, {_counted(strictly, tally.n)}) are right.",
        "",
        *table(["planted", "should be", "diagnosed, runs"], rows),
        "",
        f"Rows named are poisoned ones only: {tally.named} of {tally.poisoned} runs. Runs that `train.on_divergence` would have "
        f"ended: {stopped}.",
        *(["", *(f"- wrong: {line}" for line in tally.wrong)] if tally.wrong else []),
        "",
    ]


def _spike_alarms(tally: Tally) -> int:
    """Healthy runs called a spike with an alarm: they are among the wrong ones already."""
    return sum(", healthy: spike (" in line for line in tally.wrong)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--short", action="store_true", help="17 runs of the development half; RESULTS.md stays."
    )
    parser.add_argument("--half", choices=list(FIRST_SEED), default="held-out")
    parser.add_argument("--jobs", type=int, default=1, help="Processes; runs do not depend on their number.")
    parser.add_argument(
        "--keep", type=Path, help="Folder for the events of the runs, which are not made again."
    )
    parser.add_argument("--minutes", type=float, default=float("inf"), help="Begin no run after so long.")
    arguments = parser.parse_args()
    half = "development" if arguments.short else arguments.half
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        tally = measure(arguments, half, folder)
    if tally is None:
        print("not all runs are made yet: call again with the same --keep")
        return
    lines = [
        "Tiny language models (width 16-32, 1-2 layers) tuned for 80-150 steps with one fault planted; fp16 is emulated by rounding "
        "scaled gradients, leaking throughput is real work measured in CPU time. 'Healthy' is right when nothing is alarmed: a "
        "plateau, a single spike that recovers, or steps at epochs are shapes of healthy runs.",
        "",
        "Seeds, within each fault's thousand: below 350 for development (the rules were made on those below 200; an earlier held-out half with "
        "6.0 % false alarms on 50 runs is among them, and one from 200 on that was read before the last rules: 98.7 % of 306 right, 1 false "
        f"alarm on 150). Held out, and read once after the rules were frozen: {FIRST_SEED['held-out']} to "
        f"{FIRST_SEED['held-out'] + HEALTHY - 1} healthy, {FIRST_SEED['held-out']} to {FIRST_SEED['held-out'] + EACH - 1} of each fault.",
        "",
        *report(half, tally),
    ]
    if half == "development":  # what was built on says nothing of how right it is
        print("\n".join(lines))
    else:
        write_section("Diagnosis: planted faults", lines)


def measure(arguments: argparse.Namespace, half: str, folder: Path) -> Tally | None:
    """Make the runs and count them; None where time ran out before the last."""
    each, healthy = (SHORT_EACH, SHORT_HEALTHY) if arguments.short else (EACH, HEALTHY)
    tasks = [
        (fault, seed, str(folder))
        for fault in FAULTS
        for seed in seeds(fault, half, healthy if fault == "healthy" else each)
    ]
    until = time.monotonic() + 60.0 * arguments.minutes
    prepare(folder)
    with ProcessPoolExecutor(
        arguments.jobs, mp_context=get_context("fork"), initializer=_stop_at, initargs=(until,)
    ) as pool:
        made = list(pool.map(make_in_time, tasks))
    if None in made:
        print(f"{len(made) - made.count(None)} of {len(made)} runs are made", flush=True)
        return None
    tally = Tally()
    for one in made:
        if one is not None:
            count(tally, one)
    return tally


def prepare(folder: Path) -> None:
    """Train the bases, or load those kept, before processes are forked, which then have them all."""
    for width, layers in SIZES:
        kept = folder / f"base-{width}-{layers}.pt"
        if kept.exists():
            keep_base(width, layers, N_PROMPT, torch.load(kept))
        else:
            torch.save(base_state(width, layers, N_PROMPT), kept)


_until = float("inf")


def _stop_at(until: float) -> None:
    global _until
    _until = until


def make_in_time(task: tuple[str, int, str]) -> Made | None:
    """`make`, unless the time is up and the run would still have to be made."""
    is_late = time.monotonic() > _until
    return None if is_late and not (Path(task[2]) / f"{task[1]}.jsonl").exists() else make(task)


if __name__ == "__main__":
    main()
