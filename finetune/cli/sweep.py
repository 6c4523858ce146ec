"""`finetune sweep RECIPE --over KEY=VALUES`: which values, judged on validation; how much more data would bring."""

from __future__ import annotations

from typing import Annotated

import typer

from finetune.cli.output import JsonFlag, emit, note

StepBudget = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Budget in optimizer steps: so many for the finalists, fewer before; default: the recipe's passes over ever more rows.",
    ),
]


def sweep(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A recipe's path or shipped name.")],
    over: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUES", help="train.learning_rate=1e-5..1e-3:log7, or adapter.rank=8,16,32."
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override a dotted key of the recipe."),
    ] = None,
    within: Annotated[
        str | None,
        typer.Option(
            metavar="KEY", help="Each value of this key keeps a candidate to the end, e.g. adapter.kind."
        ),
    ] = None,
    max_trials: Annotated[
        int | None,
        typer.Option(min=1, help="Try so many candidates, drawn by Optuna; default: all of the grid."),
    ] = None,
    steps: StepBudget = None,
    curve: Annotated[
        bool,
        typer.Option(
            "--curve",
            help="Train the winner on 12, 25 and 50 % of the rows, too, the least of them with three seeds: would more data help?",
        ),
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Find the values of a recipe by many short trainings and few long ones, compared on validation rows, never on test.

    Without --over and with --curve: how the loss falls with more data. A killed sweep goes on where it was.
    """
    from finetune.cli.quiet import quiet_libraries
    from finetune.errors import UserError
    from finetune.recipe.search_space import parse_axes

    axes = parse_axes(over or [])
    if not axes and not curve:
        raise UserError(
            "there is nothing to search", fix="add --over train.learning_rate=1e-5..1e-3:log7, or --curve"
        )
    quiet_libraries()
    from finetune.pipeline.sweep import sweep as search

    result = search(
        recipe,
        axes,
        overrides=overrides or [],
        within=within,
        max_trials=max_trials,
        steps=steps,
        curve=curve,
        say=note,
    )
    emit(result.to_dict(), "\n".join(result.lines()), as_json=as_json)
