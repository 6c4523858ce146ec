"""What every trainer of ours does beyond TRL's: whole checkpoints, one clip, a stop before a bad step, counts over ranks."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from finetune.errors import UserError
from finetune.model.adapters import check_gradients_arrive
from finetune.telemetry.callback import StepTally
from finetune.training.checkpoints import save_checkpoint


class ExactTrainer(Trainer):
    """Mixed in before one of TRL's trainers; the subclass computes the loss and fills `tally`.

    - checkpoints are atomic, checksummed and owned by one recipe (`training/checkpoints.py`);
    - a loss or gradient that is not finite stops the run before the optimizer step;
    - what is logged is the step of all ranks;
    - the loss is divided by the items of the whole optimizer step in `compute_loss`, so nothing rescales it afterwards.
    """

    control: TrainerControl
    checkpoint_root: Path
    owner: str
    keep_checkpoints: int
    tally: StepTally

    def keep_checkpoints_in(self, root: Path, *, owner: str, keep: int, tally: StepTally) -> None:
        """Call once after the trainer is built. `owner`: digest of what the run depends on; `keep`: newest kept."""
        self.checkpoint_root, self.owner, self.keep_checkpoints, self.tally = root, owner, keep, tally
        # The losses here divide by the items of the whole step, so the trainer must count and not rescale.
        self.model_accepts_loss_kwargs = True
        self.loss_is_scaled_for_ga = True

    def step_loss(self, loss_sum: Tensor, n_items: Tensor | int | float) -> Tensor:
        """The sum of a micro-batch's losses as its part of the step's mean over `n_items` (all micro-batches and ranks)."""
        # DDP averages gradients over the ranks, the definition sums them.
        ranks = self.accelerator.num_processes if self.args.average_tokens_across_devices else 1
        return loss_sum * (ranks / max(float(n_items), 1.0))

    def require_finite_loss(self, value: float) -> None:
        """Raise UserError before the optimizer step when the loss of a micro-batch is not finite."""
        if not math.isfinite(value):
            raise _not_finite("loss", self.state.global_step + 1)

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        if self.state.global_step == 0:
            check_gradients_arrive(self.model)
        norm = super()._clip_grad_norm(model)
        if self.accelerator.num_processes > 1:
            self._sum_tally_over_ranks()
        self.tally.grad_norm = float(norm)
        if not math.isfinite(self.tally.grad_norm):
            raise _not_finite("gradient", self.state.global_step + 1)
        return norm

    def _sum_tally_over_ranks(self) -> None:
        """The loss that is logged is the one that is optimized, not that of this rank's rows."""
        counted = self.tally.values()
        totals = torch.tensor(counted, dtype=torch.float64, device=self.args.device)
        self.tally.replace(self.accelerator.reduce(totals, reduction="sum").tolist())

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Only what `report_to` trackers need; events.jsonl is written by the telemetry callback."""
        Trainer.log(self, logs, start_time)

    def save_weights(self, folder: Path) -> None:
        """Adapter or model with its tokenizer, as safetensors and JSON; no pickle."""
        self.save_model(str(folder), _internal_call=True)
        (folder / "training_args.bin").unlink(missing_ok=True)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        if not self.args.should_save:
            return
        step = self.state.global_step

        def fill(folder: Path) -> None:
            self.save_weights(folder)
            self._save_optimizer_and_scheduler(str(folder))
            self._save_rng_state(str(folder))
            self.state.save_to_json(str(folder / "trainer_state.json"))

        save_checkpoint(self.checkpoint_root, step, fill, owner=self.owner, keep=self.keep_checkpoints)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        with _code_refused(checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        with _code_refused(checkpoint):
            super()._load_rng_state(checkpoint)


class StopWhenAsked(TrainerCallback):
    """Ctrl-C once: finish the step, save a checkpoint, stop. The flag is set by a signal handler."""

    def __init__(self) -> None:
        self.asked = False

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.asked:
            control.should_save = True
            control.should_training_stop = True


class OnEvent(TrainerCallback):
    """Hands checkpoints and validation losses to plain functions."""

    def __init__(
        self, saved: Callable[[int], None], validated: Callable[[int, dict[str, float]], None]
    ) -> None:
        self._saved, self._validated = saved, validated

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._saved(state.global_step)

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._validated(state.global_step, kwargs["metrics"])


@contextmanager
def _code_refused(checkpoint: str | None) -> Iterator[None]:
    """torch reads the states with weights_only: whatever else is in them is not run, and raises."""
    try:
        yield
    except pickle.UnpicklingError as error:
        raise UserError(
            f"the optimizer, scheduler or random state in {checkpoint} is refused",
            why="it holds more than tensors and numbers; reading it would run code, so it was not read",
            fix="delete that checkpoint; the same command then continues from the one before it",
        ) from error


def _not_finite(what: str, step: int) -> UserError:
    return UserError(
        f"the {what} of step {step} is not finite; the run stopped before that step changed a weight",
        why="the learning rate is too high for this model and data, or a row is broken",
        fix="lower train.learning_rate (by 3 to 10 times), or lower train.max_grad_norm; the last checkpoint is kept",
    )
