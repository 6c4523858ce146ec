"""`finetune merge search RECIPE`: several merges built, judged on one side, the winner confirmed once on the other."""

from __future__ import annotations

from typing import Annotated

import typer

from finetune.cli.output import JsonFlag, emit, note


def search(
    recipe: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE", help="A search, by path or shipped name (merge/home_intents_average)."
        ),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Override a dotted key of the recipe, e.g. max_items=20."
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the merges that would be tried, and stop.")
    ] = False,
    as_json: JsonFlag = False,
) -> int:
    """Try several merges of the same models, compare each with every parent and the base, and confirm the best one.

    Chosen on validation items, confirmed once on test items; the exit code is that of a gate: 0, 10 regressed,
    11 inconclusive, 12 no evidence. A search that was killed continues when the same command is given again.
    """
    from finetune.cli.quiet import quiet_libraries
    from finetune.paths import find_declarative
    from finetune.recipe.merge_search_loader import load_search

    loaded = load_search(find_declarative("searches", recipe), overrides or ())
    if dry_run:
        names = [candidate.name for candidate in loaded.candidates]
        emit({"name": loaded.recipe.name, "candidates": names}, "\n".join(names), as_json=as_json)
        return 0
    quiet_libraries()
    from finetune.evaluation.merge_screen import search_lines
    from finetune.pipeline.manifest import short_path
    from finetune.pipeline.merge_search import search_merges

    done = search_merges(loaded, say=note)
    folder = short_path(done.folder.absolute())
    emit({"folder": folder, **done.result}, "\n".join(search_lines(done.result, folder)), as_json=as_json)
    return done.exit_code
