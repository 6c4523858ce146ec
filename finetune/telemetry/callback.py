"""Telemetry of training: writes events and the progress line, and never changes a weight or a random number."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from finetune.telemetry.events import EventLog
from finetune.telemetry.flops import StepWork
from finetune.telemetry.memory import current_memory_bytes, peak_memory_bytes
from finetune.telemetry.progress import Progress
from finetune.telemetry.sparkline import sparkline
from finetune.telemetry.updates import Movement, UpdateWatch

_LOSSES_SHOWN = 256  # in the progress line, the last ones


@dataclass
class StepTally:
    """What the trainer adds up over the micro-batches of one optimizer step.

    `nll_sum` is the sum of the losses; their mean is over targets, or over examples where a method counts those (a
    preference pair is one). `n_repeated` of the tokens are beginnings that another row of the pack had computed.
    `example_sums` are further numbers that examples have, e.g. margins; what is logged is their mean over
    `example_counts`, the examples that have the number. `rows` are the ids of the rows that were trained on, in order,
    where the trainer knows them; `loss_scale` is fp16's factor. `worst_row` is the row with the highest mean loss over
    its targets: (loss, id).
    """

    nll_sum: float = 0.0
    n_targets: int = 0
    n_tokens: int = 0
    n_repeated: int = 0
    sum_squared_lengths: int = 0
    n_examples: int = 0
    example_sums: dict[str, float] = field(default_factory=dict)
    example_counts: dict[str, float] = field(default_factory=dict)
    grad_norm: float = 0.0
    rows: list[str] = field(default_factory=list)
    loss_scale: float | None = None
    worst_row: tuple[float, str] | None = None

    @property
    def loss(self) -> float:
        """Mean loss of the step."""
        return self.nll_sum / max(self.n_examples or self.n_targets, 1)

    def example_means(self) -> dict[str, float]:
        """The further numbers, as means over the examples that have them; those that none has are left out."""
        counts = self.example_counts
        return {name: total / counts[name] for name, total in self.example_sums.items() if counts[name]}

    def add_examples(self, count: int, measures: Mapping[str, tuple[float, float]]) -> None:
        """Count `count` examples; `measures` are (sum, number of examples). The same names come every time."""
        self.n_examples += count
        for name, (total, number) in measures.items():
            self.example_sums[name] = self.example_sums.get(name, 0.0) + total
            self.example_counts[name] = self.example_counts.get(name, 0.0) + number

    def values(self) -> list[float]:
        """Everything that is summed over ranks, in a fixed order."""
        counts = [self.n_targets, self.n_tokens, self.n_repeated, self.sum_squared_lengths, self.n_examples]
        return [
            self.nll_sum,
            *map(float, counts),
            *self.example_sums.values(),
            *self.example_counts.values(),
        ]

    def replace(self, values: list[float]) -> None:
        """The inverse of `values`."""
        self.nll_sum = values[0]
        counts = [int(value) for value in values[1:6]]
        self.n_targets, self.n_tokens, self.n_repeated, self.sum_squared_lengths, self.n_examples = counts
        middle = 6 + len(self.example_sums)
        self.example_sums = dict(zip(self.example_sums, values[6:middle], strict=True))
        self.example_counts = dict(zip(self.example_counts, values[middle:], strict=True))


class TelemetryCallback(TrainerCallback):
    """Writes a `step` event after every optimizer step.

    `tally` is filled by the trainer and reset here. `peak_flops` (operations a second) turns work into MFU. Weight
    norm and update ratio are taken over the trainable parameters (see `UpdateWatch`). `n_examples` are those of one pass
    over the data, packs counted as one. `setting` is what the start event says of the run, for its diagnosis. Every event
    is also handed to `on_step`, for trackers and for a person.
    """

    def __init__(
        self,
        log: EventLog,
        tally: StepTally,
        work: StepWork,
        peak_flops: float,
        progress: Progress,
        *,
        n_examples: int = 0,
        setting: Mapping[str, str | int | None] | None = None,
        on_step: Callable[[dict[str, Any]], None] = lambda step: None,
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
        self._moved = Movement()
        self._losses: deque[float] = deque(maxlen=_LOSSES_SHOWN)
        self.n_examples, self.on_step = n_examples, on_step
        self.setting = dict(setting or {})
        self._step_start = time.perf_counter()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.progress.total = state.max_steps
        self.progress.skip(state.global_step)
        self.log.write(
            "start",
            step=state.global_step,
            total_steps=state.max_steps,
            examples=self.n_examples,
            peak_flops=self.peak_flops,
            max_grad_norm=args.max_grad_norm,
            **({"setting": self.setting} if self.setting else {}),
        )
        self._step_start = time.perf_counter()

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._watch.start(kwargs["model"])

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._moved = self._watch.finish(kwargs["model"])

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        tally, now = self.tally, time.perf_counter()
        seconds, self._step_start = now - self._step_start, now
        self.total_tokens += tally.n_tokens
        self.total_targets += tally.n_targets
        flops = self.work.flops(tally.n_tokens - tally.n_repeated, tally.n_targets, tally.sum_squared_lengths)
        tokens_per_second = tally.n_tokens / seconds
        moved, epoch = self._moved, state.epoch or 0.0
        fields = {
            "step": state.global_step,
            "epoch": round(epoch, 6),
            "data_position": data_position(epoch, self.n_examples),
            "tokens": self.total_tokens,
            "target_tokens": self.total_targets,
            # Of a step whose rows were all left out there is none; 0 would be a lie.
            "loss": tally.loss if tally.n_targets or tally.n_examples else None,
            **tally.example_means(),
            "grad_norm": tally.grad_norm,
            "grad_norm_clipped": clipped_norm(tally.grad_norm, args.max_grad_norm),
            "weight_norm": moved.weight_norm,
            "update_ratio": moved.ratio,
            "update_ratio_median": moved.median,
            "update_ratio_blocks": moved.blocks,
            "learning_rate": _rate_of_step(kwargs.get("lr_scheduler")),
            "tokens_per_second": round(tokens_per_second, 2),
            "mfu": round(flops / seconds / self.peak_flops, 5),
            "memory_bytes": current_memory_bytes(),
            "peak_memory_bytes": peak_memory_bytes(),
            **({} if tally.loss_scale is None else {"loss_scale": tally.loss_scale}),
            **({"rows": tally.rows} if tally.rows else {}),
            **_worst(tally.worst_row),
        }
        self.log.write("step", **fields)
        self.on_step(fields)
        self._losses.append(tally.loss)
        curve = f" {sparkline(self._losses)}" if self.progress.draws else ""
        self.progress.advance(1, f"loss {tally.loss:.3f}{curve}, {tokens_per_second:.0f} tokens/s")
        self.tally.__init__()  # type: ignore[misc]

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.progress.__exit__(None, None, None)
        self.log.write("end", step=state.global_step, total_steps=state.max_steps)

    def restart_clock(self) -> None:
        """Leave a pause (validation, checkpoint) out of the next step's speed."""
        self._step_start = time.perf_counter()


def _worst(row: tuple[float, str] | None) -> dict[str, Any]:
    return {} if row is None else {"worst_row": row[1], "worst_row_loss": row[0]}


def clipped_norm(norm: float, max_norm: float) -> float:
    """The norm after torch.nn.utils.clip_grad_norm_: the gradient is scaled by max_norm / (norm + 1e-6) where that is < 1."""
    return norm * min(1.0, max_norm / (norm + 1e-6)) if max_norm > 0 else norm


def data_position(epoch: float, n_examples: int) -> int:
    """How many examples of the present pass are done; at the end of a pass all of them, not none of the next one."""
    passes_before = max(math.ceil(epoch - 1e-9) - 1, 0)
    return round((epoch - passes_before) * n_examples)


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
