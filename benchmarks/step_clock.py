"""Seconds of every optimizer step of a trainer, ours or TRL's."""

from __future__ import annotations

import time
from typing import Any

from transformers import TrainerCallback


class StepClock(TrainerCallback):
    """`seconds` grows by one figure a step: wall time from its first micro-batch to the end of its update."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self._start = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.seconds.append(time.perf_counter() - self._start)
