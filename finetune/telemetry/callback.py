"""Telemetry of training: writes events and the progress line, and never changes a weight or a random number."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from finetune.telemetry.events import EventLog
from finetune.telemetry.flops import StepWork
from finetune.telemetry.memory import current_memory_bytes
from finetune.telemetry.progress import Progress
from finetune.telemetry.updates import UpdateWatch


@dataclass
class StepTally:
    """What the trainer adds up over the micro-batches of one optimizer step."""

    nll_sum: float = 0.0
    n_targets: int = 0
    n_tokens: int = 0
    sum_squared_lengths: int = 0
    grad_norm: float = 0.0


class TelemetryCallback(TrainerCallback):
    """Writes a `step` event after every optimizer step.

    `tally` is filled by the trainer and reset here. `peak_flops` (operations a second) turns work into MFU. Weight
    norm and update ratio are taken over the trainable parameters (see `UpdateWatch`).
    """

    def __init__(
        self, log: EventLog, tally: StepTally, work: StepWork, peak_flops: float, progress: Progress
    ) -> None:
        self.log, self.tally, self.work, self.peak_flops, self.progress = (
            log,
            tally,
            work,
            peak_flops,
            progress,
        )
        self.total_tokens = self.total_targets = 0
        self._watch = UpdateWatch()
        self._weight_norm = self._update_ratio = 0.0
        self._step_start = time.perf_counter()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.progress.total = state.max_steps
        self.progress.skip(state.global_step)
        self._step_start = time.perf_counter()

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._watch.start(kwargs["model"])

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._weight_norm, self._update_ratio = self._watch.finish(kwargs["model"])

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        tally, now = self.tally, time.perf_counter()
        seconds, self._step_start = now - self._step_start, now
        self.total_tokens += tally.n_tokens
        self.total_targets += tally.n_targets
        loss = tally.nll_sum / max(tally.n_targets, 1)
        flops = self.work.flops(tally.n_tokens, tally.n_targets, tally.sum_squared_lengths)
        tokens_per_second = tally.n_tokens / seconds
        self.log.write(
            "step",
            step=state.global_step,
            epoch=round(state.epoch or 0.0, 6),
            tokens=self.total_tokens,
            target_tokens=self.total_targets,
            loss=loss,
            grad_norm=tally.grad_norm,
            weight_norm=self._weight_norm,
            update_ratio=self._update_ratio,
            learning_rate=_rate_of_step(kwargs.get("lr_scheduler")),
            tokens_per_second=round(tokens_per_second, 2),
            mfu=round(flops / seconds / self.peak_flops, 5),
            memory_bytes=current_memory_bytes(),
        )
        self.progress.advance(1, f"loss {loss:.3f}, {tokens_per_second:.0f} tokens/s")
        self.tally.__init__()  # type: ignore[misc]

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.progress.__exit__(None, None, None)

    def restart_clock(self) -> None:
        """Leave a pause (validation, checkpoint) out of the next step's speed."""
        self._step_start = time.perf_counter()


def _rate_of_step(scheduler: Any) -> float | None:
    """The rate the step used; on_step_end comes after the scheduler has moved on to the next one."""
    if scheduler is None:
        return None
    optimizer = getattr(scheduler, "optimizer", None)
    index = getattr(scheduler, "last_epoch", 0) - 1
    lambdas, bases = getattr(scheduler, "lr_lambdas", None), getattr(scheduler, "base_lrs", None)
    if lambdas and bases and index >= 0:
        return float(bases[0] * lambdas[0](index))
    return float(optimizer.param_groups[0]["lr"]) if optimizer is not None else None
