"""The checks that cost seconds, over what a recipe names: the same for `finetune doctor` and before the baseline of a run."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from finetune.data.rows import Row
from finetune.doctor.environment import (
    check_accelerator,
    check_disk,
    check_pins,
    check_versions,
    installed_versions,
    read_machine,
)
from finetune.doctor.finding import Finding, examine, faults_in
from finetune.doctor.memory import Room, check_forecast, read_room
from finetune.doctor.rates import check_rate
from finetune.doctor.rows import check_rows, check_sides
from finetune.doctor.tokens import check_tokens
from finetune.errors import ExitCode, UserError
from finetune.paths import runs_root
from finetune.pipeline.methods import Split, longest_example, plain_rows
from finetune.plan.fits import Fit, fits
from finetune.plan.forecast import Forecast
from finetune.plan.memory import forecast_training
from finetune.plan.teacher import TeacherPlan
from finetune.recipe.schema import Recipe

# Rows whose tokens are looked at; the checks need examples, not the set.
_ROWS_LOOKED_AT = 256


def forecast_here(
    recipe: Recipe, config: Mapping[str, Any], rows: Split, teacher: TeacherPlan | None = None
) -> Forecast:
    """The memory forecast for this machine and the rows that there are; `teacher`: who would run beside the student."""
    longest = recipe.train.pack_tokens if recipe.train.packing else longest_example(rows)
    return forecast_training(
        recipe,
        config,
        longest_pack_tokens=longest,
        device="cuda" if torch.cuda.is_available() else "cpu",
        world_size=int(os.environ.get("WORLD_SIZE", "1")),
        teacher=teacher,
    )


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
    forecast: Forecast,
    train: Sequence[Row],
    tokenised: Split,
    tokenizer: Any,
    *,
    n_validation: int,
    n_added_tokens: int = 0,
    teacher: TeacherPlan | None = None,
) -> Iterator[Finding]:
    """What the rows, their tokens and the forecast show. `train` are the rows before they were tokenised."""
    vocabulary = _vocabulary(config) + n_added_tokens
    plain = plain_rows(tokenised)[:_ROWS_LOOKED_AT]
    if plain:
        looked_at = train[:_ROWS_LOOKED_AT]
        yield from examine(
            "tokens", "tokens", lambda: check_tokens(looked_at, plain, tokenizer, vocabulary=vocabulary)
        )
    yield from examine(
        "data", "rows", lambda: check_rows(train, len(tokenised.rows), tokenised.counts, seed=recipe.seed)
    )
    sides = {"validation": n_validation}
    yield from examine(
        "data", "validation rows", lambda: check_sides(sides, recipe.train.validate_every_steps)
    )
    yield from examine("recipe", "learning rate", lambda: check_rate(recipe, forecast.n_parameters))
    keep = recipe.train.keep_checkpoints
    yield from examine("environment", "disk", lambda: check_disk(runs_root(), forecast.n_trainable, keep))
    room = read_room()
    yield from examine(
        "memory",
        "memory forecast",
        lambda: check_forecast(forecast, room, _fit(recipe, config, forecast, tokenised, room, teacher)),
    )


def _fit(
    recipe: Recipe,
    config: Mapping[str, Any],
    forecast: Forecast,
    rows: Split,
    room: Room,
    teacher: TeacherPlan | None,
) -> Fit | None:
    """What would make it fit, worked out only when it does not."""
    if forecast.total_bytes <= room.available_bytes:
        return None
    limit = room.available_bytes if forecast.total_bytes <= room.total_bytes else room.total_bytes
    return fits(forecast, limit, recipe, lambda candidate: forecast_here(candidate, config, rows, teacher))


def _vocabulary(config: Mapping[str, Any]) -> int:
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
