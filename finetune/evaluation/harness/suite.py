"""Suites over lm-eval tasks: by name alone, or completed where a suite's YAML leaves metrics to the task."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import ValidationError

from finetune.errors import Fault, UserError
from finetune.evaluation.harness.definition import TaskDefinition, define
from finetune.evaluation.suite_schema import Suite
from finetune.evaluation.suite_sections import ScorerSection

PREFIXES = ("lm_eval:", "lm_eval-")


def task_of(name: str) -> str | None:
    """The task of a suite's name `lm_eval:<task>`, or as its folder has it, `lm_eval-<task>`; None for other names."""
    return next(
        (name.removeprefix(one) for one in PREFIXES if name.startswith(one) and len(name) > len(one)), None
    )


def suite_of_task(name: str) -> Suite:
    """A task as a suite that guards against losses, with the metrics of the task; the first one decides."""
    task = task_of(name)
    assert task is not None
    definition = define(task)
    given: dict[str, Any] = {
        "name": f"lm_eval-{task}",
        "description": f"The task {task} of the lm-evaluation-harness.",
        "role": "regression",
        "items": {"lm_eval": task},
        "cluster": None,
        "slices": {"by": ["task"] if len(definition.leaves) > 1 else []},
    }
    suite = Suite.model_validate(given)
    suite._path = Path(name)
    return completed(suite)


def _validated(given: dict[str, Any], path: Path) -> Suite:
    try:
        return Suite.model_validate(given)
    except ValidationError as error:
        raise UserError(
            [Fault(str(one["msg"]).removeprefix("Value error, "), str(path)) for one in error.errors()]
        ) from None


def definition_of(suite: Suite) -> TaskDefinition:
    assert suite.items.lm_eval is not None
    folder = suite.items.include_path
    return define(suite.items.lm_eval, suite.path.parent / folder if folder is not None else None)


def completed(suite: Suite) -> Suite:
    """The suite with the task's metrics where it names none, and with the task's digest in its own.

    Raises UserError when the task has no metric that is one number a document.
    """
    definition = definition_of(suite)
    metrics = list(suite.scorers) or [
        ScorerSection(
            scorer="lm_eval",
            metric=one.name,
            parameters={
                "metric": one.name.split(",")[0],
                "filter": one.filter,
                "higher_is_better": one.higher_is_better,
            },
        )
        for one in definition.metrics
    ]
    if not metrics:
        raise UserError(
            f"the lm-eval task {definition.name} names no metric that is one number a document",
            where=str(suite.path),
            why="a figure of the whole set, or one that only the task's code knows, cannot be compared item by item",
            fix="name one in a suite: scorers: [{scorer: lm_eval, parameters: {metric: NAME}}], or take the tasks of a "
            "group one by one",
        )
    names = [one if isinstance(one, str) else one.name for one in metrics]
    wanted = suite.primary_metric or names[0]
    given = suite.model_dump(mode="json", include=set(suite.model_fields_set))
    changed = _validated({**given, "scorers": metrics, "primary_metric": wanted}, suite.path)
    changed._path = suite.path
    changed._task_digest = definition.digest
    return changed
