"""Flags of `finetune plan` that would be passed over: refused, so that nobody reads a number that they did not ask for."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from finetune.errors import UserError

if TYPE_CHECKING:
    from finetune.cli.plan_page import Forecasts
    from finetune.recipe.schema import Recipe

PROBE_STEPS = 3


def refuse_unused(
    *,
    train_tokens: int | None,
    tokens_per_second: float | None,
    price_per_hour: float | None,
    probe: bool,
    probe_steps: int | None,
) -> None:
    """Raise UserError for a rate or a price without a length, or beside a probe that measures it; for steps of no probe."""
    told: dict[str, Any] = {"--train-tokens": train_tokens, "--tokens-per-second": tokens_per_second}
    if probe and (given := _given(told)):
        raise UserError(
            "a probe counts the tokens and measures the rate by itself",
            where=given,
            fix="leave out --probe, or these",
        )
    if probe_steps is not None and not probe:
        raise UserError("there is no probe", where="--probe-steps", fix="add --probe, or leave it out")
    if price_per_hour is not None and not math.isfinite(price_per_hour):
        raise UserError(
            f"{price_per_hour} is not a price", where="--price-per-hour", fix="give a number from 0 up"
        )
    told = {"--tokens-per-second": tokens_per_second, "--price-per-hour": price_per_hour}
    if train_tokens is None and not probe and (given := _given(told)):
        raise UserError(
            "no time and no price follow without the length of the training",
            where=given,
            fix="add --probe, which measures it here, or --train-tokens with the tokens of one epoch",
        )


def refuse_for_recipe(
    recipe: Recipe, forecasts: Forecasts, train_tokens: int | None, rows: int | None
) -> None:
    """Raise UserError for flags that mean nothing to this recipe, or cannot be true of it."""
    from finetune.plan.memory import most_row_tokens

    if rows is not None and (recipe.train.packing or train_tokens is None):
        raise UserError(
            "rows count the steps of a training without packing, beside --train-tokens",
            where="--rows",
            fix="leave it out" if recipe.train.packing else "add --train-tokens, or leave it out",
        )
    if rows is not None and train_tokens is not None and train_tokens < rows:
        raise UserError(
            f"{rows:,} rows cannot have {train_tokens:,} tokens together",
            where="--train-tokens",
            fix="give the tokens of one epoch",
        )
    limit = most_row_tokens(recipe)
    if forecasts.longest_pack is not None and forecasts.longest_pack > limit:
        raise UserError(
            f"no pack or row is longer than {limit} tokens with this recipe",
            where="--longest-pack",
            fix=f"raise {'train.pack_tokens' if recipe.train.packing else 'data.max_tokens'} with --set, or give at most {limit}",
        )
    if forecasts.n_devices == 1 and forecasts.sharding not in (None, "none") and forecasts.offload == "none":
        raise UserError(
            f"{forecasts.sharding} shares a model between devices, and there is one",
            where="--sharding",
            fix="add --devices 8, or --offload where memory is short",
        )


def _given(told: dict[str, Any]) -> str:
    """The flags that are given, as a place."""
    return ", ".join(flag for flag, value in told.items() if value is not None)
