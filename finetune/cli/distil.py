"""finetune distil: what a distillation needs of its teacher, made by itself."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from finetune.cli.output import JsonFlag, emit, note
from finetune.cli.servers import ServerKeyOption, ServerOption
from finetune.errors import UserError

app = typer.Typer(
    name="distil",
    help="Run a teacher once and keep what it says: finetune distil cache RECIPE",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@app.callback()
def group() -> None:
    """Run a teacher once and keep what it says: finetune distil cache RECIPE"""


@app.command()
def cache(
    recipe: Annotated[str, typer.Argument(help="Recipe: a path or a shipped name.")],
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", help="Override a key: --set distil.cache.k=32.", metavar="KEY=VALUE"),
    ] = None,
    server: ServerOption = None,
    server_model: Annotated[str | None, typer.Option(help="With --server: its name of the teacher.")] = None,
    server_key: ServerKeyOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Keep the teacher's top k, and its normaliser for every planned temperature, at every target token of a recipe's rows.

    Killed at any time, the same command goes on. A run of the recipe does the same before its training.
    """
    from finetune.cli.quiet import quiet_libraries

    quiet_libraries()
    from finetune.evaluation.server import ServerModel
    from finetune.pipeline.make_cache import fill_recipe_cache

    if (server is None) != (server_model is None):
        raise UserError(
            "--server and --server-model go together",
            where="--server",
            fix="--server http://localhost:8000/v1 --server-model NAME, the name that the server gives the teacher",
        )
    served = (
        ServerModel(server, server_model, server_key)
        if server is not None and server_model is not None
        else None
    )
    facts = fill_recipe_cache(recipe, overrides or [], server=served, say=note)
    emit(facts, "\n".join(_lines(facts)), as_json=as_json)


def _lines(facts: dict[str, Any]) -> list[str]:
    """The cache for people: size, mass and error by temperature."""
    on_disk = facts["bytes_on_disk"] / facts["targets"]
    lines = [
        f"teacher {facts['teacher']}: {facts['targets']} target tokens of {facts['rows']} rows in {facts['folder']}",
        f"{facts['formula']} a target token; {on_disk:.2f} on disk with the headers of its shards",
    ]
    for temperature, covered in facts["coverage"].items():
        line = (
            f"temperature {temperature}: the top {facts['k']} hold {covered['mean']:.2%} of the mass "
            f"(least {covered['least']:.2%}; below 90 % at {covered['share_below_0.9']:.1%} of the tokens)"
        )
        if (error := facts.get("reconstruction", {}).get(temperature)) is not None:
            line += (
                f"; error on {error['sampled_targets']} tokens, KL in nats: rounding {error['rounding_kl']['mean']:.1e}, "
                f"all that is not kept {error['uniform_tail_kl']['mean']:.1e}"
            )
        lines.append(line)
    return lines
