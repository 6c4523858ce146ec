"""The main job, measured: the run of the default recipe (made now, or the complete one found in runs/).

    python benchmarks/spine.py [--again]

Time by stage, peak memory and the results on unseen templates, beside what they should reach; then both merges of its adapter.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from results import table, write_section

from finetune.paths import runs_root
from finetune.pipeline.inputs import gather_inputs
from finetune.pipeline.screen import decisive

RECIPE = "sft/home_intents_lora"
COMMAND = Path(sys.executable).parent / "finetune"
GOALS = {"exact_match": 0.60, "intent_accuracy": 0.88, "valid_json": 0.98}


def run_lines(run: Path) -> list[str]:
    manifest = json.loads((run / "manifest.json").read_text())
    summary = json.loads((run / "eval/home_intents/tuned.summary.json").read_text())
    comparison = json.loads((run / "eval/comparison.json").read_text())
    forecast = json.loads((run / "forecast.json").read_text())
    training = json.loads((run / "training.json").read_text())
    stages = {name: stage["seconds"] for name, stage in manifest["stages"].items()}
    rows = [[name, f"{seconds:.0f} s", ""] for name, seconds in stages.items()]
    rows.append(["all stages", f"{sum(stages.values()) / 60:.1f} min", "≤ 15 min"])
    rows.append(["peak resident memory in training", f"{forecast['used_peak_bytes'] / 1e9:.2f} GB", "≤ 6 GB"])
    rows.append(["forecast / used", f"{forecast['total_bytes'] / forecast['used_peak_bytes']:.2f}", ""])
    for metric, goal in GOALS.items():
        found = summary["metrics"][metric]
        rows.append(
            [
                f"tuned {metric}, n = {summary['n']}",
                f"{found['mean']:.1%} [{found['low']:.1%}, {found['high']:.1%}]",
                f"≥ {goal:.0%}",
            ]
        )
    one = decisive(comparison)
    rows.append(
        [
            f"tuned − few-shot base, {one['metric']}",
            f"{one['difference'] * 100:+.1f} points [{one['low'] * 100:+.1f}, {one['high'] * 100:+.1f}]",
            "lower end ≥ +30",
        ]
    )
    rows.append(["training speed", f"{training['tokens_per_second']:.0f} tokens/s", ""])
    return table(["what", "measured", "goal"], rows)


def merge_lines(run: Path) -> list[str]:
    rows = []
    for dtype in ("fp32", "bf16"):
        out = Path(tempfile.mkdtemp()) / "merged"
        try:
            answer = subprocess.run(
                [COMMAND, "merge", "adapter", str(run), "--out", str(out), "--dtype", dtype, "--json"],
                check=True,
                capture_output=True,
                text=True,
            )
        finally:
            shutil.rmtree(out.parent, ignore_errors=True)
        proof: dict[str, Any] = json.loads(answer.stdout)
        noise = proof["noise_floor_kl"]
        rows.append(
            [
                dtype,
                f"{proof['max_logit_difference']:.2e}",
                f"{proof['mean_kl']:.2e}",
                "—" if noise is None else f"{noise:.2e}",
                f"{proof['effect_kl']:.2e}",
            ]
        )
    return table(
        [
            "weights",
            "largest logit difference",
            "mean KL",
            "noise floor of bf16 (KL)",
            "effect of the tuning (KL)",
        ],
        rows,
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--again", action="store_true", help="run from nothing, in a folder of its own")
    options = parser.parse_args()
    run = runs_root() / gather_inputs(RECIPE).folder_name
    if options.again or not (run / "eval/comparison.json").exists():
        command = [str(COMMAND), "run", RECIPE]
        subprocess.run(command, check=False)
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
        print(f"peak resident memory of the whole process: {peak / 1e9:.2f} GB")
    write_section("`make finetune`", run_lines(run))
    write_section("Merging its adapter", merge_lines(run))


if __name__ == "__main__":
    main()
