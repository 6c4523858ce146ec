"""`finetune data card BUILD`: write the card (README.md) and the Croissant metadata of a build."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from finetune.cli.output import JsonFlag, emit


def card(
    build: Annotated[Path, typer.Argument(metavar="BUILD", help="The folder of a dataset build.")],
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Where to write both files (default: the build).")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Write README.md, with licence and source of every part, and croissant.json, which registries of data sets read."""
    from finetune.data.build import open_build
    from finetune.data.card import require_manifest, write_card

    manifest = open_build(build).manifest
    require_manifest(manifest, str(build))
    readme, croissant = write_card(out or build, manifest)
    emit({"card": str(readme), "croissant": str(croissant)}, f"{readme}\n{croissant}", as_json=as_json)
