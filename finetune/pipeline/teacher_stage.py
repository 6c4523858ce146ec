"""The stage in which the teacher answers the suites, before the student learns anything."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from finetune.digest import digest_json
from finetune.evaluation.suite_data import SuiteData
from finetune.pipeline.distil import FACTS, UNKNOWN_LICENCE, facts_digest, teacher_answers, write_facts
from finetune.pipeline.stages import RunContext


def teacher_stage(context: RunContext, suites: Sequence[SuiteData]) -> None:
    """Evaluate the teacher on every suite, and note who it is; nothing for a recipe without one."""
    inputs = context.inputs
    if inputs.teacher is None:
        return
    if inputs.teacher.licence is None:
        context.say(f"warning: {UNKNOWN_LICENCE}")

    def note_facts(outputs: list[Path]) -> None:
        write_facts(inputs, context.folder / FACTS)
        outputs.append(context.folder / FACTS)

    context.stage("teacher", {"facts": facts_digest(inputs)}, note_facts, f"teacher: {inputs.teacher.name}")
    key = inputs.teacher.key(inputs.recipe.eval.dtype)
    for data in suites:
        depends_on = {
            "teacher": key,
            "suite": data.suite.digest,
            "items": data.digest,
            "template": digest_json(context.tokenizer.chat_template),
        }

        def work(outputs: list[Path], data: SuiteData = data) -> None:
            target = context.folder / "baseline" / data.suite.name
            outputs += teacher_answers(inputs, context.tokenizer, data, target, context.say)

        name = data.suite.name
        context.stage(f"teacher {name}", depends_on, work, f"teacher: {name}, {len(data.items)} items")
