"""The optimizer steps of one process, shared out over several: the same rows in the same order, each once.

A step is `micro_batch_size` × `gradient_accumulation_steps` examples whatever the number of processes W, so that the loss
curve, the number of steps and where a resumed run goes on do not depend on it. Of the examples of a step, process r
takes number r, r + W, r + 2W, …; accelerate's loader would repeat examples so that every process has as many.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import fields
from typing import Any

from accelerate.data_loader import SeedableRandomSampler
from torch.utils.data import DataLoader, Dataset

from finetune.errors import UserError
from finetune.recipe.train_section import TrainSection
from finetune.telemetry.callback import StepTally

IDLE = "idle"  # key of a batch that is computed only because the other processes wait for it


def micro_batches_of_process(settings: TrainSection, n_processes: int) -> int:
    """Micro-batches of one process in a whole step. Raises UserError where some processes would have none."""
    step = settings.micro_batch_size * settings.gradient_accumulation_steps
    if step < n_processes:
        word = "pack" if settings.packing else "row"
        raise UserError(
            f"{n_processes} processes share a step of {step} {word}{'s' if step > 1 else ''}, so that some have nothing to do",
            where="train.gradient_accumulation_steps",
            fix=f"set it to {math.ceil(n_processes / settings.micro_batch_size)} or more, or start fewer processes",
        )
    return math.ceil(math.ceil(step / n_processes) / settings.micro_batch_size)


class SharedSteps:
    """Batch sampler of one process. An example that another process computes as well comes as its place inverted (~place).

    Every process has as many batches, or those that exchange gradients would wait forever for one that has ended.
    """

    def __init__(self, n_examples: int, settings: TrainSection, seed: int, rank: int, n_ranks: int) -> None:
        self._order = SeedableRandomSampler(range(n_examples), data_seed=seed)
        self._step = settings.micro_batch_size * settings.gradient_accumulation_steps
        self._micro = settings.micro_batch_size
        self._rank, self._n_ranks, self._n_examples = rank, n_ranks, n_examples

    def set_epoch(self, epoch: int) -> None:
        """The order of the examples differs from epoch to epoch, as with one process."""
        self._order.set_epoch(epoch)

    def _n_batches(self, n_examples: int) -> int:
        return math.ceil(math.ceil(n_examples / self._n_ranks) / self._micro)

    def __len__(self) -> int:
        whole, rest = divmod(self._n_examples, self._step)
        return whole * self._n_batches(self._step) + self._n_batches(rest)

    def __iter__(self) -> Iterator[list[int]]:
        order = list(self._order)
        for start in range(0, len(order), self._step):
            window = order[start : start + self._step]
            own = window[self._rank :: self._n_ranks]
            for number in range(self._n_batches(len(window))):
                batch = own[number * self._micro : (number + 1) * self._micro]
                yield batch or [~window[0]]


class _Inverted(Dataset[Any]):
    """The dataset, with examples at inverted places marked as computed elsewhere."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, place: int) -> tuple[bool, Any]:
        return place < 0, self.dataset[~place if place < 0 else place]


class SharedLoader(DataLoader[Any]):
    """The micro-batches of one process; those that are only computed along have the key `IDLE`."""

    def __init__(self, dataset: Any, steps: SharedSteps, collate: Callable[[list[Any]], Any]) -> None:
        def marked(examples: list[tuple[bool, Any]]) -> Any:
            batch = collate([example for _, example in examples])
            return {**batch, IDLE: True} if any(idle for idle, _ in examples) else batch

        sampler: Any = steps
        super().__init__(_Inverted(dataset), batch_sampler=sampler, collate_fn=marked)
        self.steps = steps

    def set_epoch(self, epoch: int) -> None:
        """Called by the trainer when an epoch begins."""
        self.steps.set_epoch(epoch)


def copy_tally(tally: StepTally) -> StepTally:
    """What is counted so far, for `uncount`."""
    values = {one.name: getattr(tally, one.name) for one in fields(tally)}
    return StepTally(**{name: copy(value) for name, value in values.items()})


def uncount(tally: StepTally, before: StepTally) -> None:
    """Take back what was counted since `before`; names stay, with nothing in them, so that ranks add up the same names."""
    for one in fields(tally):
        value = getattr(before, one.name)
        if isinstance(value, dict):
            value = {name: value.get(name, 0.0) for name in getattr(tally, one.name)}
        setattr(tally, one.name, value)
