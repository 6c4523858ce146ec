"""Prices on the command line: they take the place of those in the recipe (`eval.prices`), for one comparison."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from finetune.recipe.schema import PricesSection

PerHourOption = Annotated[
    float | None,
    typer.Option(
        "--price-per-hour", min=0.0, max=1e12, help="Price of your machine for an hour; prices every query."
    ),
]
InputPriceOption = Annotated[
    float | None,
    typer.Option("--input-price", min=0.0, max=1e12, help="Price of a million prompt tokens instead."),
]
OutputPriceOption = Annotated[
    float | None,
    typer.Option("--output-price", min=0.0, max=1e12, help="Of a million output tokens; default: the same."),
]


def priced(
    declared: PricesSection, per_hour: float | None, input_price: float | None, output_price: float | None
) -> PricesSection:
    """The declared prices with those of the flags, which replace either kind. Raises UserError for flags that contradict."""
    from pydantic import ValidationError

    from finetune.errors import UserError
    from finetune.recipe.schema import PricesSection

    given = {
        "per_hour": per_hour,
        "input_per_million": input_price,
        "output_per_million": output_price,
    }
    if all(price is None for price in given.values()):
        return declared
    kept = declared.model_dump(include={"tuning", "serving_per_month", "months"})
    try:
        return PricesSection(**kept, **given)
    except ValidationError:
        raise UserError(
            "the prices contradict each other",
            where="--price-per-hour, --input-price, --output-price",
            fix="give --price-per-hour, or --input-price with or without --output-price",
        ) from None
