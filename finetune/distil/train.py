"""Distillation, from top to bottom: supervised fine-tuning whose loss is the distance to a teacher."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from finetune.data.tokenise import TokenisedRow
from finetune.distil.apart import require_teacher_apart
from finetune.distil.on_policy import OnPolicyTrainer
from finetune.distil.trainer import DistilTrainer, Teaching
from finetune.recipe.schema import Recipe
from finetune.training.session import TrainResult
from finetune.training.sft import train_sft


def train_distil(
    recipe: Recipe,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    train_rows: Sequence[TokenisedRow],
    validation_rows: Sequence[TokenisedRow],
    *,
    teaching: Teaching,
    n_vocabulary: int,
    **options: Any,
) -> TrainResult:
    """Tune `model`, the student, towards what `teaching` says of the rows' targets; the rest is as in `train_sft`.

    n_vocabulary: ids that both tokenizers have (`shared_vocabulary`). `options` are those of `train_sft`; it takes the
    same rows into the same packs, and resumes in the same way. Raises UserError as it does, and for a student whose logits
    are not the plain product of states and head, and for a live teacher in which packed rows see each other.
    """
    assert recipe.distil is not None, "the recipe's agreement demands it"
    section = recipe.distil
    known: dict[str, Any] = {"teaching": teaching, "loss": section.loss, "n_vocabulary": n_vocabulary}
    kind: type[DistilTrainer] = DistilTrainer
    if section.way == "on_policy":
        kind = OnPolicyTrainer
        known |= {"rows": train_rows, "on_policy": section.on_policy, "seed": recipe.seed}

    def make_trainer(**arguments: Any) -> DistilTrainer:
        trainer = kind(**known, **arguments)
        require_teacher_apart(trainer, recipe)
        return trainer

    return train_sft(
        recipe, model, tokenizer, train_rows, validation_rows, make_trainer=make_trainer, **options
    )
