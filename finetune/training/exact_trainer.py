"""What every trainer of ours does beyond TRL's: the recipe's optimizer and schedule, whole checkpoints without pickle, one
clip, a stop before a bad step, counts over ranks."""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from finetune.errors import UserError
from finetune.model.adapters import check_gradients_arrive
from finetune.recipe.schema import TrainSection
from finetune.telemetry.callback import StepTally
from finetune.training.checkpoints import save_checkpoint
from finetune.training.memory_saving import offload_context, set_model_dropout
from finetune.training.optimizers import build_optimizer
from finetune.training.schedules import build_schedule
from finetune.training.states import load_state, save_state

# Below this factor fp16 gradients overflow whatever is done: the loss itself is broken.
_SMALLEST_LOSS_SCALE = 1.0


class ExactTrainer(Trainer):
    """Mixed in before one of TRL's trainers; the subclass computes the loss and fills `tally`.

    - optimizer and schedule are the recipe's (`optimizers.py`, `schedules.py`);
    - checkpoints are atomic, checksummed and owned by one recipe (`checkpoints.py`), their states are tensors and plain
      data (`states.py`);
    - a loss or gradient that is not finite stops the run before the optimizer step;
    - what is logged is the step of all ranks;
    - the loss is divided by the items of the whole optimizer step in `compute_loss`, so nothing rescales it afterwards.
    """

    control: TrainerControl
    optimizer: Any
    lr_scheduler: Any
    settings: TrainSection
    checkpoint_root: Path
    owner: str
    tally: StepTally

    def follow(self, settings: TrainSection, *, checkpoint_root: Path, owner: str, tally: StepTally) -> None:
        """Call once after the trainer is built. `owner`: digest of what the run depends on."""
        self.settings, self.checkpoint_root, self.owner, self.tally = settings, checkpoint_root, owner, tally
        self.keep_also: set[int] = set(settings.pin_checkpoints)
        self.offload = offload_context(self.model, settings)
        set_model_dropout(self.model, settings.model_dropout)
        # The losses here divide by the items of the whole step, so the trainer must count and not rescale.
        self.model_accepts_loss_kwargs = True
        self.loss_is_scaled_for_ga = True
        self.add_callback(_HoldStarts())

    def create_optimizer(self, model: nn.Module | None = None) -> Any:
        """The recipe's; `model` is the wrapped one where its parameters are sharded."""
        if self.optimizer is None:
            self.optimizer = build_optimizer(self.model if model is None else model, self.settings)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """The recipe's schedule over the whole run."""
        if self.lr_scheduler is None:
            chosen = self.optimizer if optimizer is None else optimizer
            self.lr_scheduler = build_schedule(
                getattr(chosen, "optimizer", chosen), self.settings, num_training_steps
            )
            self._created_lr_scheduler = True
        return self.lr_scheduler

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Forward and backward of one micro-batch, or of a list of them; activations offloaded where the recipe says so."""
        if isinstance(inputs, list):
            losses = [self.training_step(model, part, num_items_in_batch) for part in inputs]
            return torch.stack(losses).sum()
        with self.offload:
            loss: Tensor = super().training_step(model, inputs, num_items_in_batch)
        return loss

    def floating_point_ops(self, inputs: Any) -> int:
        """Not counted here: telemetry counts what the mathematics needs (telemetry/flops.py)."""
        return 0

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
        if not math.isfinite(self.tally.grad_norm) and not self._will_rescale():
            raise _not_finite("gradient", self.state.global_step + 1)
        return norm

    def _will_rescale(self) -> bool:
        """Whether an overflow is that of fp16's loss scale: the scaler then skips the step and halves the scale."""
        scaler = getattr(self.accelerator, "scaler", None)
        return scaler is not None and scaler.is_enabled() and scaler.get_scale() > _SMALLEST_LOSS_SCALE

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

    @contextlib.contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """The weights to judge and to keep: with a schedule-free optimizer the average, which training does not hold.

        Training's own weights come back bit by bit, so that looking at the average changes nothing.
        """
        inner = getattr(self.optimizer, "optimizer", self.optimizer)
        if not callable(getattr(inner, "eval", None)) or not all(
            g.get("train_mode", False) for g in inner.param_groups
        ):
            yield
            return
        parameters = [p for group in inner.param_groups for p in group["params"]]
        trained = [p.detach().clone() for p in parameters]
        inner.eval()
        try:
            yield
        finally:
            for parameter, value in zip(parameters, trained, strict=True):
                parameter.data.copy_(value)
            for group in inner.param_groups:
                group["train_mode"] = True

    def load_step(self, checkpoint: Path) -> None:
        """Put a checkpoint's weights, and with an averaging optimizer its state, into the model; nothing is trained."""
        self._load_from_checkpoint(str(checkpoint))
        self.state = TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))
        inner = getattr(self.optimizer, "optimizer", self.optimizer)
        if inner is None:
            inner = self.create_optimizer()
        if callable(getattr(inner, "eval", None)):
            inner.load_state_dict(load_state(checkpoint / "optimizer"))

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        if not self.args.should_save:
            return
        step = self.state.global_step

        def fill(folder: Path) -> None:
            self.save_weights(folder)
            self._save_optimizer_and_scheduler(str(folder))
            self._save_rng_state(str(folder))
            self._save_scaler(str(folder))
            self.state.save_to_json(str(folder / "trainer_state.json"))

        save_checkpoint(
            self.checkpoint_root,
            step,
            fill,
            owner=self.owner,
            keep=self.settings.keep_checkpoints,
            keep_also=self.keep_also,
        )

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self.is_deepspeed_enabled or self.is_fsdp_enabled:  # sharded states have a format of their own
            super()._save_optimizer_and_scheduler(output_dir)
            return
        save_state(Path(output_dir) / "optimizer", self.optimizer.state_dict())
        save_state(Path(output_dir) / "scheduler", self.lr_scheduler.state_dict())

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if self.is_deepspeed_enabled or self.is_fsdp_enabled:
            super()._load_optimizer_and_scheduler(checkpoint)
        elif checkpoint is not None:
            self.optimizer.load_state_dict(load_state(Path(checkpoint) / "optimizer"))
            self.lr_scheduler.load_state_dict(load_state(Path(checkpoint) / "scheduler"))

    def _rng_path(self, folder: str) -> Path:
        rank = f"-{self.args.process_index}" if self.args.world_size > 1 else ""
        return Path(folder) / f"random{rank}"

    def _save_rng_state(self, output_dir: str) -> None:
        states: dict[str, Any] = {
            "python": random.getstate(),
            "numpy": np.random.get_state(),
            "cpu": torch.random.get_rng_state(),
        }
        if torch.cuda.is_available():
            states["cuda"] = torch.cuda.random.get_rng_state(self.args.device)
        save_state(self._rng_path(output_dir), states)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        path = self._rng_path(checkpoint)
        if not path.with_suffix(".json").is_file():
            return  # saved by another number of processes: the draws of dropout start anew
        states = load_state(path)
        random.setstate(states["python"])
        np.random.set_state(states["numpy"])
        torch.random.set_rng_state(states["cpu"])
        if "cuda" in states and torch.cuda.is_available():
            torch.cuda.random.set_rng_state(states["cuda"], self.args.device)

    def _save_scaler(self, output_dir: str) -> None:
        scaler = getattr(self.accelerator, "scaler", None)
        if scaler is not None:
            save_state(Path(output_dir) / "scaler", scaler.state_dict())

    def _load_scaler(self, checkpoint: str | None) -> None:
        scaler = getattr(self.accelerator, "scaler", None)
        if checkpoint is not None and scaler is not None:
            scaler.load_state_dict(load_state(Path(checkpoint) / "scaler"))


class _HoldStarts(TrainerCallback):
    """Keeps the held halves of doubled adapters bit by bit through every optimizer step."""

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if (held := getattr(kwargs["model"], "held_halves", None)) is not None:
            held.before_step()

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if (held := getattr(kwargs["model"], "held_halves", None)) is not None:
            held.after_step()


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


def _not_finite(what: str, step: int) -> UserError:
    return UserError(
        f"the {what} of step {step} is not finite; the run stopped before that step changed a weight",
        why="the learning rate is too high for this model and data, or a row is broken",
        fix="lower train.learning_rate (by 3 to 10 times), or lower train.max_grad_norm; the last checkpoint is kept",
    )
