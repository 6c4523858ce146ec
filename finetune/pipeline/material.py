"""What a recipe would train on and be asked, made ready as a run makes it: for the doctor and for probes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from finetune.data.build import DatasetBuild, build_dataset, default_builds_root
from finetune.data.decontaminate import decontaminate
from finetune.data.pair_tokens import PreferenceSplit
from finetune.data.rows import Row
from finetune.data.tokenise import TokenisedSplit
from finetune.doctor.finding import Finding, faults_of
from finetune.errors import UserError
from finetune.evaluation.suite_data import SuiteData
from finetune.model.new_tokens import NewTokens, add_new_tokens
from finetune.model.source import ModelSource
from finetune.pipeline.before import tokenizer_at_start
from finetune.pipeline.checks import Forecasts, forecasts_here
from finetune.pipeline.decontaminate import suite_questions
from finetune.pipeline.distil import teacher_plan
from finetune.pipeline.generate import ensure_generated
from finetune.pipeline.inputs import RunInputs
from finetune.pipeline.methods import Split, tokenise_side
from finetune.pipeline.preflight import check_packs
from finetune.pipeline.starts import AdapterStart
from finetune.recipe.schema import Recipe
from finetune.training.mismatched import trained_tokens

_ROUND_TO = 8
_NO_LIMIT = 2**31

Say = Callable[[str], None]


@dataclass(frozen=True)
class Material:
    """What the checks look at, as a run of the recipe would have it."""

    inputs: RunInputs
    suites: Sequence[SuiteData]
    rows: Sequence[Row]
    split: Split
    tokenizer: Any
    new: NewTokens
    forecasts: Forecasts | None

    @property
    def n_parameters(self) -> int:
        """Those of the base."""
        if self.forecasts is not None:
            return self.forecasts.training.n_parameters
        return self.inputs.source.n_parameters or 0


def gather_material(inputs: RunInputs, say: Say) -> Material:
    """The material of a sound recipe. Raises UserError at the first thing that is wrong."""
    recipe = inputs.recipe
    ensure_generated(inputs.spec_path, say=say, server=inputs.teacher.server if inputs.teacher else None)
    built = build_dataset(inputs.spec_path, default_builds_root())
    suites = [inputs.data_of(suite) for suite in inputs.suites]
    build, _ = decontaminate(built, suite_questions(suites, inputs.spec_path))
    tokenizer, new = tokenizer_of(recipe, inputs.source, inputs.start)
    rows = train_rows(recipe, build)
    split = tokenise_side(recipe, rows, tokenizer)
    check_packs(recipe, split)
    forecasts = forecasts_here(recipe, inputs.config, split, inputs.suites, teacher_plan(inputs))
    return Material(inputs, suites, rows, split, tokenizer, new, forecasts)


def tokenizer_of(recipe: Recipe, source: ModelSource, start: AdapterStart | None) -> tuple[Any, NewTokens]:
    """The tokenizer that training uses, and what the recipe adds to it."""
    tokenizer = tokenizer_at_start(source, start)
    if not recipe.model.new_tokens or start is not None:
        return tokenizer, NewTokens()
    return tokenizer, add_new_tokens(tokenizer, recipe.model.new_tokens)


def train_rows(recipe: Recipe, build: DatasetBuild) -> list[Row]:
    """The rows that the recipe learns from."""
    return build.rows("train")[: recipe.data.max_train_rows]


def validation_rows(recipe: Recipe, build: DatasetBuild) -> list[Row]:
    """The rows that the recipe validates on."""
    return build.rows("validation")[: recipe.data.max_validation_rows]


def tokenise_or_tell(
    recipe: Recipe, config: Mapping[str, Any], rows: Sequence[Row], tokenizer: Any
) -> tuple[Split, list[Finding]]:
    """The rows' tokens, and findings where some are longer than the recipe or its packs allow; the other checks see those
    rows too. Raises UserError for rows that cannot be tokenised at all."""
    try:
        split = tokenise_side(recipe, rows, tokenizer)
    except UserError as error:
        if recipe.data.long_rows != "error" or error.faults[0].where != "data.max_tokens":
            raise
        data = recipe.data.model_copy(update={"max_tokens": _NO_LIMIT})
        split = tokenise_side(recipe.model_copy(update={"data": data}), rows, tokenizer)
        longest = max(len(row.input_ids) for row in split.rows)
        return split, _of_data("long rows", error, _longer(recipe, config, longest))
    try:
        check_packs(recipe, split)
    except UserError as error:
        if error.faults[0].where != "train.pack_tokens":
            return split, _of_data("turn weights", error, {})
        wanted = _rounded(max(example_lengths(recipe, split)))
        return split, _of_data("packs", error, {"train.pack_tokens": wanted})
    return split, []


def _of_data(check: str, error: UserError, changes: Mapping[str, Any]) -> list[Finding]:
    return [replace(one, group="data", changes=changes) for one in faults_of(check, error)]


def _longer(recipe: Recipe, config: Mapping[str, Any], longest: int) -> dict[str, Any]:
    """Limits that let the longest row in, where the model's context does."""
    wanted = _rounded(longest)
    context = config.get("max_position_embeddings")
    if context and wanted > int(context):
        return {}
    changes: dict[str, Any] = {"data.max_tokens": wanted}
    if recipe.train.packing and recipe.train.pack_tokens < wanted:
        changes["train.pack_tokens"] = wanted
    return changes


def _rounded(tokens: int) -> int:
    return math.ceil(tokens / _ROUND_TO) * _ROUND_TO


def example_lengths(recipe: Recipe, split: Split) -> list[int]:
    """Tokens of every row of a side as they are trained on, all answers to a prompt included."""
    if isinstance(split, PreferenceSplit):
        return trained_tokens(split.rows, recipe.train)
    assert isinstance(split, TokenisedSplit)
    return [len(row.input_ids) for row in split.rows]
