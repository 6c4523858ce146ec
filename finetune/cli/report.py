"""`finetune report RUN`: write the page of a run folder again, from the files that are in it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from finetune.cli.output import JsonFlag, emit


def report(
    run: Annotated[
        Path, typer.Argument(help="Run folder, as `finetune run` printed it.", show_default=False)
    ],
    as_json: JsonFlag = False,
) -> None:
    """Write report.html of a run folder again and print its path."""
    from finetune.report import write_report

    path = write_report(run)
    emit({"report": str(path), "bytes": path.stat().st_size}, str(path), as_json=as_json)
