"""TRL's KTO trainer over branched rows: answers that are wanted or not, each judged by itself.

Every example carries a second answer, that of another prompt: the difference of its log-probability to the reference's is
the estimate of the KL divergence that wanted and unwanted answers are measured from (Ethayarajh et al. 2024,
arXiv:2402.01306, section 4). It has no gradient.

Shapes: N examples of a micro-batch; A = 2 N answers with the estimate, N without; L targets of the longest answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from trl import KTOTrainer

from finetune.data.pair_tokens import AnsweredPrompt
from finetune.recipe.preference_section import PreferenceSection
from finetune.training.answer_trainer import AnswerTrainer
from finetune.training.answers import Answers, Losses


def with_mismatched_answers(examples: Sequence[AnsweredPrompt]) -> list[AnsweredPrompt]:
    """Each example with the answer of the nearest one before it, round the end, that has another prompt.

    Where all prompts are the same it is the example before: then nothing is mismatched, and KTO has no estimate to use.
    """
    found = []
    for place, example in enumerate(examples):
        others = (examples[(place - back) % len(examples)] for back in range(1, len(examples)))
        other = next((one for one in others if one.prompt != example.prompt), examples[place - 1])
        found.append(
            AnsweredPrompt(example.row_id, example.prompt, (example.chosen, other.chosen), example.wanted)
        )
    return found


class ExactKtoTrainer(AnswerTrainer, KTOTrainer):
    """KTO and TRL's unpaired APO, against a reference whose log-probabilities come with the packs.

    The KL estimate is the mean over the examples of one forward pass, as in TRL; a pack holds several.
    """

    def __init__(self, *, preference: PreferenceSection, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        (self.loss_type,) = preference.losses_of("kto")
        self.calculate_KL = uses_mismatched_answers(preference)
        self.beta = preference.beta
        self.desirable_weight, self.undesirable_weight = (
            preference.desirable_weight,
            preference.undesirable_weight,
        )
        self.precompute_ref_logps = True
        self._mismatched: Tensor | None = None

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
        self._mismatched = answers.logps[1::2].detach() if self.calculate_KL else None
        wanted = batch["wanted"]
        mean = self._compute_loss(*_for_trl(own, wanted, reference, stride), False)
        self._metrics["train"].clear()
        self._metrics["eval"].clear()
        rewards = self.beta * (own.logps.detach() - reference[::stride])
        measures = {}
        for name, chosen in (("chosen", wanted), ("rejected", ~wanted)):
            count = float(chosen.sum())
            measures[f"reward_{name}"] = (float(rewards[chosen].sum()), count)
            measures[f"logp_{name}"] = (float(own.logps.detach()[chosen].sum()), count)
        if self._mismatched is not None:
            gap = float((self._mismatched - reference[1::2]).sum())
            measures["kl"] = (gap, float(len(wanted)))
        return Losses(mean * len(wanted), measures)

    def _compute_kl_logps(self, model: Any, batch: Any) -> Tensor | None:
        """What TRL asks the model for: it was scored in the same row as the answers."""
        return self._mismatched

    def _means(self, totals: dict[str, float], prefix: str) -> dict[str, float]:
        """With the margin between wanted and unwanted answers, which are not in pairs."""
        means = super()._means(totals, prefix)
        sides = [means.get(f"{prefix}_reward_{name}") for name in ("chosen", "rejected")]
        if None not in sides:
            means[f"{prefix}_reward_margin"] = sides[0] - sides[1]  # type: ignore[operator]
        return means


def uses_mismatched_answers(preference: PreferenceSection) -> bool:
    """Whether the loss measures from the KL divergence."""
    return preference.losses_of("kto") == ("kto",)


def _for_trl(own: Answers, wanted: Tensor, reference: Tensor, stride: int) -> tuple[Any, dict[str, Any]]:
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
        "ref_logps": reference[::stride],
        "ref_KL_logps": reference[1::2] if stride == 2 else None,
    }
    return (lambda **_: found), batch
