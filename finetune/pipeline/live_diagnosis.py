"""While a run trains: what is wrong with its curve is written as a `finding` event and told once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from finetune.doctor.diagnosis import new_findings
from finetune.telemetry.events import EventLog, read_events

_FIRST_LOOK = 10
_GROWTH = 1.1  # each look comes a tenth later than the last: few looks, however long the run


class LiveDiagnosis(TrainerCallback):
    """Reads the run's events at steps 10, 20, 30, … and ever more rarely; `say` tells the user."""

    def __init__(self, events: Path, say: Callable[[str], None]) -> None:
        self._events, self._say = events, say
        self._next_look, self._last_step = _FIRST_LOOK, 0

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        step = state.global_step
        if (
            step <= self._last_step
        ):  # the run went back: what was found after this step is told again, if it comes again
            self._next_look = step + _FIRST_LOOK
        self._last_step = step
        if not state.is_world_process_zero or (step < self._next_look and step < state.max_steps):
            return
        self._next_look = max(step + _FIRST_LOOK, round(step * _GROWTH))
        events = read_events(self._events)
        known = {str(event.get("shape")) for event in events if event["event"] == "finding"}
        log = EventLog(self._events)
        for finding in new_findings(events, known):
            told = finding.to_dict()
            log.write("finding", step=step, at_steps=told.pop("steps"), **told)
            self._say(f"step {step}: {finding}")
