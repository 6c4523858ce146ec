"""Said before the tuning begins: what each suite will not be able to show, from the untuned arms just measured."""

from __future__ import annotations

from collections.abc import Sequence

from finetune.evaluation.power import plan_suite
from finetune.evaluation.records import read_records
from finetune.evaluation.suite_data import SuiteData
from finetune.paths import write_json
from finetune.pipeline.stages import RunContext


def announce_power(context: RunContext, suites: Sequence[SuiteData]) -> None:
    """Write `baseline/power.json` and, while the tuning is still to come, print its lines: least differences, warnings."""
    planned = []
    for data in suites:
        arms = data.suite.baseline_arms(context.inputs.recipe.eval.baselines)
        folder = context.folder / "baseline" / data.suite.name
        planned.append(plan_suite(data.suite, [read_records(folder, arm) for arm in arms]))
    write_json(context.folder / "baseline" / "power.json", {"suites": [one.to_dict() for one in planned]})
    if not context.manifest.stages.get("train", {}).get("completed"):
        for line in (line for one in planned for line in one.lines()):
            context.say(line)
