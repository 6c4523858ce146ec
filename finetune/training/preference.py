"""Preference training, from top to bottom: answered prompts in, adapter out. Losses and loop are TRL's and transformers'."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback, TrainingArguments

from finetune.data.pair_tokens import AnsweredPrompt
from finetune.model.source import ModelSource
from finetune.recipe.preference_section import REFERENCE_METHODS, Method
from finetune.recipe.schema import Recipe
from finetune.telemetry.callback import StepTally
from finetune.training.answer_trainer import AnswerTrainer
from finetune.training.apart import require_answers_apart
from finetune.training.arguments import count_steps, shared_arguments
from finetune.training.batch_ramp import plan_windows
from finetune.training.branches import BranchCollator, Packs, make_packs
from finetune.training.mismatched import as_trained
from finetune.training.preference_watch import PreferenceWatch
from finetune.training.reference import add_reference, weights_key
from finetune.training.session import Session, TrainResult
from finetune.training.sharing import prompts_can_be_shared


def train_preference(
    recipe: Recipe,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    train_rows: Sequence[AnsweredPrompt],
    validation_rows: Sequence[AnsweredPrompt],
    *,
    run_folder: Path,
    owner: str,
    references: Path,
    say: Callable[[str], None],
    source: ModelSource | None = None,
    callbacks: Sequence[TrainerCallback] = (),
) -> TrainResult:
    """Tune `model`, as training shall start from it, on answered prompts; write `adapter/` or `model/` into the run folder.

    The reference is `model` as it is given. Its log-probabilities are kept in the folder `references`. The rest is as in
    `train_sft`: `owner`, resuming, errors. `flags` of the result tell of a margin of 0 and of chosen answers that became
    unlikely.
    """
    settings, section = recipe.train, recipe.train.preference
    train_rows, validation_rows = (as_trained(rows, settings) for rows in (train_rows, validation_rows))
    share = section.share_prompts and prompts_can_be_shared(model, train_rows)
    if section.share_prompts and not share and len(train_rows[0].answers) > 1:
        say("this model cannot share a prompt between answers; each gets its own copy, which is slower")
    packs = [
        Packs(
            make_packs(rows, packing=settings.packing, pack_tokens=settings.pack_tokens, share_prompts=share)
        )
        for rows in (train_rows, validation_rows)
    ]
    windows = None
    if settings.batch_ramp is not None:
        tokens = [sum(example.n_tokens for example in pack.examples) for pack in packs[0].packs]
        windows = plan_windows(tokens, settings, recipe.seed)
    trainer = _make_trainer(
        recipe,
        total_steps=count_steps(len(packs[0]), settings) if windows is None else len(windows),
        checkpoint_root=run_folder / "checkpoints",
        owner=owner,
        settings=settings,
        tally=StepTally(),
        windows=windows,
        collator=_collator(settings.method, model, share),
        train_packs=packs[0],
        validation_packs=packs[1] if len(packs[1]) else None,
        model=model,
        processing_class=tokenizer,
    )
    if any(trainer.own_dropout.values()):
        say("the model's own dropout is off: it would change both answers at random")
    require_answers_apart(trainer, recipe)
    watch: PreferenceWatch | None = None
    if settings.method in REFERENCE_METHODS:
        key = weights_key(source, model, recipe.model.quantize, recipe.model.double_quantization)
        add_reference(trainer, model_key=key, base=section.reference == "base", folder=references, say=say)
        events, writes = run_folder / "events.jsonl", trainer.accelerator.is_main_process
        watch = PreferenceWatch(events, trainer.tally, section.beta, say, writes=writes)
        trainer.add_callback(watch)
    result = Session(
        trainer,
        recipe,
        run_folder,
        say,
        source,
        validation_sources=[example.source for pack in packs[1].packs for example in pack.examples],
        sample_rows=validation_rows or train_rows,
        callbacks=callbacks,
    ).run()
    return replace(result, flags=list(watch.flags.values()) if watch else [])


def _make_trainer(
    recipe: Recipe, *, total_steps: int, checkpoint_root: Path, **options: Any
) -> AnswerTrainer:
    """The trainer of the recipe's method, in TRL's terms."""
    method, section = recipe.train.method, recipe.train.preference
    validates = options["validation_packs"] is not None
    shared = shared_arguments(recipe, total_steps, checkpoint_root, validates=validates)
    options |= {"checkpoint_root": checkpoint_root, "preference": section}
    if method == "dpo":
        from trl import DPOConfig

        from finetune.training.dpo_trainer import ExactDpoTrainer

        arguments = DPOConfig(**shared, discopop_tau=section.discopop_tau, max_length=None)
        return ExactDpoTrainer(args=arguments, starts_at_reference=section.reference == "start", **options)
    plain = TrainingArguments(**shared)
    if method == "reward":
        from trl import RewardConfig

        from finetune.training.reward_trainer import ExactRewardTrainer

        arguments = RewardConfig(**shared, center_rewards_coefficient=section.center_rewards, max_length=None)
        return ExactRewardTrainer(args=arguments, **options)
    if method == "kto":
        from finetune.training.kto_trainer import ExactKtoTrainer

        return ExactKtoTrainer(args=plain, starts_at_reference=section.reference == "start", **options)
    from finetune.training.reference_free import ExactCpoTrainer, ExactOrpoTrainer

    if method == "orpo":
        return ExactOrpoTrainer(args=plain, **options)
    return ExactCpoTrainer(args=plain, method=method, **options)


def _collator(method: Method, model: Any, share: bool) -> BranchCollator:
    """A reward model scores an answer as a whole, so that its last token has to be in the row."""
    if method != "reward":
        return BranchCollator(share)
    return BranchCollator(share, whole_answers=True, pad_id=model.config.get_text_config().pad_token_id)
