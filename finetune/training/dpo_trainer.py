"""TRL's DPO trainer over branched rows: its losses, our forward pass, reference and means.

Shapes: P pairs of a micro-batch, A = 2 P answers, L targets of the longest answer. Rewards are beta times the log-ratio
to the reference (Rafailov et al. 2023, arXiv:2305.18290).
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from trl import DPOTrainer

from finetune.recipe.preference_section import PreferenceSection
from finetune.training.answer_trainer import AnswerTrainer
from finetune.training.answers import Answers, Losses, chosen_nll, reward_measures
from finetune.training.reference_start import require_start


class ExactDpoTrainer(AnswerTrainer, DPOTrainer):
    """DPO and TRL's other losses of its family, against a reference whose log-probabilities come with the packs.

    Label smoothing of `sigmoid` is that of conservative DPO (Mitchell 2023): -(1 - e) log s(b d) - e log s(-b d), which is
    TRL's loss plus e b d, since log s(x) - log s(-x) = x. TRL itself ignores it there.
    """

    def __init__(self, *, preference: PreferenceSection, starts_at_reference: bool, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        names = preference.losses_of("dpo")
        weights = dict(zip(names, preference.weights_of("dpo"), strict=True))
        self.nll_weight = preference.nll_weight_of("dpo")
        self._smoothed_sigmoid = weights.get("sigmoid", 0.0) * preference.label_smoothing
        self._starts_at_reference = starts_at_reference
        # What TRL's loss reads. Its 'sft' is a mean over a micro-batch's tokens; ours is over the step's.
        self.loss_types: list[str] = [name for name in names if name != "sft"]
        self.loss_weights = [weights[name] for name in names if name != "sft"]
        self.beta, self.label_smoothing = preference.beta, preference.label_smoothing
        self.precompute_ref_logps, self.use_weighting, self.ld_alpha = True, False, None
        self.f_divergence_type, self.f_alpha_divergence_coef = "reverse_kl", 0.5

    def losses(self, answers: Answers, batch: dict[str, Any]) -> Losses:
        chosen, rejected = answers.of(0), answers.of(1)
        reference = batch["reference"].to(chosen.logps.dtype)
        chosen_ratio, rejected_ratio = chosen.logps - reference[::2], rejected.logps - reference[1::2]
        if self._starts_at_reference and self.model.training and self.state.global_step == 0:
            ratios = torch.stack([chosen_ratio, rejected_ratio])
            require_start(ratios, reference, self.model, self.compute_dtype)
        n_pairs = len(chosen.lengths)
        with self.trl_alone():
            mean = self._compute_loss(*_for_trl(chosen, rejected, reference), False)
        total = mean * n_pairs
        if self._smoothed_sigmoid:
            total = total + self._smoothed_sigmoid * self.beta * (chosen_ratio - rejected_ratio).sum()
        measures = reward_measures(self.beta * chosen_ratio, self.beta * rejected_ratio, chosen, rejected)
        return Losses(total, measures, *chosen_nll(chosen, self.nll_weight))


def _for_trl(chosen: Answers, rejected: Answers, reference: Tensor) -> tuple[Any, dict[str, Tensor]]:
    """A stand-in for the model, and the batch, as TRL's DPO loss reads them: chosen answers first, then rejected ones.

    The stand-in returns what our own forward pass found; entropy, logits and hits, which TRL only logs, are zeros.
    """
    by_target = torch.cat([chosen.by_target, rejected.by_target])
    lengths = torch.cat([chosen.lengths, rejected.lengths])
    blank = torch.zeros_like(by_target)
    found = SimpleNamespace(log_probs=by_target, entropy=blank, mean_logits=blank, is_top1=blank.bool())
    # One place before the answers, for TRL drops the first column: nothing is predicted there.
    places = torch.arange(by_target.shape[1] + 1, device=lengths.device)[None, :]
    inside = ((places >= 1) & (places <= lengths[:, None])).long()
    batch = {
        "input_ids": torch.zeros_like(inside),
        "attention_mask": inside,
        "completion_mask": inside,
        "ref_chosen_logps": reference[::2],
        "ref_rejected_logps": reference[1::2],
    }
    return (lambda **_: found), batch
