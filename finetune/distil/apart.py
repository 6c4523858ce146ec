"""Whether a live teacher keeps rows apart that lie in one pack, tried before the first step as the student is.

It computes over the student's packs. A teacher whose rows see each other there says other things than it says of each of
them alone, and the student learns those. A teacher cache and a teacher with a tokenizer of its own are asked row by row.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, float32
from torch.nn import functional

from finetune.distil.head import live_targets
from finetune.distil.losses import target_places
from finetune.distil.trainer import DistilTrainer, LiveTeaching
from finetune.model.adapters import without_adapters
from finetune.recipe.schema import Recipe
from finetune.training.apart import STATE, Trial, carries_state, on_device, pack_score, rows_seen

_WHO, _WHERE = "the teacher", "distil.teacher"


def refuse_teacher_state(skeleton: Any, recipe: Recipe) -> None:
    """Raise UserError where it is known without weights: a teacher that computes over packs and carries a state through them."""
    if carries_state(skeleton) and computes_over_packs(recipe):
        raise rows_seen(STATE, _WHERE, _remedy(recipe), _WHO)


def require_teacher_apart(trainer: DistilTrainer, recipe: Recipe) -> None:
    """Raise UserError, naming the teacher, when it is run on the student's batches and rows of a pack see each other in it,
    or attention document by document is not its own."""
    teaching = trainer.teaching
    if not isinstance(teaching, LiveTeaching):
        return
    teacher, n_vocabulary = teaching.teacher, teaching.n_vocabulary
    base = without_adapters(teacher)

    def losses(batch: dict[str, Any]) -> Tensor:
        inputs = on_device(batch, teacher)
        _, answers = target_places(inputs["labels"])
        said = live_targets(teacher, inputs, n_vocabulary)
        logits = said.part(0, len(said)).logits
        assert logits is not None, "a part has its logits made"
        return functional.cross_entropy(logits.float(), answers, reduction="none")

    remedy = _remedy(recipe)
    trial = Trial(
        base=base,
        score=pack_score(trainer, recipe, losses),
        wide=recipe.model.dtype == "fp32" and next(teacher.parameters()).dtype == float32,
        who=_WHO,
        where=_WHERE,
        fix=remedy,
        attention_where=_WHERE,
        attention_fix=remedy,
    )
    trial.run(trainer, packing=recipe.train.packing)


def computes_over_packs(recipe: Recipe) -> bool:
    """Whether the teacher is run on the student's packs, and is not asked row by row."""
    section = recipe.distil
    if section is None or not recipe.train.packing or section.alignment == "text":
        return False
    return section.way == "on_policy" or (section.way == "logits" and section.targets == "live")


def _remedy(recipe: Recipe) -> str:
    unpacked = "set train.packing: false"
    if recipe.distil is not None and recipe.distil.way == "on_policy":
        return unpacked
    return f"{unpacked}, or distil.targets: cache, for which the teacher reads row by row"
