"""The doctor's checks that need no weights: the machine, the recipe, its rows and their tokens, the suites, the forecasts.

Each step stands on what earlier ones made; where one fails, only what stands on it is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from finetune.data.build import DatasetBuild, build_dataset, default_builds_root
from finetune.data.check import check_build
from finetune.data.decontaminate import decontaminate
from finetune.data.rows import Row
from finetune.doctor.finding import Finding, attempt, examine, faults_in, faults_of, skipped
from finetune.doctor.rates import check_rate
from finetune.doctor.rows import check_contamination, check_leaks
from finetune.doctor.suites import check_power
from finetune.doctor.tokens import check_refused
from finetune.errors import UserError
from finetune.evaluation.records import read_records
from finetune.evaluation.suite import Suite
from finetune.evaluation.suite_data import SuiteData, check_units, load_suite_data
from finetune.model.new_tokens import NewTokens
from finetune.paths import runs_root
from finetune.pipeline.alignment import check_teacher
from finetune.pipeline.checks import (
    Forecasts,
    answer_findings,
    environment_findings,
    forecasts_here,
    machine_findings,
    number_findings,
    token_findings,
    vocabulary_of,
)
from finetune.pipeline.decontaminate import suite_questions
from finetune.pipeline.distil import teacher_plan
from finetune.pipeline.generate import ensure_generated
from finetune.pipeline.inputs import FoundInputs, RunInputs, find_inputs
from finetune.pipeline.material import (
    Material,
    Say,
    tokenise_or_tell,
    tokenizer_of,
    train_rows,
    validation_rows,
)
from finetune.pipeline.methods import Split
from finetune.pipeline.preflight import preflight
from finetune.recipe.schema import Recipe

Made = TypeVar("Made")
# Where a fault of the machine or the recipe is mended by one value that changes nothing of what is learnt.
_MENDED_BY: Mapping[str, Any] = {"train.activation_offload": False, "train.fp8": False}


@dataclass
class _Notes:
    """What was found so far."""

    findings: list[Finding] = field(default_factory=list)

    def attempt(self, group: str, name: str, work: Callable[[], Made]) -> Made | None:
        made, faults = attempt(group, name, work)
        self.findings += faults
        return made

    def examine(self, group: str, name: str, check: Callable[[], Finding | Iterable[Finding]]) -> None:
        self.findings += examine(group, name, check)


def survey(path: str, overrides: Sequence[str], say: Say) -> tuple[list[Finding], Material | None]:
    """All findings, and the material of a training where every part of it is there."""
    notes = _Notes()
    found = notes.attempt("recipe", "recipe", lambda: find_inputs(path, overrides, say=say))
    machine = list(environment_findings("fp32" if found is None else found.recipe.model.dtype))
    if found is None:
        return [*machine, *notes.findings], None
    inputs = _recipe(notes, found)
    notes.findings = [*machine, *notes.findings]
    say("doctor: the rows, their tokens and the suites")
    build = _dataset(notes, found, say)
    suites = _suites(notes, found)
    rows, validation = _rows(notes, found, build, suites)
    tokenizer, split = _tokens(notes, found, rows, validation)
    forecasts = _machine(notes, found, inputs, split)
    for data in suites:
        notes.examine("suite", f"power of {data.suite.name}", partial(_power, inputs, data))
    if inputs is None or tokenizer is None or split is None:
        return notes.findings, None
    return notes.findings, Material(inputs, suites, rows, split, *tokenizer, forecasts)


def _recipe(notes: _Notes, found: FoundInputs) -> RunInputs | None:
    """Whether what the recipe names is there and goes together; all of it where nothing is missing."""
    recipe, source, faults = found.recipe, found.source, []
    if found.faults:
        faults += [replace(one, group="recipe") for one in faults_of("recipe", UserError(found.faults))]
    if source is not None and (found.start is not None or recipe.adapter.start is None):
        _, unfit = attempt("recipe", "recipe", lambda: preflight(recipe, source, found.start))
        faults += [_with_changes(one, recipe) for one in unfit]
    inputs = None if found.faults else found.inputs()
    if inputs is not None:
        taught = inputs
        _, unfit = attempt("recipe", "recipe", lambda: check_teacher(taught))
        faults += unfit
    sound = Finding("recipe", "ok", "it goes with this machine, this model and its names", group="recipe")
    notes.findings += faults or [sound]
    return inputs


def _with_changes(finding: Finding, recipe: Recipe) -> Finding:
    """The finding with what mends it, where one value does."""
    if finding.where in _MENDED_BY:
        return replace(finding, changes={finding.where: _MENDED_BY[finding.where]})
    if finding.where == "model.dtype" and recipe.model.dtype == "fp16":
        return replace(finding, changes={"model.dtype": "bf16"})
    if finding.where == "train.report_to":
        left = [name for name in recipe.train.report_to if f"tracker {name} " not in finding.detail]
        return replace(finding, changes={"train.report_to": left})
    return finding


def _dataset(notes: _Notes, found: FoundInputs, say: Say) -> DatasetBuild | None:
    """The dataset as it is built, and whether its sides are apart."""
    spec_path = found.spec_path
    if spec_path is None:
        return None
    server = found.teacher.server if found.teacher is not None else None

    def build() -> DatasetBuild:
        ensure_generated(spec_path, say=say, server=server)
        return build_dataset(spec_path, default_builds_root())

    built = notes.attempt("data", "dataset", build)
    if built is not None:
        notes.examine("data", "leaks", lambda: check_leaks(check_build(built)))
    return built


def _suites(notes: _Notes, found: FoundInputs) -> list[SuiteData]:
    """The items of every suite that has some."""

    def read(suite: Suite) -> SuiteData:
        n = found.recipe.eval.max_items
        data = load_suite_data(suite, dataset_spec=found.spec_path, max_items=n)
        check_units(suite, data.items, max_items=n)
        return data

    read_ones = [
        notes.attempt("suite", f"items of {suite.name}", partial(read, suite)) for suite in found.suites
    ]
    return [one for one in read_ones if one is not None]


def _rows(
    notes: _Notes, found: FoundInputs, build: DatasetBuild | None, suites: Sequence[SuiteData]
) -> tuple[list[Row], list[Row]]:
    """Train and validation rows without those that hold a question of a suite, and whether their answers agree."""
    if build is None or found.spec_path is None:
        return [], []
    spec_path = found.spec_path
    made = notes.attempt(
        "data", "questions of the suites", lambda: decontaminate(build, suite_questions(suites, spec_path))
    )
    clean, contamination = made or (build, {})
    if made is not None:
        notes.examine("data", "questions of the suites", lambda: check_contamination(contamination))
    train = notes.attempt("data", "train rows", lambda: train_rows(found.recipe, clean)) or []
    validation = notes.attempt("data", "validation rows", lambda: validation_rows(found.recipe, clean)) or []
    if train:
        notes.findings += answer_findings(found.recipe, train, len(validation))
    return train, validation


def _tokens(
    notes: _Notes, found: FoundInputs, rows: Sequence[Row], validation: Sequence[Row]
) -> tuple[tuple[Any, NewTokens] | None, Split | None]:
    """The tokenizer with what is new in it, and the train rows' tokens; what either shows."""
    recipe, source, config = found.recipe, found.source, found.config
    if source is None:
        return None, None
    made = notes.attempt("tokens", "tokenizer", lambda: tokenizer_of(recipe, source, found.start))
    if made is None or not rows:
        return made, None
    tokenizer, new = made
    vocabulary = vocabulary_of(config) + len(new.ids)

    def tokenise() -> tuple[Split, list[Finding]] | None:
        try:
            return tokenise_or_tell(recipe, config, rows, tokenizer)
        except UserError as error:
            refused = error
        told = partial(check_refused, rows, tokenizer, refused, train_on=recipe.data.train_on)
        notes.examine("tokens", "tokens", lambda: told(vocabulary=vocabulary))
        return None

    tokens = notes.attempt("tokens", "tokens", tokenise)
    if tokens is None:
        return made, None
    split, faults = tokens
    notes.findings += [*faults, *_validation(found, validation, tokenizer)]
    notes.findings += token_findings(rows, split, tokenizer, vocabulary=vocabulary)
    notes.findings += number_findings(split)
    return made, split


def _validation(found: FoundInputs, rows: Sequence[Row], tokenizer: Any) -> list[Finding]:
    """What would stop a run at its validation rows although its train rows are sound."""
    if not rows:
        return []
    made, faults = attempt(
        "data", "validation rows", lambda: tokenise_or_tell(found.recipe, found.config, rows, tokenizer)
    )
    faults += made[1] if made is not None else []
    return [replace(one, detail=f"of the validation rows: {one.detail}") for one in faults]


def _machine(
    notes: _Notes, found: FoundInputs, inputs: RunInputs | None, split: Split | None
) -> Forecasts | None:
    """Rate, disk and memory for a model of this size and rows of this length."""
    recipe, source = found.recipe, found.source
    if source is None:
        return None
    teacher = teacher_plan(inputs) if inputs is not None else None
    forecasts, faults = attempt(
        "memory",
        "memory forecast",
        lambda: forecasts_here(recipe, found.config, split, found.suites, teacher),
    )
    known = forecasts.training.n_parameters if forecasts is not None else source.n_parameters or 0
    if not faults:
        notes.findings += machine_findings(recipe, found.config, forecasts, n_parameters=known)
        return forecasts
    notes.examine("recipe", "learning rate", lambda: check_rate(recipe, known))
    told = {one.where for one in faults_in(notes.findings) if one.group == "recipe"}
    if all(one.where in told for one in faults):
        faults = [replace(skipped("memory forecast", "the faults of the recipe come first"), group="memory")]
    notes.findings += faults
    return None


def _power(inputs: RunInputs | None, data: SuiteData) -> Iterable[Finding]:
    """By the answers of the untuned arms, where a run of this recipe has them already."""
    untuned: list[Any] = []
    if inputs is not None:
        folder: Path = runs_root() / inputs.folder_name / "baseline" / data.suite.name
        with suppress(UserError):
            arms = data.suite.baseline_arms(inputs.recipe.eval.baselines)
            untuned = [read_records(folder, arm) for arm in arms]
    return check_power(data, untuned)
