"""Suites by name or path: a YAML file read into its schema and checked, or an lm-eval task."""

from __future__ import annotations

from pathlib import Path

from finetune.errors import Fault, UserError
from finetune.evaluation.suite_schema import Suite
from finetune.evaluation.suite_sections import (
    DecodingSection,
    FewShotSection,
    ScorerSection,
    SlicesSection,
    StopEarlySection,
    ZeroShotSection,
)
from finetune.paths import find_declarative
from finetune.recipe.yaml_loader import load_typed

__all__ = [
    "DecodingSection",
    "FewShotSection",
    "ScorerSection",
    "SlicesSection",
    "StopEarlySection",
    "Suite",
    "ZeroShotSection",
    "load_suite",
    "suite_stem",
]


def load_suite(name: str | Path, *, relative_to: Path | None = None, where: str = "") -> Suite:
    """Read a suite by path or shipped name, or as `lm_eval:<task>`, an lm-eval task with its own metrics.

    Raises UserError with file, line and column for every fault at once.
    """
    if str(name) == "lm_eval:":
        raise UserError(
            "lm_eval: names no task", where=where, fix="write lm_eval:TASK, e.g. lm_eval:arc_easy"
        )
    if str(name).startswith("lm_eval:"):
        return _harness_suite(str(name), where)
    try:
        path = find_declarative("eval", str(name), relative_to=relative_to, where=where)
    except UserError:
        if str(name).startswith("lm_eval-"):  # a run folder's name of a task
            return _harness_suite(str(name), where)
        raise
    return _read_suite(path)


def suite_stem(name: str) -> str:
    """The name that a suite has in a run folder, from how it is named in a recipe or on the command line."""
    return name.replace(":", "-", 1) if name.startswith("lm_eval:") else Path(name).stem


def _harness_suite(name: str, where: str) -> Suite:
    from finetune.evaluation.harness.suite import suite_of_task

    try:
        return suite_of_task(name)
    except UserError as error:
        if not where:
            raise
        raise UserError(
            [Fault(one.what, where=where, why=one.why, fix=one.fix) for one in error.faults]
        ) from None


def _read_suite(path: Path) -> Suite:
    suite = load_typed(path, Suite).value
    suite._path = path
    for file in suite.files:
        if not file.is_file():
            raise UserError(
                f"no items file {file}", where=str(path), fix="mend items.jsonl or few_shot.jsonl"
            )
    if suite.items.made_of_columns:
        from finetune.evaluation.item_template import check_templates

        check_templates(suite.items, where=str(path))
    if suite.items.lm_eval is not None:
        from finetune.evaluation.harness.suite import completed

        suite = completed(suite)
    suite.score_functions()  # unknown scorers and parameters are faults of the file, found before anything runs
    return suite
