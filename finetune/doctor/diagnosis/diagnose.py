"""All readings of a curve, ordered: what makes the others meaningless comes first."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from finetune.doctor.diagnosis.curve import Curve, read_curve
from finetune.doctor.diagnosis.finding import PRECEDENCE, Diagnosis, Shape
from finetune.doctor.diagnosis.fit import find_overfitting
from finetune.doctor.diagnosis.flat import find_flat, find_near_zero, find_no_signal, find_plateau
from finetune.doctor.diagnosis.machine import find_leak, find_overflow
from finetune.doctor.diagnosis.order import find_epoch_steps, find_regular_steps
from finetune.doctor.diagnosis.spikes import find_divergence, find_recurring, find_spike
from finetune.errors import UserError
from finetune.telemetry.events import read_events

LEAST_STEPS = 10
_READINGS: tuple[Callable[[Curve], Diagnosis | None], ...] = (
    find_overflow,
    find_no_signal,
    find_near_zero,
    find_divergence,
    find_regular_steps,
    find_recurring,
    find_flat,
    find_overfitting,
    find_leak,
    find_spike,
    find_plateau,
    find_epoch_steps,
)
_LATE: frozenset[Shape] = frozenset({"data_too_hard", "data_too_easy", "regular_steps", "throughput_leak"})
# Notes that name the run all the same: a shape to know, with nothing to do.
_NAMING: frozenset[Shape] = frozenset({"plateau_then_fall", "spike"})
# A shape -> what it explains: those are not said beside it.
_EXPLAINS: dict[Shape, frozenset[Shape]] = {
    "fp16_overflow": frozenset(
        {"no_signal", "rate_too_low", "data_too_hard", "data_too_easy", "plateau_then_fall"}
    ),
    "no_signal": frozenset({"rate_too_low", "data_too_hard", "data_too_easy"}),
    "near_zero_loss": frozenset(
        {"data_too_easy", "spike", "recurring_spikes", "overfitting", "plateau_then_fall"}
    ),
    "divergence": frozenset(
        {"spike", "recurring_spikes", "data_too_hard", "data_too_easy", "plateau_then_fall"}
    ),
    "regular_steps": frozenset(
        {"divergence", "spike", "recurring_spikes", "epoch_steps", "plateau_then_fall"}
    ),
    "recurring_spikes": frozenset({"spike"}),
    "overfitting": frozenset({"epoch_steps"}),
}


def diagnose(events: Sequence[dict[str, Any]]) -> list[Diagnosis]:
    """Every shape found in the events of a run (`read_events`), the one that names the run first; never empty."""
    curve = read_curve(events)
    if curve.n < LEAST_STEPS and not curve.has_diverged:
        return [_too_short(curve)]
    found = [diagnosis for reading in _READINGS if (diagnosis := reading(curve)) is not None]
    explained = {shape for one in found for shape in _EXPLAINS.get(one.shape, frozenset())}
    # What explains may itself be explained by something of higher rank; rank decides.
    rank = {shape: place for place, shape in enumerate(PRECEDENCE)}
    found = [
        one
        for one in found
        if one.shape not in explained
        or not any(
            one.shape in _EXPLAINS.get(other.shape, ()) and rank[other.shape] < rank[one.shape]
            for other in found
        )
    ]
    found.sort(key=lambda one: rank[one.shape])
    if not any(one.is_alarm or one.shape in _NAMING for one in found):
        found.insert(0, _healthy(curve))
    return found


def events_of(folder: Path) -> list[dict[str, Any]]:
    """The events of a run folder. Raises UserError where it has none."""
    path = folder / "events.jsonl"
    if not path.is_file():
        raise UserError(
            f"{folder} has no events.jsonl",
            why="a diagnosis is read from the events of training",
            fix="give the folder that finetune run printed",
        )
    return read_events(path)


def new_findings(events: Sequence[dict[str, Any]], known: Collection[str]) -> list[Diagnosis]:
    """Alarms of a run that still goes on and whose shapes are not among `known`: for telling each once.

    What a plateau may look like, a first block of the data, or an hour of another job, is left for the second half of the run.
    """
    curve = read_curve(events)
    is_late = curve.total_steps is None or curve.n >= 0.5 * curve.total_steps
    return [
        one
        for one in diagnose(events)
        if one.is_alarm and one.shape not in known and (is_late or one.shape not in _LATE)
    ]


def _healthy(curve: Curve) -> Diagnosis:
    loss, width = curve.clean, curve.spans(0.05, 3)
    first, last = float(loss[:width].mean()), float(loss[-width:].mean())
    return Diagnosis(
        "healthy",
        "note",
        f"the loss goes from {first:.3g} to {last:.3g}; no spike, rise or stall stands out",
        "nothing; the evaluation decides whether it helped",
        {"first_loss": round(first, 4), "last_loss": round(last, 4), "steps": curve.n},
    )


def _too_short(curve: Curve) -> Diagnosis:
    return Diagnosis(
        "too_short",
        "note",
        f"{curve.n} steps are recorded; a curve needs {LEAST_STEPS}",
        "wait, or train for longer",
        {"steps": curve.n},
    )
