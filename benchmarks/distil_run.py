"""The embedded distillation, measured: the run of its recipe (made now, or the complete one found in runs/).

    python benchmarks/distil_run.py [--again]

Student before, student after and teacher on the same unseen phrasings: scores, latency, size, share of the gap closed; and
what the run cost. Its teacher is the run of the default recipe, which is made first where it is not there.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

from results import table, write_section
from spine import COMMAND, GOALS
from spine import RECIPE as TEACHER_RECIPE

from finetune.errors import UserError
from finetune.paths import runs_root
from finetune.pipeline.inputs import gather_inputs
from finetune.report.distillation import gap_sentence

RECIPE, SUITE = "distil/home_intents", "home_intents"
ARMS = {
    "student before": ("baseline", "start"),
    "student after": ("eval", "tuned"),
    "teacher": ("baseline", "teacher"),
}


def read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def arm_lines(run: Path) -> list[str]:
    """The three models side by side."""
    arms = {name: read(run / part / SUITE / f"{arm}.summary.json") for name, (part, arm) in ARMS.items()}
    facts = read(run / "distillation.json")
    sizes = {name: facts["teacher" if name == "teacher" else "student"] for name in arms}
    rows = []
    for metric in GOALS:
        found = {name: arm["metrics"][metric] for name, arm in arms.items()}
        cells = [f"{one['mean']:.1%} [{one['low']:.1%}, {one['high']:.1%}]" for one in found.values()]
        rows.append([f"{metric}, n = {arms['teacher']['n']}", *cells])
    rows.append(["parameters", *(f"{one['parameters'] / 1e6:.1f} M" for one in sizes.values())])
    rows.append(["layers", *(str(one["layers"]) for one in sizes.values())])
    waits = [arm["latency_seconds"] for arm in arms.values()]
    rows.append(
        ["latency of an answer, p50 / p95", *(f"{one['p50']:.2f} / {one['p95']:.2f} s" for one in waits)]
    )
    rows.append(
        ["output tokens a second", *(f"{arm['output_tokens'] / arm['seconds']:.0f}" for arm in arms.values())]
    )
    return table(["", *arms], rows)


def cost_lines(run: Path) -> list[str]:
    """Shares of the gap, and what the run took."""
    stages = {name: stage["seconds"] for name, stage in read(run / "manifest.json")["stages"].items()}
    training, cache, forecast = (
        read(run / f"{name}.json") for name in ("training", "teacher_cache", "forecast")
    )
    suites = {one["suite"]: one for one in read(run / "eval" / "comparison.json")["suites"]}
    gaps = suites[SUITE]["gap"]["metrics"]
    told = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in stages.items() if seconds >= 1)
    return [
        *(f"- {name}: {gap_sentence(found)}" for name, found in gaps.items()),
        "",
        f"All stages {sum(stages.values()) / 60:.1f} min (at most 30 wanted): {told}.",
        f"Training: {training['steps']} steps, {training['tokens_per_second']:.0f} tokens/s, "
        f"{training['trainable_parameters'] / 1e6:.1f} M trained, peak resident memory {forecast['used_peak_bytes'] / 1e9:.2f} GB.",
        f"Teacher cache: {cache['targets']:,} targets, {cache['bytes_per_target']} bytes each, the top {cache['k']} hold "
        f"{next(iter(cache['coverage'].values()))['mean']:.3%} of the teacher's mass.",
    ]


def finished_run(again: bool) -> Path:
    """The folder of the recipe's run; it is made, and its teacher before it, where it is not there."""
    try:
        run = runs_root() / gather_inputs(RECIPE).folder_name
    except UserError:  # no teacher yet
        subprocess.run([COMMAND, "run", TEACHER_RECIPE], check=False)
        run = runs_root() / gather_inputs(RECIPE).folder_name
    if again:
        shutil.rmtree(run, ignore_errors=True)
    if not (run / "eval/comparison.json").exists():
        subprocess.run([COMMAND, "run", RECIPE], check=False)  # its exit code is the verdict
    return run


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--again", action="store_true", help="train the student anew")
    run = finished_run(parser.parse_args().again)
    write_section("`finetune run distil/home_intents`", [*arm_lines(run), "", *cost_lines(run)])


if __name__ == "__main__":
    main()
