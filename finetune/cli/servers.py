"""Servers on the command line: one that runs, by URL, or one to start for this command."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer


class Serve(StrEnum):
    """Servers that can be started for a run."""

    vllm = "vllm"


ServerOption = Annotated[
    str | None,
    typer.Option(
        metavar="URL", help="Let an OpenAI-compatible server answer, e.g. http://localhost:8000/v1."
    ),
]
ServerBaseOption = Annotated[str, typer.Option(help="With --server: its name of the base model.")]
ServerTunedOption = Annotated[
    str, typer.Option(help="With --server: its name of the tuned model or adapter.")
]
ServerKeyOption = Annotated[
    str | None, typer.Option(help="With --server: environment variable that holds the API key.")
]
ServeOption = Annotated[
    Serve | None, typer.Option(help="Start this server for base and tuned model, and end it afterwards.")
]
ServeArgumentsOption = Annotated[
    list[str] | None,
    typer.Option("--serve-argument", help="With --serve: one more argument, e.g. --tensor-parallel-size=2."),
]
ServeTimeoutOption = Annotated[
    float, typer.Option(min=1.0, help="With --serve: seconds until it must be ready.")
]
