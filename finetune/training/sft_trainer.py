"""TRL's SFTTrainer, made exact: token-weighted losses, target-only head, whole checkpoints, a stop before a bad step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from trl import SFTTrainer

from finetune.telemetry.callback import StepTally
from finetune.training.exact_trainer import ExactTrainer, OnEvent, StopWhenAsked
from finetune.training.head import IGNORED, add_target_head, full_logits_nll, supports_target_head


class ExactSftTrainer(ExactTrainer, SFTTrainer):
    """Differences from TRL, each tested against the plain definition, besides those of `ExactTrainer`:

    - the loss of a step is the sum over its target tokens divided by their number, across micro-batches and ranks;
    - the head runs on target positions only (`training/head.py`);
    - `evaluate` returns the token-weighted mean, whatever the batch size, packing or number of processes.
    """

    def __init__(
        self, *, checkpoint_root: Path, owner: str, keep_checkpoints: int, tally: StepTally, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.keep_checkpoints_in(checkpoint_root, owner=owner, keep=keep_checkpoints, tally=tally)
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
        return self.step_loss(nll_sum, n_targets)

    def _count(self, inputs: dict[str, Any], nll: Tensor, nll_sum: float) -> None:
        self.require_finite_loss(nll_sum)
        if "attention_mask" in inputs:
            lengths = inputs["attention_mask"].sum(dim=1)
        else:
            lengths = inputs["cu_seq_lens_q"].diff()
        self.tally.nll_sum += nll_sum
        self.tally.n_targets += nll.numel()
        self.tally.n_tokens += int(lengths.sum())
        self.tally.sum_squared_lengths += int((lengths.long() ** 2).sum())

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


__all__ = ["IGNORED", "ExactSftTrainer", "OnEvent", "StopWhenAsked"]
