"""TRL's SFTTrainer, made exact: token-weighted losses, target-only head, whole checkpoints, a stop before a bad step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from trl import SFTTrainer

from finetune.model.adapters import without_adapters
from finetune.recipe.schema import TrainSection
from finetune.telemetry.callback import StepTally
from finetune.training.batch_ramp import Windows
from finetune.training.best_step import RowLosses
from finetune.training.branches import attention_work
from finetune.training.embedding_noise import EmbeddingNoise, token_lengths
from finetune.training.exact_trainer import ExactTrainer, OnEvent, StopWhenAsked
from finetune.training.head import (
    IGNORED,
    TargetOutput,
    add_target_head,
    full_logits_losses,
    supports_target_head,
)
from finetune.training.losses import PLAIN, LossShape
from finetune.training.prefixes import PrefixCollator
from finetune.training.turn_weights import WeightedCollator, target_weights
from finetune.training.validation import RowSums, document_of_targets, own_batches

_NOT_FOR_THE_MODEL = ("target_weights", "rows", "repeated_tokens")


class ExactSftTrainer(ExactTrainer, SFTTrainer):
    """Differences from TRL, each tested against the plain definition, besides those of `ExactTrainer`:

    - the loss of a step is the weighted sum over its targets divided by their weights, across micro-batches and ranks;
    - the head runs on target positions only (`head.py`), whatever the loss's shape (`losses.py`);
    - `evaluate` returns the token-weighted mean negative log-likelihood of the rows, each once, whatever the batch size,
      packing or number of processes, and leaves the losses of every row in `row_losses`;
    - with `windows` a step is a list of micro-batches, as many as the batch ramp says.
    """

    row_losses: RowLosses
    row_ids: Sequence[str] | None = None  # of the train rows, by their places; for the events
    data_collator: Any

    def __init__(
        self,
        *,
        checkpoint_root: Path,
        owner: str,
        settings: TrainSection,
        tally: StepTally,
        windows: Windows | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.follow(settings, checkpoint_root=checkpoint_root, owner=owner, tally=tally, windows=windows)
        loss = settings.loss
        self.loss_shape = LossShape(loss.kind == "dft", loss.label_smoothing, loss.z_loss)
        self.data_collator = WeightedCollator(self.data_collator)
        base = without_adapters(self.model)
        self.noise = EmbeddingNoise(base.get_input_embeddings(), loss.neftune_alpha)
        self.uses_target_head = supports_target_head(base) and not self.spreads_trained_head(base)
        if self.uses_target_head:
            add_target_head(base)

    def share_prefixes(self) -> None:
        """From now on packs hold once what their rows begin with alike; for models that `prefixes_can_be_shared` found able."""
        self.data_collator = PrefixCollator(self.data_collator)

    def restore_model(self) -> None:
        """Take back what this trainer put on the model: its head and its noise. For trainers that only measure."""
        self.noise.remove()
        base = without_adapters(self.model)
        base.__dict__.pop("forward", None)

    def _losses(self, model: nn.Module, inputs: dict[str, Any], shape: LossShape = PLAIN) -> TargetOutput:
        """Losses [M] of the targets of one batch."""
        left_out = (*_NOT_FOR_THE_MODEL, *(("cu_seq_lens_q",) if "branches" in inputs else ()))
        plain = {name: value for name, value in inputs.items() if name not in left_out}
        if self.uses_target_head:
            return model(**plain, target_head=True, loss_shape=shape)  # type: ignore[no-any-return]
        return full_logits_losses(model, plain, shape)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor:
        """The micro-batch's part of what is minimised: its weighted losses over the weights of the whole step."""
        assert not return_outputs, "the logits are never built"
        self.noise.begin(inputs)
        losses = self._losses(model, inputs, self.loss_shape)
        self.noise.end()
        weights = target_weights(inputs)
        total = losses.objective.sum() if weights is None else (losses.objective * weights).sum()
        total_weight = num_items_in_batch
        if total_weight is None:
            total_weight = losses.nll.numel() if weights is None else weights.sum()
        self._count(inputs, losses, float(total.detach()), weights)
        return self.step_loss(total, total_weight)

    def _count(
        self, inputs: dict[str, Any], losses: TargetOutput, objective: float, weights: Tensor | None
    ) -> None:
        nll_sum = float(losses.nll.detach().sum())
        self.require_finite_loss(nll_sum)
        self.require_finite_loss(objective)
        self.tally.nll_sum += nll_sum
        self.count_tokens(inputs, losses.nll.numel())
        self.note_worst_row(inputs, losses.nll.detach())
        if weights is not None or not self.settings.loss.is_plain:
            total_weight = losses.nll.numel() if weights is None else float(weights.sum())
            self.tally.add_examples(0, {"objective": (objective, total_weight)})

    def count_tokens(self, inputs: dict[str, Any], n_targets: int) -> None:
        """Add a batch's tokens, targets and rows to the step's tally."""
        lengths = (
            token_lengths(inputs)[:, 0] if "attention_mask" in inputs else inputs["cu_seq_lens_q"].diff()
        )
        tally = self.tally
        repeated = inputs.get("repeated_tokens", 0)
        tally.n_targets += n_targets
        tally.n_tokens += int(lengths.sum()) + repeated
        tally.n_repeated += repeated
        if "branches" in inputs:
            tally.sum_squared_lengths += attention_work(inputs["branches"])
        else:
            tally.sum_squared_lengths += int((lengths.long() ** 2).sum())
        if self.row_ids is not None:
            silent = self.left_out(self.state.global_step)
            ids = [self.row_ids[row] for row in inputs.get("rows", ())]
            tally.rows.extend(row for row in ids if row not in silent)

    def note_worst_row(self, inputs: dict[str, Any], nll: Tensor) -> None:
        """Keep the row whose targets have the highest mean loss; `nll` [M] are those of the batch's targets."""
        if self.row_ids is None or "rows" not in inputs or not nll.numel():
            return
        documents = document_of_targets(inputs)
        n_rows = len(inputs["rows"])
        sums = torch.zeros(n_rows, dtype=torch.float64, device=nll.device).index_add_(
            0, documents, nll.double()
        )
        means = sums / torch.bincount(documents, minlength=n_rows).clamp(min=1)
        loss, place = means.max(dim=0)
        worst = (float(loss), self.row_ids[inputs["rows"][int(place)]])
        self.tally.worst_row = max(worst, self.tally.worst_row or worst)

    def silence(self, batches: list[Any], rows: frozenset[str]) -> None:
        """Take the targets of `rows` out of the batches: of packed ones their stretch of the pack, else their line."""
        assert self.row_ids is not None, "row ids are given before training"
        for batch in batches:
            if isinstance(batch, list):
                self.silence(batch, rows)
                continue
            for place, row in enumerate(batch["rows"]):
                if self.row_ids[row] not in rows:
                    continue
                if "attention_mask" in batch:
                    batch["labels"][place] = IGNORED
                else:
                    start, end = batch["cu_seq_lens_q"][place : place + 2].tolist()
                    batch["labels"][0, start:end] = IGNORED

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Tensor:
        """Weights of the targets of the whole optimizer step, over all ranks; plain targets weigh 1."""
        total = 0.0
        for batch in batch_samples:
            weights = target_weights(batch)
            total += (
                int((batch["labels"][:, 1:] != IGNORED).sum()) if weights is None else float(weights.sum())
            )
        counted = torch.tensor(total, dtype=torch.float64, device=device)
        if self.args.average_tokens_across_devices and self.args.world_size > 1:
            counted = self.accelerator.reduce(counted, reduction="sum")
        return counted

    def evaluate(self, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> dict[str, float]:
        """Token-weighted mean loss of the validation rows: Σ nll / Σ targets, in nats, over all processes."""
        model = self.model_wrapped if self.model_wrapped is not None else self.model
        was_training = model.training
        model.eval()
        with self.averaged_weights(), torch.no_grad():
            self.row_losses = self._row_losses(model)
        model.train(was_training)
        metrics = {
            f"{metric_key_prefix}_loss": self.row_losses.mean,
            f"{metric_key_prefix}_target_tokens": float(sum(self.row_losses.targets)),
        }
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _row_losses(self, model: nn.Module) -> RowLosses:
        dataset: Any = self.eval_dataset
        sums = RowSums(sum(len(rows) for rows in dataset["rows"]), self.args.device)
        size, rank, n_ranks = (
            self.args.per_device_eval_batch_size,
            self.accelerator.process_index,
            self.accelerator.num_processes,
        )
        for indices in own_batches(len(dataset), size, rank, n_ranks):
            examples = [dataset[index] for index in indices or [0]]
            batch = self._prepare_inputs(self.data_collator(examples))
            with self.compute_loss_context_manager(), self.accelerator.autocast():
                nll = self._losses(model, batch).nll
            if indices:
                rows = torch.tensor([row for example in examples for row in example["rows"]])
                sums.add(nll, document_of_targets(batch), rows)
        return sums.over_ranks(self.accelerator)


__all__ = ["IGNORED", "ExactSftTrainer", "OnEvent", "StopWhenAsked"]
