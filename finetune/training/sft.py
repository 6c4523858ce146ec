"""Supervised fine-tuning, from top to bottom: rows in, adapter out. Trainer and loop are TRL's and transformers'."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset, Features, Value
from datasets import Sequence as Column
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from trl import SFTConfig

from finetune.data.packing import pack
from finetune.data.tokenise import TokenisedRow
from finetune.errors import UserError
from finetune.model.adapters import trainables_to_fp32
from finetune.model.fast_lora import speed_up_lora
from finetune.model.source import ModelSource
from finetune.recipe.schema import Recipe, TrainSection
from finetune.telemetry.callback import StepTally
from finetune.training.arguments import count_steps, shared_arguments
from finetune.training.batch_ramp import plan_windows
from finetune.training.checkpoints import damage
from finetune.training.memory_saving import keeps_in_place_products
from finetune.training.session import Session, TrainResult
from finetune.training.sft_trainer import ExactSftTrainer
from finetune.training.turn_weights import row_weights

_IDS = Column(Value("int32"))


def train_sft(
    recipe: Recipe,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    train_rows: Sequence[TokenisedRow],
    validation_rows: Sequence[TokenisedRow],
    *,
    run_folder: Path,
    owner: str,
    say: Callable[[str], None],
    source: ModelSource | None = None,
) -> TrainResult:
    """Tune `model` (adapter attached, or whole) on tokenised rows and write `adapter/` or `model/` into the run folder.

    `source` is the base on disk; its digest is noted beside the adapter, so that another base is refused later.
    Continues from the newest undamaged checkpoint of the same recipe (`owner`: its digest). Raises UserError for a
    non-finite loss or gradient, a disk that is full, a checkpoint of another recipe; KeyboardInterrupt after Ctrl-C,
    once the current step is saved.
    """
    settings = recipe.train
    train_set = training_dataset(train_rows, settings)
    windows = None
    if settings.batch_ramp is not None:
        windows = plan_windows([len(ids) for ids in train_set["input_ids"]], settings, recipe.seed)
    total_steps = count_steps(len(train_set), settings) if windows is None else len(windows)
    checkpoint_root = run_folder / "checkpoints"
    trainer = ExactSftTrainer(
        checkpoint_root=checkpoint_root,
        owner=owner,
        settings=settings,
        tally=StepTally(),
        windows=windows,
        model=model,
        args=trainer_arguments(recipe, total_steps, checkpoint_root),
        train_dataset=train_set,
        eval_dataset=training_dataset(validation_rows, settings) if validation_rows else None,
        processing_class=tokenizer,
    )
    trainables_to_fp32(model)  # TRL casts the adapters of a quantized model to bf16
    if keeps_in_place_products(settings):
        speed_up_lora(model)
    return Session(trainer, recipe, run_folder, say, source).run()


def training_dataset(rows: Sequence[TokenisedRow], settings: TrainSection) -> Dataset:
    """Packs (or rows, without packing) as the trainer reads them.

    input_ids and labels; seq_lengths of a pack's rows, which lie one behind the other, so that none attends to another;
    `rows`, their places in `rows`; and `weights` of the tokens where the recipe weighs turns.
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
    if settings.loss.turn_weights:
        weights = [row_weights(row, settings.loss.turn_weights) for row in rows]
        columns["weights"] = [[weight for index in members for weight in weights[index]] for members in packs]
        features["weights"] = Column(Value("float32"))
    return Dataset.from_dict(columns, features=Features(features))


def trainer_arguments(recipe: Recipe, total_steps: int, output: Path) -> SFTConfig:
    """The recipe in TRL's terms. Everything that TRL would do to rows is off: they come tokenised and packed."""
    return SFTConfig(
        **shared_arguments(recipe, total_steps, output),
        packing=recipe.train.packing,
        packing_strategy="bfd",
        max_length=None,
        dataset_kwargs={"skip_prepare_dataset": True},
        remove_unused_columns=False,
    )


__all__ = ["TrainResult", "count_steps", "damage", "train_sft", "trainer_arguments", "training_dataset"]
