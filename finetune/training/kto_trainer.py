"""TRL's KTO trainer over branched rows: answers that are wanted or not, each judged by itself.

Every example carries a second answer, that of another prompt: the difference of its log-probability to the reference's is
the estimate of the KL divergence that wanted and unwanted answers are measured from (Ethayarajh et al. 2024,
arXiv:2402.01306, section 4). It has no gradient.

Shapes: N examples of a micro-batch; A = 2 N answers with the estimate, N without; L targets of the longest answer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from trl import KTOTrainer

from finetune.recipe.preference_section import PreferenceSection
from finetune.training.answer_trainer import AnswerTrainer
from finetune.training.answers import Answers, Losses
from finetune.training.mismatched import uses_mismatched_answers
from finetune.training.reference_start import require_start
from finetune.training.shares import IDLE


class ExactKtoTrainer(AnswerTrainer, KTOTrainer):
    """KTO and TRL's unpaired APO, against a reference whose log-probabilities come with the packs.

    The KL estimate is the mean over the examples of a whole step, or of a whole validation, on all ranks: how they are
    batched and shared out does not change the loss. Where a step is several forward passes, the estimate is made by
    passes of its own, without gradient, before them.
    """

    def __init__(self, *, preference: PreferenceSection, starts_at_reference: bool, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._starts_at_reference = starts_at_reference
        (self.loss_type,) = preference.losses_of("kto")
        self.calculate_KL = uses_mismatched_answers(preference)
        self.beta = preference.beta
        self.desirable_weight, self.undesirable_weight = (
            preference.desirable_weight,
            preference.undesirable_weight,
        )
        self.precompute_ref_logps = True
        self._mismatched: Tensor | None = None
        self._known: Tensor | None = (
            None  # the divergence of the step, or of the validation that is being made
        )

    def n_examples(self, batch: dict[str, Any]) -> int:
        return len(batch["wanted"])

    def n_targets(self, batch: dict[str, Any]) -> int:
        return int(batch["answer_lengths"][:: self._stride].sum())

    @property
    def _stride(self) -> int:
        """Answers to an example."""
        return 2 if self.calculate_KL else 1

    def losses(self, answers: Answers, batch: dict[str, Any]) -> Losses:
        stride, reference = self._stride, batch["reference"].to(answers.logps.dtype)
        own = Answers(answers.by_target[::stride], answers.lengths[::stride])
        if self._starts_at_reference and self.model.training and self.state.global_step == 0:
            require_start(answers.logps - reference, reference, self.model, self.compute_dtype)
        gaps = self._gaps(answers, batch) if self.calculate_KL else None
        if self._known is not None:
            self._mismatched = self._known
        elif (
            gaps is not None
        ):  # a pack that is only computed along has its place on another rank, or an earlier one
            self._mismatched = self._mean_over_ranks(gaps[:0] if self._idle else gaps)
        wanted = batch["wanted"]
        mean = self._loss(own, wanted, reference[::stride])
        rewards = self.beta * (own.logps.detach() - reference[::stride])
        measures = {}
        for name, chosen in (("chosen", wanted), ("rejected", ~wanted)):
            count = float(chosen.sum())
            measures[f"reward_{name}"] = (float(rewards[chosen].sum()), count)
            measures[f"logp_{name}"] = (float(own.logps.detach()[chosen].sum()), count)
        if gaps is not None:
            measures["kl"] = (float(gaps.sum()), float(len(wanted)))
        return Losses(mean * len(wanted), measures)

    def _loss(self, own: Answers, wanted: Tensor, reference: Tensor) -> Tensor:
        """TRL's mean loss of answers, measured from the divergence that is set."""
        with self.trl_alone():
            mean: Tensor = self._compute_loss(*_for_trl(own, wanted, reference), False)
        return mean

    @contextlib.contextmanager
    def validation_of(self, scored: Sequence[tuple[Answers, dict[str, Any]]]) -> Iterator[None]:
        """The divergence of all that was scored, on all ranks, while their losses are taken."""
        of_step = self._known
        if self.calculate_KL:
            self._known = self._mean_of([self._gaps(answers, batch) for answers, batch in scored])
        try:
            yield
        finally:
            self._known = of_step

    def get_batch_samples(
        self, epoch_iterator: Any, num_batches: int, device: torch.device
    ) -> tuple[Any, Any]:
        """The micro-batches of a step, once the divergence of all of them is known."""
        batches, items = super().get_batch_samples(epoch_iterator, num_batches, device)
        parts = [part for batch in batches for part in (batch if isinstance(batch, list) else [batch])]
        several = self.calculate_KL and len(parts) > 1  # as many on every rank
        self._known = self._mean_of(self._gaps_before(parts)) if several else None
        return batches, items

    @torch.no_grad()
    def _gaps_before(self, parts: Sequence[dict[str, Any]]) -> list[Tensor]:
        """See `_gaps`, of every micro-batch that counts on this rank."""
        model = self.model if self.model_wrapped is None else self.model_wrapped
        was_training = model.training
        model.eval()
        found = []
        for part in parts:
            inputs = self._prepare_inputs({name: value for name, value in part.items() if name != IDLE})
            with (
                self.mapped_activations(inputs),
                self.compute_loss_context_manager(),
                self.accelerator.autocast(),
            ):
                gaps = self._gaps(self.score(model, inputs), inputs)
            if IDLE not in part:
                found.append(gaps)
        model.train(was_training)
        return found

    def _mean_of(self, gaps: Sequence[Tensor]) -> Tensor:
        """[1] mean over all ranks; this one may have none."""
        return self._mean_over_ranks(torch.cat([*gaps, torch.zeros(0, device=self.args.device)]))

    def _gaps(self, answers: Answers, batch: dict[str, Any]) -> Tensor:
        """[N] log-ratios of the mismatched answers to the reference; without gradient."""
        reference: Tensor = batch["reference"].to(answers.logps.dtype)
        return answers.logps[1::2].detach() - reference[1::2]

    def _mean_over_ranks(self, gaps: Tensor) -> Tensor:
        """[1] mean of the log-ratios `gaps` of mismatched answers, over those of all ranks."""
        sums = torch.stack([gaps.double().sum(), gaps.new_tensor(len(gaps), dtype=torch.float64)])
        total, count = self.accelerator.reduce(sums, reduction="sum")
        mean: Tensor = (total / count.clamp(min=1)).to(gaps.dtype)
        return mean[None]

    def _compute_kl_logps(self, model: Any, batch: Any) -> Tensor | None:
        """What TRL asks the model for: it was scored in the same row as the answers, and is their log-ratio already."""
        return self._mismatched

    def losses_of_examples(self, answers: Answers, batch: dict[str, Any]) -> list[tuple[float, float, int]]:
        """Each measured from the divergence of the whole forward pass, which `losses` has just found."""
        stride, reference = self._stride, batch["reference"].to(answers.logps.dtype)
        found = []
        for index in range(self.n_examples(batch)):
            own = slice(index * stride, index * stride + 1)
            one = Answers(answers.by_target[own], answers.lengths[own])
            found.append((float(self._loss(one, batch["wanted"][index : index + 1], reference[own])), 0.0, 0))
        return found

    def derived(self, means: dict[str, float]) -> dict[str, float]:
        """With the margin between wanted and unwanted answers, which are not in pairs."""
        if {"reward_chosen", "reward_rejected"} <= means.keys():
            return means | {"reward_margin": means["reward_chosen"] - means["reward_rejected"]}
        return means


def _for_trl(own: Answers, wanted: Tensor, reference: Tensor) -> tuple[Any, dict[str, Any]]:
    """A stand-in for the model, and the batch, as TRL's KTO loss reads them; what it only logs are zeros."""
    blank = torch.zeros_like(own.by_target)
    found = SimpleNamespace(log_probs=own.by_target, entropy=blank, mean_logits=blank)
    places = torch.arange(own.by_target.shape[1] + 1, device=own.lengths.device)[None, :]
    inside = ((places >= 1) & (places <= own.lengths[:, None])).long()
    batch = {
        "input_ids": torch.zeros_like(inside),
        "attention_mask": inside,
        "completion_mask": inside,
        "label": wanted,
        "ref_logps": reference,
        "ref_KL_logps": reference.new_zeros(1),
    }
    return (lambda **_: found), batch
