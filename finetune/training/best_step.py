"""Which step becomes the result: the earliest whose validation loss is not worse than the lowest, and when to stop.

Validation losses of neighbouring steps differ by chance more than by training. Rows are the same at every step, so two
steps are compared row by row: the token-weighted difference is the mean of (Σ nll of a row at one step − at the other),
divided by the mean number of targets, and Student's paired t gives its interval (stats/paired.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from finetune.errors import UserError
from finetune.paths import read_json, write_json
from finetune.stats.paired import paired_t
from finetune.training.checkpoints import checkpoint_step, damage, list_checkpoints

CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class RowLosses:
    """One validation: for each row the sum of its targets' losses [nats] and their number, in the same order always."""

    sums: Sequence[float]
    targets: Sequence[int]

    @property
    def mean(self) -> float:
        """Token-weighted mean, in nats a target."""
        return float(np.sum(self.sums) / np.sum(self.targets))


@dataclass(frozen=True, slots=True)
class Choice:
    """`step` is the result, `lowest` the step of the lowest loss, `alive` every step that is not worse than that one."""

    step: int
    lowest: int
    alive: frozenset[int]


def choose(validations: Mapping[int, RowLosses]) -> Choice:
    """The earliest step that is not worse than the lowest one, at 95 %."""
    lowest = min(sorted(validations), key=lambda step: validations[step].mean)
    alive = frozenset(
        step for step, losses in validations.items() if not is_worse(losses, validations[lowest])
    )
    return Choice(min(alive), lowest, alive)


def is_worse(losses: RowLosses, best: RowLosses) -> bool:
    """Whether the paired interval of the token-weighted difference lies above zero. One row has no noise to compare with."""
    scale = 1.0 / float(np.mean(best.targets))
    one, other = np.asarray(best.sums) * scale, np.asarray(losses.sums) * scale
    if len(one) < 2:
        return bool(other.sum() > one.sum())
    return paired_t(one, other, confidence=CONFIDENCE).low > 0.0


class BestStep(TrainerCallback):
    """Validates, keeps every checkpoint that may still be chosen, and stops when `patience` validations brought nothing.

    The row losses of each validation lie in `folder` as `step-<n>.json`, so that a resumed run chooses as a whole one
    does. `losses` gives those of the validation that has just ended; `kept` is the set of steps that pruning spares.
    """

    def __init__(
        self,
        folder: Path,
        *,
        losses: Callable[[], RowLosses],
        kept: set[int],
        patience: int | None,
        say: Callable[[str], None],
    ) -> None:
        self.folder, self._losses, self._kept, self.patience, self._say = folder, losses, kept, patience, say
        self._pinned = frozenset(kept)
        self.validations: dict[int, RowLosses] = {}

    def continue_from(self, step: int) -> None:
        """Read the validations up to `step`; later ones were of steps that are trained again."""
        for path in sorted(self.folder.glob("step-*.json")):
            content = read_json(path)
            if content["step"] <= step:
                self.validations[content["step"]] = RowLosses(content["sums"], content["targets"])
            else:
                path.unlink()
        self._keep()

    @property
    def choice(self) -> Choice | None:
        """The choice so far; None before the first validation."""
        return choose(self.validations) if self.validations else None

    @property
    def exhausted(self) -> bool:
        """Whether the last `patience` validations lowered the loss no further than its noise."""
        if self.patience is None or self.choice is None:
            return False
        return sum(step > self.choice.step for step in self.validations) >= self.patience

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.global_step >= state.max_steps:
            control.should_evaluate = True

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        losses, step = self._losses(), state.global_step
        if step in self.validations:
            return  # the last step, looked at once more after training
        self.validations[step] = losses
        if state.is_world_process_zero:
            self.folder.mkdir(parents=True, exist_ok=True)
            content = {"step": step, "sums": list(losses.sums), "targets": list(losses.targets)}
            write_json(self.folder / f"step-{step}.json", content)
        self._keep()
        control.should_save = True
        if self.exhausted and step < state.max_steps:
            assert self.choice is not None
            self._say(
                f"stopping at step {step} of {state.max_steps}: {self.patience} validations did not lower the loss of step "
                f"{self.choice.step} beyond its noise"
            )
            control.should_training_stop = True

    def _keep(self) -> None:
        if (choice := self.choice) is not None:
            self._kept.clear()
            self._kept.update(self._pinned | choice.alive)

    def checkpoint(self, root: Path) -> Path | None:
        """The chosen step's checkpoint; None when it is the newest one, whose weights are at hand.

        Raises UserError where it is gone or damaged: the weights of another step are no substitute.
        """
        checkpoints = list_checkpoints(root)
        if self.choice is None or not checkpoints or checkpoint_step(checkpoints[-1]) == self.choice.step:
            return None
        chosen = root / f"step-{self.choice.step}"
        reason = damage(chosen) if chosen in checkpoints else "it is not there any more"
        if reason is not None:
            raise UserError(
                f"step {self.choice.step} is the best one, but its checkpoint cannot be used: {reason}",
                where=str(chosen),
                why="the weights at hand are those of a later step",
                fix=f"put that checkpoint back, or delete {root} to train again",
            )
        return chosen
