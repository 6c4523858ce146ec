"""The checks that cost seconds, over what a recipe names: the same for `finetune doctor` and before the baseline of a run."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from finetune.data.prefixes import longest_pack
from finetune.data.rows import Row
from finetune.data.tokenise import TokenisedSplit
from finetune.doctor.environment import (
    check_accelerator,
    check_disk,
    check_pins,
    check_versions,
    installed_versions,
    read_machine,
)
from finetune.doctor.finding import Finding, examine, faults_in, warning
from finetune.doctor.judgements import check_judgements, check_useless
from finetune.doctor.memory import Room, check_forecast, read_room
from finetune.doctor.rates import check_rate
from finetune.doctor.rows import check_answers, check_cuts, check_number, check_sides
from finetune.doctor.tokens import check_tokens
from finetune.errors import ExitCode, UserError
from finetune.evaluation.suite import Suite
from finetune.model.documents import attends_to_everything
from finetune.paths import runs_root
from finetune.pipeline.methods import Split, longest_example, plain_rows
from finetune.plan.architecture import NoMemoryModelError, read_architecture
from finetune.plan.fits import Fit, fits
from finetune.plan.forecast import Device, Forecast
from finetune.plan.memory import forecast_generation, forecast_training
from finetune.plan.teacher import TeacherPlan
from finetune.recipe.schema import Recipe
from finetune.training.memory_saving import config_drops_out

# Rows whose tokens are looked at; the checks need examples, not the set.
_ROWS_LOOKED_AT = 256


@dataclass(frozen=True, slots=True)
class Forecasts:
    """What a run will hold at its worst: while it trains, and while answers are written for the evaluation.

    `of(recipe)` makes the pair anew for a changed recipe.
    """

    training: Forecast
    evaluation: Forecast
    of: Callable[[Recipe], Forecasts]


def forecasts_here(
    recipe: Recipe,
    config: Mapping[str, Any],
    rows: Split | None,
    suites: Sequence[Suite],
    teacher: TeacherPlan | None = None,
) -> Forecasts | None:
    """The memory forecasts for this machine and the rows that there are; `teacher`: who would run beside the student.

    Without rows the longest one is taken to have data.max_tokens. None for a model that no forecast is known for: it can be
    trained all the same.
    """
    longest_row = recipe.data.max_tokens if rows is None else longest_example(recipe, rows)
    device: Device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        longest = None if rows is None else _longest_forward(recipe, config, rows, longest_row, device)
        training = forecast_training(
            recipe,
            config,
            longest_pack_tokens=longest,
            device=device,
            world_size=int(os.environ.get("WORLD_SIZE", "1")),
            teacher=teacher,
        )
        # Baselines are answered by the base as it is on disk, whatever the training quantizes.
        evaluation = forecast_generation(
            config,
            recipe.eval.batch_size,
            min(longest_row, recipe.data.max_tokens),
            max((suite.decoding.max_new_tokens for suite in suites), default=1),
            recipe.eval.dtype,
            device=device,
            behind_training=recipe.model.dtype != "fp32",
        )
    except NoMemoryModelError:
        return None

    def again(changed: Recipe) -> Forecasts:
        found = forecasts_here(changed, config, rows, suites, teacher)
        assert found is not None, "the model is the same"
        return found

    return Forecasts(training, evaluation, again)


def _longest_forward(
    recipe: Recipe, config: Mapping[str, Any], rows: Split, longest_row: int, device: Device
) -> int:
    """Tokens of the longest row or pack that goes through the model; that of a full pack where it is not known."""
    train = recipe.train
    if not train.packing:
        return longest_row
    if not isinstance(rows, TokenisedSplit) or longest_row > train.pack_tokens:
        return train.pack_tokens
    # On CUDA the kernel is handed the keys and values of a beginning once for every row that goes on from it.
    share = device == "cpu" and recipe.shares_prefixes and _can_share(config)
    return longest_pack(rows.rows, train.pack_tokens, share=share)


def _can_share(config: Mapping[str, Any]) -> bool:
    """Whether a model lets rows go on from one another, as far as its configuration says; training tries it out."""
    from transformers import AutoConfig

    read_architecture(config)
    text = AutoConfig.for_model(**(config.get("text_config") or config))  # with what a file leaves out
    return attends_to_everything(text) and not config_drops_out(text)


def environment_findings(dtype: str) -> Iterator[Finding]:
    """The machine, which no recipe is needed for."""
    installed = installed_versions()
    group = partial(examine, "environment")
    yield from group("versions", lambda: check_versions(installed))
    yield from group("tested versions", lambda: check_pins(installed))
    yield from group("accelerator", lambda: check_accelerator(read_machine(), dtype))


def row_findings(
    recipe: Recipe,
    config: Mapping[str, Any],
    forecasts: Forecasts | None,
    train: Sequence[Row],
    tokenised: Split,
    tokenizer: Any,
    *,
    n_parameters: int,
    n_validation: int,
    n_added_tokens: int = 0,
) -> Iterator[Finding]:
    """What the rows, their tokens and the forecasts show. `train` are the rows before they were tokenised; `n_parameters`
    those of the base."""
    yield from token_findings(train, tokenised, tokenizer, vocabulary=vocabulary_of(config) + n_added_tokens)
    yield from number_findings(tokenised)
    yield from answer_findings(recipe, train, n_validation)
    yield from machine_findings(recipe, config, forecasts, n_parameters=n_parameters)


def token_findings(
    train: Sequence[Row], tokenised: Split, tokenizer: Any, *, vocabulary: int
) -> Iterator[Finding]:
    """What the tokens of the first rows show; pairs of answers have none of their own."""
    plain = plain_rows(tokenised)[:_ROWS_LOOKED_AT]
    if plain:
        looked_at = train[:_ROWS_LOOKED_AT]
        yield from examine(
            "tokens", "tokens", lambda: check_tokens(looked_at, plain, tokenizer, vocabulary=vocabulary)
        )


def number_findings(tokenised: Split) -> Iterator[Finding]:
    """How many rows are left, and what their length cost."""
    yield from examine("data", "number of rows", lambda: check_number(len(tokenised.rows)))
    yield from examine("data", "cut rows", lambda: check_cuts(tokenised.counts))
    yield from examine("data", "pairs left out", lambda: check_useless(tokenised.counts))


def answer_findings(recipe: Recipe, train: Sequence[Row], n_validation: int) -> Iterator[Finding]:
    """What the rows show before any tokenizer."""
    yield from examine("data", "answers", lambda: check_answers(train, seed=recipe.seed))
    yield from check_judgements(recipe, train)
    sides = {"validation": n_validation}
    yield from examine(
        "data", "validation rows", lambda: check_sides(sides, recipe.train.validate_every_steps)
    )


def machine_findings(
    recipe: Recipe, config: Mapping[str, Any], forecasts: Forecasts | None, *, n_parameters: int
) -> Iterator[Finding]:
    """The learning rate for this size, and whether disk and memory suffice."""
    yield from examine("recipe", "learning rate", lambda: check_rate(recipe, n_parameters))
    if forecasts is None:
        yield from examine("memory", "memory forecast", lambda: not_forecast(config))
        return
    keep, known = recipe.train.keep_checkpoints, forecasts
    n_trainable = known.training.n_trainable
    yield from examine("environment", "disk", lambda: check_disk(runs_root(), n_trainable, keep))
    room = read_room()
    yield from examine(
        "memory",
        "memory forecast",
        lambda: check_forecast(known.training, room, _fit(recipe, known, room, lambda one: one.training)),
    )
    yield from examine(
        "memory",
        "evaluation forecast",
        lambda: check_forecast(
            known.evaluation,
            room,
            _fit(recipe, known, room, lambda one: one.evaluation),
            name="evaluation forecast",
            where="eval.batch_size",
            certain_bytes=known.evaluation.terms_bytes["weights"] + known.evaluation.terms_bytes["process"],
        ),
    )


def not_forecast(config: Mapping[str, Any]) -> Finding:
    """A model without a forecast, and why."""
    try:
        read_architecture(config)
    except NoMemoryModelError as error:
        (one,) = error.faults
        return warning("memory forecast", one.what, one.fix, where=one.where or "model.id")
    raise AssertionError("a model that can be read has a forecast")


def _fit(
    recipe: Recipe, forecasts: Forecasts, room: Room, choose: Callable[[Forecasts], Forecast]
) -> Fit | None:
    """What would make it fit, worked out only when it does not; `choose`: the forecast that is meant."""
    needed = choose(forecasts).total_bytes
    if needed <= room.available_bytes:
        return None
    limit = room.available_bytes if needed <= room.total_bytes else room.total_bytes
    return fits(choose(forecasts), limit, recipe, lambda candidate: choose(forecasts.of(candidate)))


def vocabulary_of(config: Mapping[str, Any]) -> int:
    """Rows of the embedding, by config.json; models of several parts keep it with their text part."""
    found = config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size")
    return int(found) if found else 2**62


def tell(findings: Sequence[Finding], say: Callable[[str], None]) -> None:
    """Say the warnings; raise UserError with all faults, if there are any."""
    for finding in findings:
        if finding.status == "warning":
            say(f"warning: {finding.check}: {finding.detail}\n  {finding.remedy}")
    found = faults_in(findings)
    if found:
        codes = {finding.exit_code for finding in found}
        raise UserError(
            [finding.as_fault() for finding in found],
            exit_code=codes.pop() if len(codes) == 1 else ExitCode.USER_ERROR,
        )
