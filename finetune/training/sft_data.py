"""Tokenised rows as TRL's trainer reads them, and the recipe in its terms."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset, Features, Value
from datasets import Sequence as Column
from trl import SFTConfig

from finetune.data.packing import pack
from finetune.data.tokenise import TokenisedRow
from finetune.errors import UserError
from finetune.recipe.schema import Recipe, TrainSection
from finetune.training.arguments import shared_arguments
from finetune.training.turn_weights import row_weights

_IDS = Column(Value("int32"))


def training_dataset(rows: Sequence[TokenisedRow], settings: TrainSection) -> Dataset:
    """Packs (or rows, without packing) as the trainer reads them.

    input_ids and labels; seq_lengths of a pack's rows, which lie one behind the other, so that none attends to another;
    `rows`, their places in `rows`; and `weights` of the tokens where the recipe, or one of the rows, weighs turns.
    """
    lengths = [len(row.input_ids) for row in rows]
    if settings.packing:
        longest = max(lengths, default=0)
        if longest > settings.pack_tokens:
            raise UserError(
                f"a row of {longest} tokens does not fit a pack of {settings.pack_tokens}",
                where="train.pack_tokens",
                fix=f"set train.pack_tokens to {longest} or more, or lower data.max_tokens",
            )
        packs = pack(lengths, settings.pack_tokens)
    else:
        packs = [[index] for index in range(len(rows))]
    columns: dict[str, list[list[Any]]] = {
        "input_ids": [[token for index in members for token in rows[index].input_ids] for members in packs],
        "labels": [[label for index in members for label in rows[index].labels] for members in packs],
        "rows": packs,
    }
    if settings.packing:
        columns["seq_lengths"] = [[lengths[index] for index in members] for members in packs]
    features = dict.fromkeys(columns, _IDS)
    if settings.loss.turn_weights or any(row.weights is not None for row in rows):
        weights = [row_weights(row, settings.loss.turn_weights) for row in rows]
        columns["weights"] = [[weight for index in members for weight in weights[index]] for members in packs]
        features["weights"] = Column(Value("float32"))
    return Dataset.from_dict(columns, features=Features(features))


def trainer_arguments(recipe: Recipe, total_steps: int, output: Path, *, validates: bool = True) -> SFTConfig:
    """The recipe in TRL's terms. `validates`: whether there are rows to validate on. Everything that TRL would do to rows is off: they come tokenised and packed."""
    return SFTConfig(
        **shared_arguments(recipe, total_steps, output, validates=validates),
        packing=recipe.train.packing,
        packing_strategy="bfd",
        max_length=None,
        dataset_kwargs={"skip_prepare_dataset": True},
        remove_unused_columns=False,
    )
