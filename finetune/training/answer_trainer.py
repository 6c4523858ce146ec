"""What trainers that compare whole answers share: one forward pass over branched rows, losses by example, validation.

TRL's trainers are below it in the class order and give the losses. Their constructors are passed by: they tokenise
prompt and answers apart from the chat template, cast the adapters of quantized models to bf16, and copy an adapter to a
second one by name, which misses trained token rows and splits the weights once more for some starts.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer

from finetune.model.adapters import trainables_to_fp32
from finetune.model.fast_lora import speed_up_lora
from finetune.recipe.schema import TrainSection
from finetune.telemetry.callback import StepTally
from finetune.training.answers import Answers, Losses
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
        self.follow(settings, checkpoint_root=checkpoint_root, owner=owner, tally=tally)
        self.maybe_activation_offload_context = contextlib.nullcontext()
        self.aux_loss_enabled = False
        self._metrics: dict[str, dict[str, list[float]]] = {
            "train": defaultdict(list),
            "eval": defaultdict(list),
        }
        self._total_train_tokens, self._tp_size = 0, 1
        self._step_examples, self._step_chosen_targets = 1.0, 1.0
        base = self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model
        trainables_to_fp32(self.model)
        if keeps_in_place_products(settings):
            speed_up_lora(self.model)
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

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor:
        """The micro-batch's part of the step's loss; counts it in the tally."""
        assert not return_outputs, "the logits are never built"
        losses = self.losses(self.score(model, inputs), inputs)
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
        return self.step_loss(total, self._step_examples)

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

    def evaluate(self, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> dict[str, float]:
        """Means over all validation examples, whatever the batch size, packing or number of processes."""
        model = self.model_wrapped if self.model_wrapped is not None else self.model
        was_training = model.training
        model.eval()
        totals: dict[str, float] = defaultdict(float)
        with torch.no_grad():
            for raw in self.get_eval_dataloader():
                batch = self._prepare_inputs(raw)
                with self.compute_loss_context_manager(), self.accelerator.autocast():
                    losses = self.losses(self.score(model, batch), batch)
                totals["examples"] += self.n_examples(batch)
                totals["target_tokens"] += self.n_targets(batch)
                totals["loss"] += float(losses.example_sum)
                totals["nll"] += float(losses.nll_sum) if losses.nll_sum is not None else 0.0
                totals["nll_targets"] += losses.nll_targets
                for name, (value, number) in losses.measures.items():
                    totals[name] += value
                    totals[f"n {name}"] += number
        model.train(was_training)
        metrics = self._means(totals, metric_key_prefix)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _means(self, totals: dict[str, float], prefix: str) -> dict[str, float]:
        summed = self.accelerator.reduce(
            torch.tensor(list(totals.values()), dtype=torch.float64, device=self.args.device), reduction="sum"
        )
        found = dict(zip(totals, summed.tolist(), strict=True))
        loss = found["loss"] / found["examples"] + self.nll_weight * found["nll"] / max(
            found["nll_targets"], 1.0
        )
        measures = [name for name in found if found.get(f"n {name}")]
        return {
            f"{prefix}_loss": loss,
            f"{prefix}_target_tokens": found["target_tokens"],
            f"{prefix}_examples": found["examples"],
            **{f"{prefix}_{name}": found[name] / found[f"n {name}"] for name in measures},
        }
