"""The stage in which the teacher answers the suites, before the student learns anything."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from finetune.distil.aligned.teaching import AlignedRows
from finetune.evaluation.suite_data import SuiteData
from finetune.paths import write_json
from finetune.pipeline.alignment import aligned_rows, tokenizer_digest
from finetune.pipeline.distil import (
    ALIGNMENT_FACTS,
    CACHE_FACTS,
    FACTS,
    SAME_MODEL,
    UNKNOWN_LICENCE,
    facts_digest,
    teacher_answers,
    teaches_itself,
    write_facts,
)
from finetune.pipeline.methods import plain_rows
from finetune.pipeline.stages import RunContext, TrainingRows
from finetune.pipeline.teacher_cache import RecipeCache, cache_facts, low_coverage


def teacher_stage(context: RunContext, suites: Sequence[SuiteData]) -> None:
    """Evaluate the teacher on every suite, and note who it is; nothing for a recipe without one."""
    inputs = context.inputs
    if inputs.teacher is None:
        return
    if inputs.teacher.licence is None:
        context.say(f"warning: {UNKNOWN_LICENCE}")
    if teaches_itself(inputs):
        context.say(f"warning: {SAME_MODEL}")

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
        }

        def work(outputs: list[Path], data: SuiteData = data) -> None:
            target = context.folder / "baseline" / data.suite.name
            outputs += teacher_answers(inputs, data, target, context.say)

        name = data.suite.name
        context.stage(f"teacher {name}", depends_on, work, f"teacher: {name}, {len(data.items)} items")


def alignment_stage(context: RunContext, rows: TrainingRows) -> AlignedRows | None:
    """Read the train rows as a teacher with another tokenizer does, and note how far both meet."""
    inputs = context.inputs
    section = inputs.recipe.distil
    if section is None or section.alignment == "tokens":
        return None
    assert inputs.teacher is not None
    aligned = aligned_rows(inputs, context.tuned.tokenizer, plain_rows(rows.train), context.source_rows)
    assert aligned is not None
    facts = aligned.facts()

    def work(outputs: list[Path]) -> None:
        path = context.folder / ALIGNMENT_FACTS
        write_json(path, facts)
        outputs.append(path)

    share = facts["targets_one_to_one"] / facts["targets"]
    announcement = (
        f"alignment: {facts['shared_tokens']} tokens are the student's and the teacher's; {share:.0%} of the targets lie "
        "one to one"
    )
    depends_on = {"rows": rows.digest, "tokenizer": tokenizer_digest(inputs.teacher.load_tokenizer())}
    context.stage("alignment", depends_on, work, announcement)
    return aligned


def cache_stage(context: RunContext, rows: TrainingRows) -> None:
    """Run the teacher over the train rows once, where the recipe learns from a cache; runs share what is there."""
    section = context.inputs.recipe.distil
    aligned = alignment_stage(context, rows)
    if section is None or section.way != "logits" or section.targets != "cache":
        return
    cache = RecipeCache.of(context.inputs, context.tuned.tokenizer, plain_rows(rows.train), aligned)

    def work(outputs: list[Path]) -> None:
        manifest = cache.fill(context.say)
        if (told := low_coverage(manifest)) is not None:
            context.say(told)
        path = context.folder / CACHE_FACTS
        write_json(path, cache_facts(cache, manifest))
        outputs.append(path)

    announcement = f"teacher cache: top {cache.coding.k} at every target, {cache.coding.formula()}"
    context.stage("teacher cache", {"cache": cache.folder.name}, work, announcement)
