"""What a distillation adds to a run: the teacher's answers as an arm, what it says to the student, and the three arms compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.data.rows import Row
from finetune.data.tokenise import TokenisedRow
from finetune.digest import digest_json
from finetune.distil.aligned.teaching import AlignedTeaching
from finetune.distil.trainer import LiveTeaching, shared_vocabulary
from finetune.evaluation.compare import compare_folders, compare_records
from finetune.evaluation.gap import gaps_closed
from finetune.evaluation.records import read_records, read_summary, records_path, summary_path
from finetune.evaluation.run import prepare_arm
from finetune.evaluation.suite_data import SuiteData
from finetune.model.source import read_config
from finetune.paths import write_json
from finetune.pipeline.alignment import aligned_rows, tokenizer_digest
from finetune.pipeline.baseline_store import fetch_baseline
from finetune.pipeline.teacher import Say, Teacher
from finetune.pipeline.teacher_cache import RecipeCache
from finetune.pipeline.teacher_text import text_facts
from finetune.plan.teacher import TeacherPlan, runs_beside
from finetune.recipe.distil_section import DistilSection

if TYPE_CHECKING:
    from finetune.pipeline.inputs import RunInputs

FACTS = "distillation.json"
CACHE_FACTS = "teacher_cache.json"
ALIGNMENT_FACTS = "alignment.json"
TEACHER = "teacher"
UNKNOWN_LICENCE = "distil.teacher.licence is not given: whether the teacher's terms allow a student to be made of what it says is unknown"
SAME_MODEL = (
    "teacher and student are the same model: their divergence is 0 from the first step on, and nothing is learnt from it\n"
    "  name a tuned run (distil.teacher.run) or another model, or cut the student from it (distil.student.init)"
)


def teaches_itself(inputs: RunInputs) -> bool:
    """Whether the student is, before it learns, the very model whose distribution it learns."""
    teacher, section = _teacher(inputs), _section(inputs)
    if section.way == "answers" or section.student.layers is not None or inputs.start is not None:
        return False
    bare = teacher.adapter is None and teacher.server is None and teacher.quantization.quantize == "none"
    return bare and inputs.recipe.model.quantize == "none" and teacher.source.digest == inputs.source.digest


def teacher_answers(inputs: RunInputs, data: SuiteData, target: Path, say: Say) -> list[Path]:
    """Answer a suite with the teacher, asked as the student will be, or find its answers in the store of all runs.

    Returns the files written into `target`.
    """
    recipe, teacher = inputs.recipe, _teacher(inputs)
    key = teacher.key(recipe.eval.dtype)
    tokenizer = teacher.load_tokenizer()
    job = prepare_arm(tokenizer, data.suite, data.items, arm="teacher", few_shot=data.few_shot_rows, key=key)
    model = cache(lambda: teacher.answering(dtype=recipe.eval.dtype))
    fetch_baseline(job, target, model_key=key, model=model, batch_size=recipe.eval.batch_size, say=say)
    return [records_path(target, TEACHER), summary_path(target, TEACHER)]


def write_facts(inputs: RunInputs, path: Path) -> None:
    """`distillation.json`: who teaches, on what terms, and the sizes of both models."""
    teacher, section = _teacher(inputs), _section(inputs)
    layers = section.student.layers
    write_json(
        path,
        {
            "teacher": {
                "name": teacher.name,
                "digest": teacher.digest,
                "licence": teacher.licence,
                "server": None if section.teacher.server is None else section.teacher.server.model,
                "parameters": teacher.n_parameters,
                "layers": _layers(read_config(teacher.source)),
            },
            "student": {
                "parameters": inputs.source.n_parameters,
                "layers": _layers(inputs.config),
                "cut_from_layers": list(layers) if layers is not None else None,
            },
            "way": section.way,
            "targets": section.targets,
            "alignment": section.alignment,
            "loss": section.loss.model_dump(mode="json"),
            **({"generated": text_facts(inputs.spec_path)} if section.way == "answers" else {}),
        },
    )


def teaching(
    inputs: RunInputs,
    student_tokenizer: Any,
    rows: Sequence[TokenisedRow],
    say: Say,
    *,
    source_rows: Callable[[], Sequence[Row]],
) -> dict[str, Any]:
    """What `train_distil` needs of the teacher for these train rows; nothing where the student learns text alone.

    source_rows: gives the rows that they were made of, for a teacher that reads them in its own tokens. Raises UserError where
    teacher and student do not have the same tokens, or not the same answers in theirs.
    """
    if inputs.teacher is None or _section(inputs).way == "answers":
        return {}
    section, teacher = _section(inputs), inputs.teacher
    aligned = aligned_rows(inputs, student_tokenizer, rows, source_rows)
    if aligned is not None:
        n_vocabulary = aligned.shared.n_student
    else:
        n_vocabulary = shared_vocabulary(student_tokenizer, teacher.load_tokenizer())
    options: dict[str, Any] = {"n_vocabulary": n_vocabulary}
    if section.targets == "cache":
        cache = RecipeCache.of(inputs, student_tokenizer, rows, aligned)
        return options | {"teaching": cache.teaching(say, aligned)}
    if aligned is not None:
        return options | {
            "teaching": AlignedTeaching.live(aligned, teacher.load(dtype=section.teacher.dtype))
        }
    attention = "document" if inputs.recipe.train.packing else "sdpa"
    model = teacher.load(dtype=section.teacher.dtype, attention=attention)
    return options | {"teaching": LiveTeaching(model, n_vocabulary)}


def teacher_plan(inputs: RunInputs) -> TeacherPlan | None:
    """The teacher as the memory forecast sees it, where it runs beside the student."""
    if inputs.teacher is None or runs_beside(inputs.recipe) is None:
        return None
    held = inputs.teacher.quantization
    return TeacherPlan(
        read_config(inputs.teacher.source),
        _section(inputs).teacher.dtype,
        held.quantize,
        held.double_quantization,
        adapter_parameters=inputs.teacher.adapter_parameters,
    )


def teaching_key(inputs: RunInputs) -> dict[str, Any]:
    """What of the teacher decides the student's weights besides the recipe."""
    if inputs.teacher is None:
        return {}
    key = {"teacher": inputs.teacher.key(_section(inputs).teacher.dtype)}
    if _section(inputs).alignment == "text":
        key["teacher tokenizer"] = tokenizer_digest(inputs.teacher.load_tokenizer())
    return key


def compare_with_teacher(
    inputs: RunInputs, data: SuiteData, result: dict[str, Any], baseline: Path, tuned: Path
) -> None:
    """Add to a suite's result the student against its teacher, and the share of the gap that it closed.

    The gap is that between the arm the verdict is taken against, and the teacher.
    """
    if inputs.teacher is None:
        return
    against = data.suite.baseline_arms([inputs.recipe.eval.against])[0]
    arms = [(baseline, against), (tuned, "tuned"), (baseline, TEACHER)]
    before, after, teacher = (read_records(folder, arm) for folder, arm in arms)
    summaries = [read_summary(folder, arm) for folder, arm in arms[1:]]
    if len({(summary.template_sha256, summary.backend) for summary in summaries}) == 1:
        other = compare_folders(data.suite, baseline, TEACHER, tuned, slices=False)
    else:  # another model in its own words, or behind a server: each is asked as it is used
        other = compare_records(data.suite, teacher, after, slices=False)
    result["comparisons"] += other["comparisons"]
    result["gap"] = {
        "before": against,
        "teacher": TEACHER,
        "metrics": gaps_closed(data.suite, before, after, teacher),
    }


def _layers(config: dict[str, Any]) -> int | None:
    found = config.get("num_hidden_layers") or config.get("text_config", {}).get("num_hidden_layers")
    return found if isinstance(found, int) else None


def _teacher(inputs: RunInputs) -> Teacher:
    assert inputs.teacher is not None
    return inputs.teacher


def _section(inputs: RunInputs) -> DistilSection:
    assert inputs.recipe.distil is not None
    return inputs.recipe.distil


def facts_digest(inputs: RunInputs) -> str:
    """Of what `distillation.json` says: a licence that is filled in later is no reason to train again."""
    teacher = _teacher(inputs)
    generated = text_facts(inputs.spec_path) if _section(inputs).way == "answers" else []
    return digest_json([teacher.digest, teacher.licence, inputs.source.digest, inputs.digest, generated])
