"""Money: what the tuning costs, what a query costs before and after, and the volume from which the tuning pays.

Prices are in one currency, whatever it is; volumes in millions of tokens.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from finetune.errors import UserError

_MILLION = 1_000_000
_CURVE_POINTS = 13
_CURVE_REACH = 2.0  # the curve runs to this multiple of the break-even volume


def training_cost(seconds: float, price_per_hour: float, *, n_devices: int = 1) -> float:
    """Price of `seconds` on `n_devices`, each at `price_per_hour`."""
    return seconds / 3600 * price_per_hour * n_devices


def query_cost(
    prompt_tokens: float,
    output_tokens: float,
    *,
    input_price_per_million: float,
    output_price_per_million: float | None = None,
) -> float:
    """Price of one query. A tuned model needs no examples in its prompt: compare with the prompt length of each."""
    output_price = input_price_per_million if output_price_per_million is None else output_price_per_million
    return (prompt_tokens * input_price_per_million + output_tokens * output_price) / _MILLION


@dataclass(frozen=True, slots=True)
class CostPoint:
    """Cost a month of both ways at one volume."""

    million_tokens_per_month: float
    large_model: float
    tuned_model: float


@dataclass(frozen=True, slots=True)
class BreakEven:
    """From which monthly volume a tuned small model is cheaper than the large one.

    `million_tokens_per_month` counts the tuning and the GPU; `of_which_gpu_only` is the volume once the tuning is paid
    off. Both are None when the small model saves nothing on a token: then no volume pays.
    """

    million_tokens_per_month: float | None
    of_which_gpu_only: float | None
    fixed_cost_per_month: float
    saving_per_million_tokens: float
    curve: tuple[CostPoint, ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class BreakEvenQueries:
    """From how many queries a month the tuned model is cheaper than the baseline; None when no volume pays."""

    queries_per_month: float | None
    fixed_cost_per_month: float
    saving_per_query: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def break_even_queries(
    *,
    tuning_cost: float,
    amortise_months: float,
    baseline_query_price: float,
    tuned_query_price: float,
    serving_per_month: float = 0.0,
) -> BreakEvenQueries:
    """Queries Q with Q·baseline = Q·tuned + serving + tuning / months: fixed cost over the saving on a query."""
    fixed = serving_per_month + tuning_cost / amortise_months
    saving = baseline_query_price - tuned_query_price
    return BreakEvenQueries(fixed / saving if saving > 0 else None, fixed, saving)


def break_even(
    *,
    tuning_cost: float,
    amortise_months: float,
    large_price_per_million_tokens: float,
    small_price_per_million_tokens: float,
    gpu_per_month: float = 0.0,
) -> BreakEven:
    """Volume V with V·large = V·small + gpu + tuning / months: fixed cost over the saving on a token.

    Raises UserError for a negative price or no months.
    """
    given = {
        "--tuning-cost": tuning_cost,
        "--large-price": large_price_per_million_tokens,
        "--small-price": small_price_per_million_tokens,
        "--gpu-per-month": gpu_per_month,
    }
    for flag, value in given.items():
        if value < 0 or not math.isfinite(value):
            raise UserError(f"{value} is not a price", where=flag, fix="give a number from 0 up")
    if not amortise_months > 0 or not math.isfinite(amortise_months):
        raise UserError(
            f"the cost cannot be spread over {amortise_months} months",
            where="--months",
            fix="give how long the tuned model will be used, e.g. 12",
        )
    fixed = gpu_per_month + tuning_cost / amortise_months
    saving = large_price_per_million_tokens - small_price_per_million_tokens
    volume = fixed / saving if saving > 0 else None
    gpu_only = gpu_per_month / saving if saving > 0 else None
    reach = _CURVE_REACH * volume if volume else 1000.0
    curve = tuple(
        CostPoint(
            million_tokens_per_month=reach * step / (_CURVE_POINTS - 1),
            large_model=reach * step / (_CURVE_POINTS - 1) * large_price_per_million_tokens,
            tuned_model=fixed + reach * step / (_CURVE_POINTS - 1) * small_price_per_million_tokens,
        )
        for step in range(_CURVE_POINTS)
    )
    return BreakEven(volume, gpu_only, fixed, saving, curve)
