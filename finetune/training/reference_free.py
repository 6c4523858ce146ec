"""TRL's CPO (with SimPO) and ORPO trainers over branched rows: preference methods without a reference.

Rewards are beta times the log-probability of an answer; its mean over the targets for `ipo`, SimPO and ORPO.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from trl.experimental.cpo import CPOTrainer
from trl.experimental.orpo import ORPOTrainer

from finetune.recipe.preference_section import Method, PreferenceSection
from finetune.training.answer_trainer import AnswerTrainer
from finetune.training.answers import Answers, Losses, chosen_nll, reward_measures

_NEAREST_TO_CERTAIN = -torch.finfo(torch.float32).eps  # its exponential is below 1 however it is rounded


class ExactCpoTrainer(AnswerTrainer, CPOTrainer):
    """CPO (Xu et al. 2024, arXiv:2401.08417) and SimPO (Meng et al. 2024, arXiv:2405.14734): no reference."""

    def __init__(self, *, preference: PreferenceSection, method: Method, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.loss_type: str = "simpo" if method == "simpo" else preference.losses_of("cpo")[0]
        self.nll_weight = preference.nll_weight_of(method)
        self.beta, self.label_smoothing = preference.beta, preference.label_smoothing
        self.simpo_gamma, self.alpha = preference.simpo_gamma, 0.0

    def losses(self, answers: Answers, batch: dict[str, Any]) -> Losses:
        chosen, rejected = answers.of(0), answers.of(1)
        by_mean = self.loss_type in ("ipo", "simpo")
        found, good, bad = self.cpo_loss(
            chosen.mean_logps if by_mean else chosen.logps, rejected.mean_logps if by_mean else rejected.logps
        )
        measures = reward_measures(good, bad, chosen, rejected)
        return Losses(found.sum(), measures, *chosen_nll(chosen, self.nll_weight))


class ExactOrpoTrainer(AnswerTrainer, ORPOTrainer):
    """ORPO (Hong et al. 2024, arXiv:2403.07691): nll of the chosen answer and a weighted odds ratio; no reference.

    The likelihood is that of the answer, as in the paper; TRL also trains the prompt. The odds of an answer that is certain
    in fp32 are infinite, and their gradient is no number: it counts as the likeliest that fp32 can tell from 1.
    """

    def __init__(self, *, preference: PreferenceSection, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.beta, self.nll_weight = preference.beta, preference.nll_weight_of("orpo")

    def losses(self, answers: Answers, batch: dict[str, Any]) -> Losses:
        chosen, rejected = answers.of(0), answers.of(1)
        weighted_ratio, good, bad, _, _ = self.odds_ratio_loss(
            _uncertain(chosen.mean_logps), _uncertain(rejected.mean_logps)
        )
        measures = reward_measures(good, bad, chosen, rejected)
        return Losses(-weighted_ratio.sum(), measures, *chosen_nll(chosen, self.nll_weight))


def _uncertain(logps: Tensor) -> Tensor:
    """Log-probabilities of at most the largest probability below 1, with the gradient of what they were."""
    return logps + (logps.clamp(max=_NEAREST_TO_CERTAIN) - logps).detach()
