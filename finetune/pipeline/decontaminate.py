"""The dataset of a recipe, with no train row that holds a question of the recipe's suites."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from finetune.data.build import DatasetBuild, build_dataset
from finetune.data.decontaminate import decontaminate, rows_that_hold
from finetune.data.questions import Questions, messages_question
from finetune.data.rows import Progress, Side
from finetune.data.stages.runner import Runner
from finetune.evaluation.items import Item
from finetune.evaluation.suite import Suite, load_suite
from finetune.evaluation.suite_data import SuiteData, load_suite_data, shows_rows_of
from finetune.paths import find_declarative
from finetune.recipe.resolve import read_recipe


def build_of_recipe(
    path: str,
    builds_root: Path,
    *,
    on_progress: Progress = lambda share: None,
    runner: Runner | None = None,
) -> tuple[DatasetBuild, dict[str, Any]]:
    """The dataset build of a recipe and the report of its decontamination (`finetune.data.decontaminate`).

    Raises UserError for a faulty recipe, spec or suite.
    """
    loaded = read_recipe(path)
    recipe = loaded.value
    spec_path = find_declarative(
        "data",
        recipe.data.spec,
        relative_to=loaded.folder("data.spec"),
        where=loaded.where("data.spec"),
    )
    build = build_dataset(
        spec_path, builds_root, on_progress=lambda share: on_progress(0.9 * share), runner=runner
    )
    beside, where = loaded.folder("eval.suites"), loaded.where("eval.suites")
    suites = [load_suite(name, relative_to=beside, where=where) for name in recipe.eval.suites]
    foreign = [
        load_suite_data(suite, builds_root=builds_root, dataset_spec=spec_path)
        for suite in suites
        if not _asks_of(suite, spec_path)
    ]
    return decontaminate(
        build, suite_questions(foreign, spec_path), lambda share: on_progress(0.9 + share / 10)
    )


def suite_questions(suites: Iterable[SuiteData], spec_path: Path) -> list[Questions]:
    """What the suites ask, as texts. A suite that asks an evaluation side of the dataset itself is left out: the split
    has kept that apart already."""
    return [
        Questions(
            data.suite.name,
            data.digest,
            [item.id for item in data.items],
            [_asked(item) for item in data.items],
        )
        for data in suites
        if not _asks_of(data.suite, spec_path)
    ]


def show_trained_rows(data: SuiteData, build: DatasetBuild, spec_path: Path, *, compared: bool) -> SuiteData:
    """The suite with few-shot examples of `build`, where they come from the recipe's dataset: an example that holds a
    question of the suite would give its answer away.

    compared: whether the questions of this suite were among those that `build` was decontaminated with. Where they were
    not, and for examples that are no train rows, they are compared now.
    """
    if not shows_rows_of(data.suite, spec_path):
        return data
    assert data.suite.few_shot is not None
    side = cast("Side", data.suite.few_shot.split)
    questions = [] if compared and side == "train" else suite_questions([data], spec_path)
    held = rows_that_hold(build, side, questions) if questions else set()
    return replace(data, few_shot_rows=tuple(row for row in build.iter_rows(side) if row.id not in held))


def contaminated_line(report: dict[str, Any]) -> str:
    """One line for a person; empty when there was nothing to compare with."""
    found = report["evaluations"]
    if not found:
        return ""
    names = ", ".join(f"{name} ({held['questions']} questions)" for name, held in found.items())
    return f"{len(report['rows'])} train rows held a question of {names} and are left out"


def _asks_of(suite: Suite, spec_path: Path) -> bool:
    """Whether the suite's items are rows of this dataset."""
    if suite.items.spec is None:
        return False
    own = find_declarative("data", suite.items.spec, relative_to=suite.path.parent)
    return own.resolve() == spec_path.resolve()


def _asked(item: Item) -> str:
    """The question of an item; of a text, whose likelihood is measured, the text itself."""
    return messages_question(item.messages) or item.reference
