"""Searches over merges, measured: what averaging with the base buys back, and whether one model serves two languages.

    python benchmarks/merge_search.py [NAME …]      # home_intents_average home_intents_languages

Each is the shipped search of that name (made now, or the complete one found in runs/): what every model scores on the side
that chose, then the winner's differences and claims on the side that confirms.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from results import table, write_section

from finetune.evaluation.merge_screen import difference_of

COMMAND = Path(sys.executable).parent / "finetune"
TITLES = {
    "home_intents_average": "Averaging a tuned model with its base",
    "home_intents_languages": "One model of two languages",
}
_KL = "kl_per_token"


def section_lines(result: Mapping[str, Any], seconds: float) -> list[str]:
    """The section of one search. result: `search.json`; seconds: of the command, parents that it trained included."""
    columns = [(one["name"], one["metric"]) for one in result["suites"]]
    columns += [(one["name"], _KL) for one in result["suites"] if _KL in one["metrics"]]
    header = ["model", *(f"{suite}, {metric}" for suite, metric in columns)]
    chosen_of, confirmed = (
        [[_name(model, result), *(_level(model, *column) for column in columns)] for model in side["models"]]
        for side in (result, result["confirmation"])
    )
    confirmation = result["confirmation"]
    winner = result["choice"]["winner"]
    against = [
        [one["suite"], one["against"], difference_of(one), one["finding"]]
        for one in confirmation["comparisons"]
    ]
    return [
        "On the side that chooses (validation split; half of the suites that have no splits):",
        "",
        *table(header, chosen_of),
        "",
        "On the side that confirms (test split; the other half):",
        "",
        *table(header, confirmed),
        "",
        f"There, {winner} against each other model (finding: after Holm over these):",
        "",
        *table(["suite", "against", "difference", "finding"], against),
        "",
        *(
            f"- {one['suite']} against {one['against']}, {one['requirement']}: **{one['outcome']}** ({one['message']})"
            for one in confirmation["claims"]
        ),
        "",
        f"Verdict: {confirmation['outcome']}; the search took {result['seconds'] / 60:.1f} min, the whole command "
        f"{seconds / 60:.1f} min.",
    ]


def _name(model: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    return f"**{model['name']}**" if model["name"] == result["choice"]["winner"] else str(model["name"])


def _level(model: Mapping[str, Any], suite: str, metric: str) -> str:
    held = model["suites"][suite]["metrics"][metric]
    if "per_token" in metric:
        return f"{held['mean']:.3f} [{held['low']:.2f}, {held['high']:.2f}]"
    return f"{held['mean']:.1%} [{held['low']:.0%}, {held['high']:.0%}], n = {held['n']}"


def main() -> None:
    for name in sys.argv[1:] or TITLES:
        started = time.monotonic()
        done = subprocess.run(
            [str(COMMAND), "merge", "search", f"merge/{name}", "--json"],
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        if done.returncode not in (0, 10, 11, 12):
            raise SystemExit(f"finetune merge search merge/{name} ended with {done.returncode}")
        write_section(TITLES[name], section_lines(json.loads(done.stdout), time.monotonic() - started))


if __name__ == "__main__":
    main()
