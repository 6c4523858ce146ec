"""A recipe's trainer used without training: to ask for one step's gradient, for losses, or for the time of a batch.

Shapes: M targets of all rows, in the rows' order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

import torch
from torch import Tensor

from finetune.data.tokenise import TokenisedRow
from finetune.model.adapters import trainables_to_fp32, without_adapters
from finetune.model.fast import restore, speed_up
from finetune.recipe.schema import Recipe
from finetune.telemetry.callback import StepTally
from finetune.training.arguments import count_steps
from finetune.training.head import IGNORED
from finetune.training.memory_saving import checkpointing_arguments, keeps_in_place_products
from finetune.training.prefixes import prefixes_can_be_shared
from finetune.training.sft_data import trainer_arguments, training_dataset
from finetune.training.sft_trainer import ExactSftTrainer


@dataclass(frozen=True, slots=True)
class StepGradient:
    """One optimizer step before clipping: its loss, and the gradient of every trainable parameter, flattened."""

    loss: float
    gradient: Tensor

    def distance(self, other: StepGradient) -> float:
        """The larger of the losses' difference and the gradients' relative distance."""
        norm = float(torch.linalg.vector_norm(other.gradient)) or 1.0
        apart = float(torch.linalg.vector_norm(self.gradient - other.gradient)) / norm
        return max(abs(self.loss - other.loss), apart)


class Bench:
    """The trainer of a recipe over a few rows, to ask for one step's gradient and for validation losses."""

    def __init__(self, recipe: Recipe, model: Any, tokenizer: Any, rows: Sequence[TokenisedRow]) -> None:
        self._folder = TemporaryDirectory()
        folder = Path(self._folder.name)
        dataset = training_dataset(rows, recipe.train)
        self.trainer = ExactSftTrainer(
            checkpoint_root=folder,
            owner="",
            settings=recipe.train,
            tally=StepTally(),
            model=model,
            args=trainer_arguments(recipe, count_steps(len(dataset), recipe.train), folder),
            train_dataset=dataset,
            eval_dataset=dataset,
            processing_class=tokenizer,
        )
        self.model = self.trainer.model
        if prefixes_can_be_shared(self.model, recipe, rows):
            self.trainer.share_prefixes()

    def close(self) -> None:
        """Give the model its own forward pass back."""
        self.trainer.restore_model()
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def step(self) -> StepGradient:
        """Loss and gradient of a step over all rows, through the trainer's own loader, count and loss."""
        trainer = self.trainer
        batches = list(trainer.get_train_dataloader())
        self.model.zero_grad()
        trainer.tally.__init__()  # type: ignore[misc]
        total = trainer._get_num_items_in_batch(batches, trainer.args.device)
        was_training = self.model.training
        self.model.eval()
        for batch in batches:
            inputs = trainer._prepare_inputs(batch)
            with trainer.compute_loss_context_manager():
                loss = trainer.compute_loss(self.model, inputs, num_items_in_batch=total)
            trainer.accelerator.backward(loss)
        self.model.train(was_training)
        gradients = [p.grad.flatten() for p in self.model.parameters() if p.grad is not None]
        found = StepGradient(trainer.tally.loss, torch.cat(gradients).clone())
        self.model.zero_grad()
        return found

    @torch.no_grad()
    def target_losses(self) -> Tensor:
        """Negative log-likelihood [M] of every target of every row, in the rows' order."""
        dataset: Any = self.trainer.train_dataset
        pieces: dict[int, Tensor] = {}
        was_training = self.model.training
        self.model.eval()
        for example in dataset:
            batch = self.trainer._prepare_inputs(self.trainer.data_collator([example]))
            with self.trainer.compute_loss_context_manager():
                nll = self.trainer._losses(self.model, batch).nll
            lengths = example.get("seq_lengths") or [len(example["input_ids"])]
            start = 0
            for row, length in zip(example["rows"], lengths, strict=True):
                labels = example["labels"][start : start + length]
                n_targets = sum(label != IGNORED for label in labels[1:])
                pieces[row], nll = nll[:n_targets], nll[n_targets:]
                start += length
        self.model.train(was_training)
        return torch.cat([pieces[row] for row in sorted(pieces)])


class BatchProbe(Bench):
    """Runs batches as a recipe would cut them, the longest first, and leaves weights and random numbers as they were."""

    def __init__(self, recipe: Recipe, model: Any, tokenizer: Any, rows: Sequence[TokenisedRow]) -> None:
        super().__init__(recipe, model, tokenizer, rows)
        trainables_to_fp32(model)  # TRL casts the adapters of a quantized model to bf16
        self._rows = rows
        self._batches: dict[tuple[int, int], list[list[Any]]] = {}

    def run(self, recipe: Recipe, number: int) -> int:
        """Forward and backward over the `number`-th longest batch of `recipe`; returns its tokens."""
        batches = self._longest_first(recipe)
        examples = batches[number % len(batches)]
        self._recompute_as(recipe)
        trainer, devices = self.trainer, [torch.cuda.current_device()] if torch.cuda.is_available() else []
        self.model.train()
        inputs = trainer._prepare_inputs(trainer.data_collator(examples))
        with torch.random.fork_rng(devices=devices), trainer.mapped_activations(inputs):
            with trainer.compute_loss_context_manager(), trainer.accelerator.autocast():
                loss = trainer.compute_loss(self.model, inputs)
            trainer.accelerator.backward(loss)
        self.model.zero_grad()
        return sum(len(example["input_ids"]) for example in examples)

    def _longest_first(self, recipe: Recipe) -> list[list[Any]]:
        train = recipe.train
        key = (train.micro_batch_size, train.pack_tokens)
        if key not in self._batches:
            examples = sorted(training_dataset(self._rows, train), key=self._computed_tokens, reverse=True)
            size = train.micro_batch_size
            self._batches[key] = [examples[at : at + size] for at in range(0, len(examples), size)]
        return self._batches[key]

    def _computed_tokens(self, example: Any) -> int:
        """Tokens of a pack that go through the model: one whose rows begin alike is short."""
        return int(self.trainer.data_collator([example])["input_ids"].numel())

    def _recompute_as(self, recipe: Recipe) -> None:
        """Checkpointing and LoRA's in-place products as the recipe has them."""
        base = without_adapters(self.model)
        arguments = checkpointing_arguments(recipe.train)
        if arguments["gradient_checkpointing"]:
            base.gradient_checkpointing_enable(arguments["gradient_checkpointing_kwargs"])
        else:
            base.gradient_checkpointing_disable()
        if keeps_in_place_products(recipe.train):
            speed_up(self.model)
        else:
            restore(self.model)

    def close(self) -> None:
        base = without_adapters(self.model)
        base.gradient_checkpointing_disable()
        restore(self.model)
        super().close()
