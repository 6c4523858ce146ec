"""`finetune diagnose RUN`: what the curve of a run means, and what to do now."""

from __future__ import annotations

from typing import Annotated

import typer

from finetune.cli.output import JsonFlag, emit


def diagnose(
    run: Annotated[
        str,
        typer.Argument(help="Run folder, or the name of a recipe for its newest run.", show_default=False),
    ],
    as_json: JsonFlag = False,
) -> None:
    """Name the shape of a run's curve with evidence and remedy: healthy, spikes and their rows, divergence, overfitting, a
    rate too low, no signal, data too hard or too easy, unshuffled order, leaking throughput, fp16 overflow.

    Reads events.jsonl only; a run that still goes on is read as far as it is.
    """
    from finetune.cli.watch import find_run
    from finetune.doctor.diagnosis import diagnose_run

    folder = find_run(run)
    found = diagnose_run(folder)
    payload = {"run": str(folder), "shape": found[0].shape, "findings": [one.to_dict() for one in found]}
    emit(payload, "\n".join(map(str, found)), as_json=as_json)
