"""What every trainer of ours does beyond TRL's: the recipe's optimizer and schedule, whole checkpoints without pickle, one
clip, a stop before a bad step, counts over ranks."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from finetune.errors import UserError
from finetune.model.adapters import check_gradients_arrive
from finetune.model.memory import mapped_activations
from finetune.recipe.preference_section import PREFERENCE_METHODS
from finetune.recipe.schema import TrainSection
from finetune.telemetry.callback import StepTally
from finetune.telemetry.trackers import tracked
from finetune.training.batch_ramp import Windows, window_loader
from finetune.training.checkpointing import CheckpointingTrainer
from finetune.training.float8 import use_float8
from finetune.training.memory_saving import offload_context, set_model_dropout
from finetune.training.optimizers import build_optimizer
from finetune.training.schedules import build_schedule
from finetune.training.sharding import has_experts
from finetune.training.shares import (
    IDLE,
    SharedLoader,
    SharedSteps,
    SharedWindows,
    Sharing,
    copy_tally,
    uncount,
)
from finetune.training.zero import whole_gradient

# Below this factor fp16 gradients overflow whatever is done: the loss itself is broken.
_SMALLEST_LOSS_SCALE = 1.0


class ExactTrainer(CheckpointingTrainer):
    """Mixed in before one of TRL's trainers; the subclass computes the loss and fills `tally`.

    - optimizer and schedule are the recipe's (`optimizers.py`, `schedules.py`);
    - checkpoints are atomic, checksummed and owned by one recipe, their states are tensors and plain data
      (`checkpointing.py`);
    - a loss or gradient that is not finite stops the run before the optimizer step;
    - what is logged is the step of all ranks, and its examples do not depend on their number (`shares.py`);
    - the loss is divided by the items of the whole optimizer step in `compute_loss`, so nothing rescales it afterwards.
    """

    control: TrainerControl
    tally: StepTally
    # Acts after a divergence (`rewind.py`), by the number of steps done.
    rate_factor: Callable[[int], float] = staticmethod(lambda step: 1.0)
    left_out: Callable[[int], frozenset[str]] = staticmethod(lambda step: frozenset())

    def follow(
        self,
        settings: TrainSection,
        *,
        checkpoint_root: Path,
        owner: str,
        tally: StepTally,
        windows: Windows | None = None,
    ) -> None:
        """Call once after the trainer is built. `owner`: digest of what the run depends on. `windows`: the examples of every
        step where the batch grows; a step is then one item of the loader, a list of micro-batches.
        """
        self.settings, self.checkpoint_root, self.owner, self.tally = settings, checkpoint_root, owner, tally
        self._tracked: dict[str, float] = {}
        self.keep_also: set[int] = set(settings.pin_checkpoints)
        self.stop = StopWhenAsked()
        self._idle = False
        self._nothing_arrived = False  # no gradient yet: a hinge that is satisfied, answers without weight
        self._step_items = 0.0
        self.offload = offload_context(self.model, settings)
        # Dropout would change compared answers by more than they differ, and their reference has none.
        compared = settings.method in PREFERENCE_METHODS
        self.own_dropout = set_model_dropout(self.model, 0.0 if compared else settings.model_dropout)
        # The losses here divide by the items of the whole step, so the trainer must count and not rescale.
        self.model_accepts_loss_kwargs = True
        self.loss_is_scaled_for_ga = True
        self.windows = windows
        if windows is not None:
            self.add_callback(_EpochOfWindow(windows))
        self.add_callback(_HoldStarts())
        self.add_callback(_KeepRateOfSkippedStep(tally))
        if settings.fp8:
            use_float8(self.model)
        self._prepare_for_several()

    def _prepare_for_several(self) -> None:
        """Gradients are added up in fp32; a search for parameters that had no part in a step only where some may have none."""
        if self.accelerator.ddp_handler is not None:
            self.accelerator.ddp_handler.find_unused_parameters = has_experts(self.model.config)
        if self.is_fsdp_enabled:
            plugin = self.accelerator.state.fsdp_plugin
            if (policy := plugin.mixed_precision_policy) is not None:
                plugin.mixed_precision_policy = replace(policy, reduce_dtype=torch.float32)

    def spreads_trained_head(self, base: Any) -> bool:
        """Whether ZeRO-3 spreads a head that trains: it is whole only while the head's own forward and backward pass run."""
        if not self.is_deepspeed_enabled or self.accelerator.deepspeed_plugin.zero_stage < 3:
            return False
        return any(parameter.requires_grad for parameter in base.get_output_embeddings().parameters())

    def get_train_dataloader(self) -> Any:
        """One process reads transformers' loader, or with a batch ramp one of steps; several share every step of it."""
        dataset: Any = self.train_dataset
        rank, n_ranks = self.args.process_index, self.args.world_size
        micro = self.settings.micro_batch_size
        if n_ranks == 1 and self.windows is None:
            return super().get_train_dataloader()
        if self.windows is None:
            steps = SharedSteps(len(dataset), self.settings, self.args.data_seed, rank, n_ranks)
            return SharedLoader(dataset, steps, self.data_collator)
        if n_ranks == 1:
            return self.accelerator.prepare(window_loader(dataset, self.windows, micro, self.data_collator))
        sharing = Sharing(rank, n_ranks, micro, self.settings.packing)
        return SharedLoader(dataset, SharedWindows(self.windows.examples, sharing), self.data_collator)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """All steps; on CPUs what they keep and free leaves no holes in the heap."""
        with mapped_activations(self.args.device.type):
            return super().train(*args, **kwargs)

    def mapped_activations(self, inputs: dict[str, Any]) -> AbstractContextManager[None]:
        """For forward and backward of one batch: its hidden states are blocks of their own, however short it is."""
        width = int(getattr(self.model.config.get_text_config(), "hidden_size", 0))
        smallest = inputs["input_ids"].numel() * width * torch.bfloat16.itemsize
        return mapped_activations(self.args.device.type, smallest)

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """One pass over the rows; none after the last step, of which transformers trains one more when it resumes there in
        the middle of an epoch."""
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return
        super()._run_epoch(*args, **kwargs)

    def get_batch_samples(
        self, epoch_iterator: Any, num_batches: int, device: torch.device
    ) -> tuple[Any, Any]:
        """The micro-batches of a step, and its items; what is only computed along has none."""
        batches = [batch for _, batch in zip(range(num_batches), epoch_iterator, strict=False)]
        if rows := self.left_out(self.state.global_step):
            self.silence(batches, rows)
        parts = [part for batch in batches for part in (batch if isinstance(batch, list) else [batch])]
        own = [part for part in parts if IDLE not in part]
        return batches, self._get_num_items_in_batch(own, device)

    def silence(self, batches: list[Any], rows: frozenset[str]) -> None:
        """Take the targets of `rows` out of the batches."""
        raise UserError(
            "rows can be left out of supervised training only",
            where="train.rewind.remedy",
            fix="set train.rewind.remedy: halve_rate",
        )

    def create_optimizer(self, model: nn.Module | None = None) -> Any:
        """The recipe's; `model` is the wrapped one where its parameters are sharded."""
        if self.optimizer is None:
            self.optimizer = build_optimizer(self.model if model is None else model, self.settings)
            self.parameter_groups = [list(group["params"]) for group in self.optimizer.param_groups]
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """The recipe's schedule over the whole run."""
        if self.lr_scheduler is None:
            chosen = self.optimizer if optimizer is None else optimizer
            while hasattr(chosen, "optimizer"):  # accelerate's and DeepSpeed's, around the recipe's own
                chosen = chosen.optimizer
            self.lr_scheduler = build_schedule(chosen, self.settings, num_training_steps, self.rate_factor)
            self._created_lr_scheduler = True
        return self.lr_scheduler

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Forward and backward of one micro-batch, or of a list of them; activations offloaded where the recipe says so."""
        if isinstance(inputs, list):
            losses = [self.training_step(model, part, num_items_in_batch) for part in inputs]
            return torch.stack(losses).sum()
        self._idle = inputs.pop(IDLE, False)
        before = copy_tally(self.tally) if self._idle else None
        with self.offload, self.mapped_activations(inputs):
            loss: Tensor = super().training_step(model, inputs, num_items_in_batch)
        if before is not None:
            uncount(self.tally, before)
        return loss

    def floating_point_ops(self, inputs: Any) -> int:
        """Not counted here: telemetry counts what the mathematics needs (telemetry/flops.py)."""
        return 0

    def step_loss(self, loss_sum: Tensor, n_items: Tensor | int | float) -> Tensor:
        """The sum of a micro-batch's losses as its part of the step's mean over `n_items` (all micro-batches and ranks)."""
        # DDP averages gradients over the ranks, the definition sums them.
        ranks = self.accelerator.num_processes if self.args.average_tokens_across_devices else 1
        self._step_items = float(n_items)  # weights of turns may sum up to less than 1
        return loss_sum * (0.0 if self._idle else ranks / (self._step_items or 1.0))

    def require_finite_loss(self, value: float) -> None:
        """Raise UserError before the optimizer step when the loss of a micro-batch is not finite."""
        if not math.isfinite(value):
            raise NotFiniteError("loss", self.state.global_step + 1)

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        if (self.state.global_step == 0 or self._nothing_arrived) and self._step_items:
            # A step of answers that weigh nothing has no gradient.
            self._nothing_arrived = not check_gradients_arrive(
                self.model,
                whole_gradient if self.is_deepspeed_enabled else None,
                may_be_none=self.settings.method in PREFERENCE_METHODS,
            )
        # DeepSpeed clips within its step, which comes next.
        norm = 0.0 if self.is_deepspeed_enabled else super()._clip_grad_norm(model)
        if self.accelerator.num_processes > 1:
            self._sum_tally_over_ranks()
        if not self.is_deepspeed_enabled:
            self.check_norm(float(norm))
        return norm

    def check_norm(self, norm: float) -> None:
        """Note the norm of the step's gradient. Raises UserError for one that is not finite; no weight has changed then."""
        self.tally.grad_norm = norm
        self.tally.loss_scale = self._loss_scale()
        if not math.isfinite(norm) and not self._will_rescale():
            raise NotFiniteError("gradient", self.state.global_step + 1)

    def _will_rescale(self) -> bool:
        """Whether an overflow is that of fp16's loss scale: the scaler then skips the step and halves the scale."""
        scale = self._loss_scale()
        return scale is not None and scale > _SMALLEST_LOSS_SCALE

    def _loss_scale(self) -> float | None:
        """The factor on the loss that keeps fp16 gradients in range; None in other types."""
        scaler = getattr(self.accelerator, "scaler", None)
        return float(scaler.get_scale()) if scaler is not None and scaler.is_enabled() else None

    def _sum_tally_over_ranks(self) -> None:
        """The loss that is logged is the one that is optimized, not that of this rank's rows."""
        counted = [*self.tally.values(), float(self.stop.asked)]
        totals = torch.tensor(counted, dtype=torch.float64, device=self.args.device)
        *sums, asked = self.accelerator.reduce(totals, reduction="sum").tolist()
        self.tally.replace(sums)
        self.stop.agreed = asked > 0
        self.tally.rows = gather_object(self.tally.rows)
        worst = [one for one in gather_object([self.tally.worst_row]) if one is not None]
        self.tally.worst_row = max(worst, default=None)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Only for `report_to` trackers, which get every number of the step event; events.jsonl is the telemetry's."""
        if "loss" in logs:
            logs = {**logs, **self._tracked}
        Trainer.log(self, logs, start_time)

    def track(self, fields: dict[str, Any]) -> None:
        """The step event, for the trackers' next line."""
        if self.settings.report_to:
            self._tracked = tracked(fields)

    def track_validation(self, fields: dict[str, Any]) -> None:
        """A line of its own for the trackers, each name with 'eval_' before it, as they know a validation."""
        if self.settings.report_to:
            self.log({name.replace("/", "_", 1): value for name, value in tracked(fields).items()})

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


class _EpochOfWindow(TrainerCallback):
    """The trainer sees one long pass over the windows; events tell the passes over the rows."""

    def __init__(self, windows: Windows) -> None:
        self._windows = windows

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        state.epoch = self._windows.epochs[state.global_step - 1]


class _KeepRateOfSkippedStep(TrainerCallback):
    """After an overflow of fp16 the schedule waits with the weights.

    accelerate takes a step for skipped when the optimizer was not called; a fused one is called all the same, and does
    nothing.
    """

    def __init__(self, tally: StepTally) -> None:
        self._tally = tally

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if not math.isfinite(self._tally.grad_norm):
            kwargs["optimizer"]._is_overflow = True


class StopWhenAsked(TrainerCallback):
    """Ctrl-C once: finish the step, save a checkpoint, stop. `asked` is set by a signal handler.

    Of several processes each hears of it at another moment: they stop at the step at which all know (`agreed`).
    """

    def __init__(self) -> None:
        self.asked = self.agreed = False

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if args.world_size == 1:
            self.agreed = self.asked
        if self.agreed:
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


class DivergenceError(UserError):
    """A training that cannot go on as its recipe says, because its loss went up for good or is no number."""


class NotFiniteError(DivergenceError):
    """The loss or the gradient of step `step` is not finite; that step has changed no weight."""

    def __init__(self, what: str, step: int) -> None:
        self.step = step
        untouched = step == 1
        super().__init__(
            f"the {what} of step {step} is not finite; the run stopped before that step changed a weight",
            why="no weight had been changed yet: the weights that training starts from are damaged, or a row is broken"
            if untouched
            else "the learning rate is too high for this model and data, or a row is broken",
            fix="`finetune doctor RECIPE` looks at the weights and the rows"
            if untouched
            else "lower train.learning_rate (by 3 to 10 times), or lower train.max_grad_norm; the last checkpoint is kept",
        )
