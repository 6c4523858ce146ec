"""TRL's SFTTrainer, made exact: token-weighted losses, target-only head, whole checkpoints, a stop before a bad step."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from trl import SFTTrainer

from finetune.errors import UserError
from finetune.model.adapters import check_gradients_arrive
from finetune.telemetry.callback import StepTally
from finetune.training.checkpoints import save_checkpoint
from finetune.training.head import IGNORED, add_target_head, full_logits_nll, supports_target_head


class ExactSftTrainer(SFTTrainer):
    """Differences from TRL, each tested against the plain definition:

    - the loss of a step is the sum over its target tokens divided by their number, across micro-batches and ranks;
    - the head runs on target positions only (`training/head.py`);
    - `evaluate` returns the token-weighted mean, whatever the batch size, packing or number of processes;
    - checkpoints are atomic, checksummed and owned by one recipe (`training/checkpoints.py`);
    - a loss or gradient that is not finite stops the run before the optimizer step.
    """

    control: TrainerControl

    def __init__(
        self, *, checkpoint_root: Path, owner: str, keep_checkpoints: int, tally: StepTally, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.checkpoint_root, self.owner, self.keep_checkpoints = checkpoint_root, owner, keep_checkpoints
        self.tally = tally
        # The loss below divides by the targets of the whole step, so the trainer must count and not rescale.
        self.model_accepts_loss_kwargs = True
        self.loss_is_scaled_for_ga = True
        base = self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model
        self.uses_target_head = supports_target_head(base)
        if self.uses_target_head:
            add_target_head(base)

    def _nll(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        if self.uses_target_head:
            return model(**inputs, target_head=True).nll  # type: ignore[no-any-return]
        return full_logits_nll(model, inputs)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor:
        """Sum of the target losses [nats] over the targets of the whole optimizer step (all ranks)."""
        assert not return_outputs, "the logits are never built"
        nll = self._nll(model, inputs)
        n_targets = num_items_in_batch if num_items_in_batch is not None else nll.numel()
        nll_sum = nll.sum()
        self._count(inputs, nll, float(nll_sum.detach()))
        # DDP averages gradients over the ranks, the definition sums them.
        ranks = self.accelerator.num_processes if self.args.average_tokens_across_devices else 1
        return nll_sum * (ranks / max(float(n_targets), 1.0))

    def _count(self, inputs: dict[str, Any], nll: Tensor, nll_sum: float) -> None:
        if not math.isfinite(nll_sum):
            raise _not_finite("loss", self.state.global_step + 1)
        if "attention_mask" in inputs:
            lengths = inputs["attention_mask"].sum(dim=1)
        else:
            lengths = inputs["cu_seq_lens_q"].diff()
        self.tally.nll_sum += nll_sum
        self.tally.n_targets += nll.numel()
        self.tally.n_tokens += int(lengths.sum())
        self.tally.sum_squared_lengths += int((lengths.long() ** 2).sum())

    def _sum_tally_over_ranks(self) -> None:
        """What is logged is the step of all ranks: the loss is the one that is optimized, not that of this rank's rows."""
        tally = self.tally
        counted = [tally.nll_sum, tally.n_targets, tally.n_tokens, tally.sum_squared_lengths]
        totals = torch.tensor(counted, dtype=torch.float64, device=self.args.device)
        totals = self.accelerator.reduce(totals, reduction="sum")
        tally.nll_sum = float(totals[0])
        tally.n_targets, tally.n_tokens, tally.sum_squared_lengths = (int(total) for total in totals[1:])

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

    def evaluate(self, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> dict[str, float]:
        """Token-weighted mean loss of the validation rows: Σ nll / Σ targets, in nats, over all processes."""
        model = self.model_wrapped if self.model_wrapped is not None else self.model
        was_training = model.training
        model.eval()
        totals = torch.zeros(2, dtype=torch.float64, device=self.args.device)
        with torch.no_grad():
            for batch in self.get_eval_dataloader():
                with self.compute_loss_context_manager(), self.accelerator.autocast():
                    nll = self._nll(model, self._prepare_inputs(batch))
                totals += torch.stack(
                    [nll.double().sum(), torch.tensor(float(nll.numel()), dtype=torch.float64)]
                )
        model.train(was_training)
        totals = self.accelerator.reduce(totals, reduction="sum")
        metrics = {
            f"{metric_key_prefix}_loss": float(totals[0] / totals[1]),
            f"{metric_key_prefix}_target_tokens": float(totals[1]),
        }
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Only what `report_to` trackers need; events.jsonl is written by the telemetry callback."""
        super(SFTTrainer, self).log(logs, start_time)

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


__all__ = ["IGNORED", "ExactSftTrainer", "OnEvent", "StopWhenAsked"]
