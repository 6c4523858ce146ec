"""Supervised fine-tuning, from top to bottom: rows in, adapter out. Trainer and loop are TRL's and transformers'."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback

from finetune.data.tokenise import TokenisedRow
from finetune.model.adapters import count_trainable, trainables_to_fp32
from finetune.model.fast import speed_up
from finetune.model.source import ModelSource
from finetune.recipe.schema import Recipe
from finetune.telemetry.callback import StepTally
from finetune.training.apart import require_sft_rows_apart
from finetune.training.arguments import count_steps
from finetune.training.auto import settle_batching
from finetune.training.batch_ramp import plan_windows
from finetune.training.bench import BatchProbe
from finetune.training.checkpoints import damage
from finetune.training.memory_saving import keeps_in_place_products
from finetune.training.prefixes import prefixes_can_be_shared
from finetune.training.session import Session, TrainResult
from finetune.training.sft_data import trainer_arguments, training_dataset
from finetune.training.sft_trainer import ExactSftTrainer


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
    callbacks: Sequence[TrainerCallback] = (),
    make_trainer: Callable[..., ExactSftTrainer] = ExactSftTrainer,
) -> TrainResult:
    """Tune `model` (adapter attached, or whole) on tokenised rows and write `adapter/` or `model/` into the run folder.

    `source` is the base on disk; its digest is noted beside the adapter, so that another base is refused later.
    `make_trainer`: a trainer with another loss over the same rows and packs.
    `callbacks` are called after ours at every step.
    Continues from the newest undamaged checkpoint of the same recipe (`owner`: its digest). Raises UserError for a model
    that does not keep packed rows apart, a non-finite loss or gradient, a disk that is full, a checkpoint of
    another recipe; KeyboardInterrupt after Ctrl-C, once the current step is saved.
    """
    if recipe.train.auto:
        recipe = _settle(recipe, model, tokenizer, train_rows, run_folder, owner, say)
    settings = recipe.train
    train_set = training_dataset(train_rows, settings)
    windows = None
    if settings.batch_ramp is not None:
        windows = plan_windows([len(ids) for ids in train_set["input_ids"]], settings, recipe.seed)
    total_steps = count_steps(len(train_set), settings) if windows is None else len(windows)
    checkpoint_root = run_folder / "checkpoints"
    trainer = make_trainer(
        checkpoint_root=checkpoint_root,
        owner=owner,
        settings=settings,
        tally=StepTally(),
        windows=windows,
        model=model,
        args=trainer_arguments(recipe, total_steps, checkpoint_root, validates=bool(validation_rows)),
        train_dataset=train_set,
        eval_dataset=training_dataset(validation_rows, settings) if validation_rows else None,
        processing_class=tokenizer,
    )
    trainer.row_ids = [row.row_id for row in train_rows]
    trainables_to_fp32(model)  # TRL casts the adapters of a quantized model to bf16
    if keeps_in_place_products(settings):
        speed_up(model)
    require_sft_rows_apart(trainer, recipe)
    if prefixes_can_be_shared(model, recipe, train_rows):
        trainer.share_prefixes()
    return Session(
        trainer,
        recipe,
        run_folder,
        say,
        source,
        validation_sources=[row.source for row in validation_rows],
        sample_rows=validation_rows or train_rows,
        callbacks=callbacks,
    ).run()


def _settle(
    recipe: Recipe,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[TokenisedRow],
    run_folder: Path,
    owner: str,
    say: Callable[[str], None],
) -> Recipe:
    """`train.auto`: the recipe with the batching that measures best on this machine (auto.py)."""
    with BatchProbe(recipe, model, tokenizer, rows) as probe:
        return settle_batching(
            recipe,
            rows,
            model.config.to_dict(),
            run_batch=probe.run,
            n_trainable=count_trainable(model),
            run_folder=run_folder,
            owner=owner,
            say=say,
        )


__all__ = ["TrainResult", "count_steps", "damage", "train_sft", "trainer_arguments", "training_dataset"]
