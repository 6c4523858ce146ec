"""What trainers that compare whole answers share: one forward pass over branched rows, losses by example, validation.

TRL's trainers are below it in the class order and give the losses. Their constructors are passed by: they tokenise
prompt and answers apart from the chat template, cast the adapters of quantized models to bf16, and copy an adapter to a
second one by name, which misses trained token rows and splits the weights once more for some starts.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer

from finetune.model.adapters import trainables_to_fp32, without_adapters
from finetune.model.fast import speed_up
from finetune.recipe.schema import TrainSection
from finetune.telemetry.callback import StepTally
from finetune.training.answer_validation import losses_one_by_one, validate_answers
from finetune.training.answers import Answers, Losses
from finetune.training.batch_ramp import Windows
from finetune.training.best_step import RowLosses
from finetune.training.branches import BranchCollator, Packs, attention_work, by_answer, model_inputs
from finetune.training.exact_trainer import ExactTrainer
from finetune.training.head import add_target_head, full_logits_nll, supports_target_head
from finetune.training.memory_saving import keeps_in_place_products


class AnswerTrainer(ExactTrainer):
    """Mixed in before one of TRL's trainers; a subclass gives `losses` and sets what TRL's loss reads.

    The loss of a step is the mean over its examples, plus `nll_weight` times the mean over the targets of its chosen
    answers, across micro-batches and ranks: k micro-batches give what one batch gives.
    """

    nll_weight = 0.0
    accelerator: Any
    row_losses: RowLosses

    def __init__(
        self,
        *,
        checkpoint_root: Path,
        owner: str,
        settings: TrainSection,
        tally: StepTally,
        collator: BranchCollator,
        train_packs: Packs,
        validation_packs: Packs | None,
        args: Any,
        windows: Windows | None = None,
        **kwargs: Any,
    ) -> None:
        args.remove_unused_columns = False  # they are packs, not columns
        Trainer.__init__(
            self,
            args=args,
            data_collator=collator,
            train_dataset=train_packs,
            eval_dataset=validation_packs,
            **kwargs,
        )
        self.follow(settings, checkpoint_root=checkpoint_root, owner=owner, tally=tally, windows=windows)
        self.maybe_activation_offload_context = contextlib.nullcontext()
        self.aux_loss_enabled = False
        self._metrics: dict[str, dict[str, list[float]]] = {
            "train": defaultdict(list),
            "eval": defaultdict(list),
        }
        self._total_train_tokens, self._tp_size = 0, 1
        self._step_examples, self._step_chosen_targets = 1.0, 1.0
        base = without_adapters(self.model)
        trainables_to_fp32(self.model)
        if keeps_in_place_products(settings):
            speed_up(self.model)
        self.attention, self.compute_dtype = base.config._attn_implementation, base.dtype
        self.prepare_head(base)

    def prepare_head(self, base: Any) -> None:
        """Teach the model below the adapter to score targets only."""
        self.uses_target_head = supports_target_head(base)
        if self.uses_target_head:
            add_target_head(base)

    def losses(self, answers: Answers, batch: dict[str, Any]) -> Losses:
        """The method's losses of one micro-batch."""
        raise AssertionError("every method has its own")

    def n_examples(self, batch: dict[str, Any]) -> int:
        """Examples in a micro-batch: pairs."""
        return len(batch["answer_lengths"]) // 2

    def n_targets(self, batch: dict[str, Any]) -> int:
        """Targets that are learnt from."""
        return len(batch["targets"])

    def score(self, model: nn.Module, batch: dict[str, Any]) -> Answers:
        """Log-probabilities of every answer of the batch."""
        inputs = model_inputs(batch, self.attention, self.compute_dtype)
        inputs |= {name: batch[name] for name in ("sources", "targets")}
        nll = (
            model(**inputs, target_head=True).nll if self.uses_target_head else full_logits_nll(model, inputs)
        )
        return Answers(by_answer(-nll, batch["answer_lengths"]), batch["answer_lengths"])

    @contextlib.contextmanager
    def trl_alone(self) -> Iterator[None]:
        """For calling TRL's loss: what it logs is gathered from no other rank, and thrown away.

        It gathers one number an example, and ranks have different numbers of examples. Our own sums are reduced later.
        """
        accelerator = self.accelerator

        def same(tensor: Tensor) -> Tensor:
            return tensor

        self.accelerator = SimpleNamespace(device=accelerator.device, gather=same, gather_for_metrics=same)
        try:
            yield
        finally:
            self.accelerator = accelerator
            for kept in self._metrics.values():
                kept.clear()

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor:
        """The micro-batch's part of the step's loss; counts it in the tally."""
        assert not return_outputs, "the logits are never built"
        answers = self.score(model, inputs)
        losses = self.losses(answers, inputs)
        total = losses.example_sum
        if losses.nll_sum is not None:
            per_example = self._step_examples / max(self._step_chosen_targets, 1.0)
            total = total + self.nll_weight * losses.nll_sum * per_example
        value = float(total.detach())
        self.require_finite_loss(value)
        tally = self.tally
        tally.nll_sum += value
        tally.n_targets += self.n_targets(inputs)
        tally.n_tokens += inputs["input_ids"].numel()
        tally.sum_squared_lengths += attention_work(inputs["branches"])
        tally.add_examples(self.n_examples(inputs), losses.measures)
        self._note_rows(answers, inputs)
        return self.step_loss(total, self._step_examples)

    def _note_rows(self, answers: Answers, batch: dict[str, Any]) -> None:
        """Keep which rows were learnt from, and the one with the highest loss: its own, and its chosen answer's mean nll where
        that is learnt too."""
        rows: list[str] = batch["row_ids"]
        self.tally.rows.extend(rows)
        with torch.no_grad():
            each = self.losses_of_examples(answers, batch)
        worst = max(
            (own + self.nll_weight * nll / max(n_targets, 1), row)
            for (own, nll, n_targets), row in zip(each, rows, strict=True)
        )
        self.tally.worst_row = max(worst, self.tally.worst_row or worst)

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Tensor:
        """Examples of the whole optimizer step, over all ranks; the targets of its chosen answers are kept beside it."""
        counts = torch.tensor(
            [
                sum(self.n_examples(batch) for batch in batch_samples),
                sum(int(batch["answer_lengths"][::2].sum()) for batch in batch_samples),
            ],
            dtype=torch.float64,
            device=device,
        )
        if self.args.average_tokens_across_devices and self.args.world_size > 1:
            counts = self.accelerator.reduce(counts, reduction="sum")
        self._step_examples, self._step_chosen_targets = (float(count) for count in counts)
        return counts[0]

    def losses_of_examples(self, answers: Answers, batch: dict[str, Any]) -> list[tuple[float, float, int]]:
        """(own loss, nll of the chosen answer, its targets) of every example: what two validations are compared by."""
        return losses_one_by_one(self, answers, batch)

    def validation_of(self, scored: Sequence[tuple[Answers, dict[str, Any]]]) -> AbstractContextManager[None]:
        """Entered while the losses of a validation are taken, after everything of it is scored; `scored`: on this process."""
        return contextlib.nullcontext()

    def evaluate(self, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> dict[str, float]:
        """Means over all validation examples, each once; leaves the loss of every example in `row_losses`."""
        model = self.model_wrapped if self.model_wrapped is not None else self.model
        was_training = model.training
        model.eval()
        with self.averaged_weights(), torch.no_grad():
            self.row_losses, found = validate_answers(self, model)
        model.train(was_training)
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in self.derived(found).items()}
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def derived(self, means: dict[str, float]) -> dict[str, float]:
        """The means, with what follows from them."""
        return means
