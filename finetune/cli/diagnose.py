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

    Reads events.jsonl only; a run that still goes on is read as far as it is, and one that went back after a divergence
    as it went on from there: what was done about it is told behind the findings.
    """
    from finetune.cli.watch import find_run
    from finetune.doctor.diagnosis import diagnose, events_of
    from finetune.telemetry.divergence import rewind_sentence

    folder = find_run(run)
    events = events_of(folder)
    found = diagnose(events)
    rewinds = [event for event in events if event["event"] == "rewind"]
    payload = {
        "run": str(folder),
        "shape": found[0].shape,
        "findings": [one.to_dict() for one in found],
        "rewinds": rewinds,
    }
    told = [*map(str, found), *map(rewind_sentence, rewinds)]
    emit(payload, "\n".join(told), as_json=as_json)
