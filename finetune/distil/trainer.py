"""Our SFT trainer with a teacher: the loss is the distance to the teacher's distribution at every target token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor, nn

from finetune.distil.head import add_distillation_head, live_targets, teacher_not_finite
from finetune.distil.losses import DistillationLoss, Targets
from finetune.distil.targets import TeacherTargets
from finetune.errors import UserError
from finetune.model.adapters import without_adapters
from finetune.recipe.distil_section import DistilLossSection
from finetune.training.sft_trainer import ExactSftTrainer
from finetune.training.turn_weights import target_weights
from finetune.training.validation import document_of_targets


class Teaching(Protocol):
    """Who says what the teacher thinks of the targets of a batch, in the order of the flattened batch."""

    def targets(self, inputs: dict[str, Any]) -> Targets: ...


class LiveTeaching:
    """The teacher itself, run on the student's batch."""

    def __init__(self, teacher: Any, n_vocabulary: int) -> None:
        self.teacher, self.n_vocabulary = teacher, n_vocabulary

    def targets(self, inputs: dict[str, Any]) -> TeacherTargets:
        device = inputs["input_ids"].device
        if next(self.teacher.parameters()).device != device:
            self.teacher.to(device)
        return live_targets(self.teacher, inputs, self.n_vocabulary)


class DistilTrainer(ExactSftTrainer):
    """Differences from `ExactSftTrainer`, whose steps, packs, checkpoints and validation it keeps:

    - what is minimised is `distil.loss` over the targets, divided by the targets of the whole step;
    - only logits of tokens that both models know count, whatever the sizes of their embeddings;
    - `loss` of an event is what is minimised; `divergence` and `nll`, where they are computed, stand beside it.
    Validation stays the answers' negative log-likelihood, by which students of any loss can be compared.
    """

    def __init__(
        self, *, teaching: Teaching, loss: DistilLossSection, n_vocabulary: int, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.teaching = teaching
        if not self.uses_target_head:
            raise UserError(
                "the student bends its logits behind the head, and the loss is taken from the head itself",
                where="model.id",
                fix="let the student learn the teacher's answers: generate them (docs/distillation.md) and use train.method sft",
            )
        base = without_adapters(self.model)
        add_distillation_head(base)
        self.distillation = {
            "kind": loss.kind,
            "temperature": loss.temperature,
            "beta": loss.beta,
            "answer_weight": loss.answer_weight,
            "n_vocabulary": n_vocabulary,
            "n_items": 1.0,  # the sum; `step_loss` divides it
        }

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor:
        """The micro-batch's part of what is minimised: its weighted losses over the weights of the whole step."""
        assert not return_outputs, "the logits are never built"
        teacher = self.teaching.targets(inputs | {"rows": rows_with_targets(inputs)})
        weights = target_weights(inputs)
        plain = {name: value for name, value in inputs.items() if name not in ("target_weights", "rows")}
        parts: DistillationLoss = model(
            **plain, teacher=teacher, distillation=self.distillation | {"weights": weights}
        )
        total_weight = num_items_in_batch
        if total_weight is None:
            total_weight = len(teacher) if weights is None else weights.sum()
        if not math.isfinite(float(parts.loss.detach())) and not teacher.is_finite():
            raise teacher_not_finite("distil.teacher", "; the last checkpoint is kept")
        self._count_distilled(inputs, parts, len(teacher))
        return self.step_loss(parts.loss, total_weight)

    def _count_distilled(self, inputs: dict[str, Any], parts: DistillationLoss, n_targets: int) -> None:
        loss_sum = float(parts.loss.detach())
        self.require_finite_loss(loss_sum)
        self.tally.nll_sum += loss_sum
        self.count_tokens(inputs, n_targets)
        self.note_worst_row(inputs, parts.by_target)
        sums = {"divergence": float(parts.divergence_sum), "nll": float(parts.nll_sum)}
        known = {name: (total, n_targets) for name, total in sums.items() if not math.isnan(total)}
        self.tally.add_examples(0, known)


def rows_with_targets(inputs: dict[str, Any]) -> list[int]:
    """The places of those rows of a batch that still have targets: a remedy may have taken a row's out (see `silence`)."""
    taught = set(document_of_targets(inputs).tolist())
    return [row for document, row in enumerate(inputs["rows"]) if document in taught]


def shared_vocabulary(student: Any, teacher: Any) -> int:
    """How many ids both tokenizers have, counted from 0: the largest id of a token, and one.

    Raises UserError unless every token has the same id in both, whatever their embeddings' sizes: a distribution over one
    tokenizer's ids says nothing over another's.
    """
    ours, theirs = student.get_vocab(), teacher.get_vocab()
    if ours != theirs:
        differ = sorted(
            token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token)
        )
        raise UserError(
            f"teacher and student have different tokenizers: {len(differ)} tokens have other ids, e.g. {_told(differ, ours, theirs)}",
            where="distil.teacher",
            why="the teacher's probabilities are of its own tokens, and the student has no such tokens",
            fix="set distil.alignment: text, which compares them where their tokens meet, take a student with the teacher's "
            "tokenizer, or let it learn the teacher's answers as text: distil.way: answers (docs/distillation.md)",
        )
    return int(max(ours.values())) + 1


def _told(differ: Sequence[str], ours: dict[str, int], theirs: dict[str, int]) -> str:
    token = differ[0]
    ids = [str(vocabulary[token]) if token in vocabulary else "none" for vocabulary in (ours, theirs)]
    return f"'{token}' ({ids[0]} in the student, {ids[1]} in the teacher)"
