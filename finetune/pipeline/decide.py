"""Measure what the decision whether to tune needs: the untuned model, asked in every way that costs no tuning."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import mean

from finetune.doctor.remedy import Decision, Facts, Standing, decide
from finetune.errors import UserError
from finetune.evaluation.compare import compare_records
from finetune.evaluation.context_window import TooLongError
from finetune.evaluation.saved_arms import SavedArm
from finetune.evaluation.suite import Suite
from finetune.pipeline.standing import answer_suite

Say = Callable[[str], None]


def decide_whether_to_tune(
    name: str,
    suite: Suite,
    facts: Facts,
    *,
    documents: Path | None = None,
    max_items: int | None = None,
    batch_size: int = 32,
    dtype: str = "fp32",
    say: Say,
) -> Decision:
    """Ask zero-shot, few-shot and, where given, with documents in the prompt; then reason over what came.

    documents: a text that goes into the system message, as a retrieval would put it there. Raises UserError for a suite whose
    metric is no share of right answers.
    """
    _refuse_unbounded(suite)
    ways = {"zero_shot": (suite, "zero_shot")}
    if suite.few_shot is not None:
        ways["few_shot"] = (suite, "few_shot")
    if documents is not None:
        ways["documents"] = (_with_documents(suite, documents), "zero_shot")
    answered: dict[str, SavedArm] = {}
    for way, (asked, arm) in ways.items():
        try:
            answered[way] = answer_suite(
                name, asked, arm=arm, max_items=max_items, batch_size=batch_size, dtype=dtype, say=say
            )
        except TooLongError as error:
            if way != "documents":
                raise
            raise UserError(
                "the documents and an item do not fit into the model's context",
                where="--documents",
                why=error.faults[0].what,
                fix="give the passages that answer the questions, as a retrieval would pick them",
            ) from None
    return decide([_standing(suite, way, answered) for way in answered], facts)


def _standing(suite: Suite, way: str, answered: dict[str, SavedArm]) -> Standing:
    arm = answered[way]
    records, summary = arm.records(), arm.summary()
    assert summary is not None, "it was answered here"
    compared = compare_records(suite, answered["zero_shot"].records(), records, slices=False)
    gain = next(one for one in compared["comparisons"] if one["metric"] == suite.primary_metric)
    held = summary.metrics[suite.primary_metric]
    if held["mean"] is None or held["low"] is None:
        raise UserError(
            f"{suite.name} has too few items for a margin of error",
            fix="add items; finetune stats power --effect 0.1 says how many",
        )
    form = gain.get("off_format")
    standing = Standing(
        arm=way,
        mean=held["mean"],
        low=held["low"],
        high=held["high"],
        n=held["n"],
        off_format=None if form is None else form["arm"],
        prompt_tokens=mean(record["prompt_tokens"] for record in records),
    )
    return standing if way == "zero_shot" else replace(standing, gain=gain)


def _with_documents(suite: Suite, documents: Path) -> Suite:
    try:
        text = documents.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{documents} cannot be read as text: {error}", where="--documents") from None
    if not text.strip():
        raise UserError(
            f"{documents} is empty", where="--documents", fix="give the text that answers the questions"
        )
    system = "\n\n".join(filter(None, [suite.zero_shot.system, text.strip()]))
    return suite.model_copy(update={"zero_shot": suite.zero_shot.model_copy(update={"system": system})})


def _refuse_unbounded(suite: Suite) -> None:
    kind = suite.scorer_of(suite.primary_metric)
    if kind.open_ended or not kind.higher_is_better:
        raise UserError(
            f"'{suite.primary_metric}' of {suite.name} is no share of right answers",
            where="primary_metric",
            fix="choose a suite whose primary metric counts right answers, such as exact_match",
        )
