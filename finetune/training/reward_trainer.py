"""TRL's reward trainer over branched rows: the answer that is chosen scores higher (Bradley and Terry 1952).

Shapes: P pairs of a micro-batch, A = 2 P answers, T tokens of the row, D hidden size.
"""

from __future__ import annotations

import functools
import types
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from trl import RewardTrainer

from finetune.model.reward import is_reward_model
from finetune.recipe.preference_section import PreferenceSection
from finetune.training.answer_trainer import AnswerTrainer
from finetune.training.answers import Answers, Losses
from finetune.training.branches import model_inputs


class ExactRewardTrainer(AnswerTrainer, RewardTrainer):
    """The loss of a step is the mean over its pairs; a prompt is computed once for both answers."""

    def __init__(self, *, preference: PreferenceSection, **kwargs: Any) -> None:
        super().__init__(**kwargs)

    def prepare_head(self, base: Any) -> None:
        """Read scores at the answers' ends: transformers reads one a row."""
        assert is_reward_model(base), "the model predicts tokens and gives no score"
        _add_score_head(base)

    def score(self, model: nn.Module, batch: dict[str, Any]) -> Answers:
        """Scores [A] of every answer, each as if it were one target of that log-probability."""
        inputs = model_inputs(batch, self.attention, self.compute_dtype)
        scores: Tensor = model(**inputs, score_places=batch["last_places"])
        return Answers(scores[:, None], torch.ones_like(batch["answer_lengths"]))

    def losses(self, answers: Answers, batch: dict[str, Any]) -> Losses:
        good, bad = answers.of(0).logps, answers.of(1).logps
        logits = torch.cat([good, bad])[:, None]  # chosen first, as TRL reads them
        with self.trl_alone():
            mean = RewardTrainer.compute_loss(
                self,
                lambda **_: SimpleNamespace(logits=logits),
                {"attention_mask": torch.ones_like(logits, dtype=torch.long)},
            )
        with torch.no_grad():
            sums = [good.sum(), bad.sum(), (good - bad).sum(), (good > bad).sum()]
        names = ("reward_chosen", "reward_rejected", "reward_margin", "reward_accuracy")
        measures = {name: (float(value), float(len(good))) for name, value in zip(names, sums, strict=True)}
        return Losses(mean * len(good), measures)


def _add_score_head(model: Any) -> None:
    """Let `model(..., score_places=places)` return the scores [A] at places of the flattened batch."""
    original_forward = model.forward

    @functools.wraps(type(model).forward)
    def forward(self: Any, *args: Any, score_places: Tensor | None = None, **kwargs: Any) -> Any:
        if score_places is None:
            return original_forward(*args, **kwargs)
        hidden = self.base_model(*args, **{**kwargs, "use_cache": False}).last_hidden_state
        return self.score(hidden.flatten(0, 1)[score_places]).squeeze(-1).float()

    model.forward = types.MethodType(forward, model)
