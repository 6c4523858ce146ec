"""Log-probabilities of whole answers, and what trainers that compare answers make of them.

Shapes: A answers of a micro-batch, P pairs (A = 2 P), L targets of the longest answer.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Answers:
    """Log-probabilities of a micro-batch's answers [A]: by target [A, L] padded with 0, and the numbers of targets [A]."""

    by_target: Tensor
    lengths: Tensor

    @property
    def logps(self) -> Tensor:
        """[A] in nats."""
        return self.by_target.sum(dim=1)

    @property
    def mean_logps(self) -> Tensor:
        """[A] in nats a target."""
        return self.logps / self.lengths.clamp(min=1)

    def of(self, side: int) -> Answers:
        """The chosen (0) or rejected (1) answers of pairs."""
        return Answers(self.by_target[side::2], self.lengths[side::2])


@dataclass
class Losses:
    """Losses of a micro-batch: the sum over its examples, and where a method has it the chosen answers' own nll.

    `measures` are further numbers, as (sum, over how many examples), whose means are logged.
    """

    example_sum: Tensor
    measures: dict[str, tuple[float, float]] = field(default_factory=dict)
    nll_sum: Tensor | None = None
    nll_targets: int = 0


def reward_measures(
    good: Tensor, bad: Tensor, chosen: Answers, rejected: Answers
) -> dict[str, tuple[float, float]]:
    """Over pairs: rewards [P] of both sides, how far and how often the chosen one is ahead, log-probabilities."""
    with torch.no_grad():
        sums = torch.stack(
            [
                good.sum(),
                bad.sum(),
                (good - bad).sum(),
                (good > bad).sum(),
                chosen.logps.sum(),
                rejected.logps.sum(),
            ]
        ).tolist()
    names = (
        "reward_chosen",
        "reward_rejected",
        "reward_margin",
        "reward_accuracy",
        "logp_chosen",
        "logp_rejected",
    )
    return {name: (value, float(len(good))) for name, value in zip(names, sums, strict=True)}


def chosen_nll(chosen: Answers, weight: float) -> tuple[Tensor | None, int]:
    """Sum over the chosen answers' targets and their number, as `Losses` takes them; nothing when it has no weight."""
    return (-chosen.by_target.sum(), int(chosen.lengths.sum())) if weight else (None, 0)
