"""A global batch that grows: the examples of every optimizer step, planned before the first one.

Each step is one item of the data loader, a list of micro-batches, so that the trainer's own counting of steps, and its
skipping of steps that a checkpoint has behind it, stay right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader

from finetune.recipe.train_section import TrainSection


@dataclass(frozen=True, slots=True)
class Windows:
    """`examples` of every optimizer step, and the passes over the rows done after it."""

    examples: list[list[int]]
    epochs: list[float]

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.examples)

    def __len__(self) -> int:
        return len(self.examples)


def plan_windows(n_tokens: Sequence[int], settings: TrainSection, seed: int) -> Windows:
    """Windows over examples of `n_tokens` each, in a seeded order that differs from epoch to epoch.

    A window ends with its epoch, as without a ramp. Every example comes once an epoch; of a last, broken epoch the share
    that `epochs` says.
    """
    windows = Windows([], [])
    n_examples, trained_tokens, epoch = len(n_tokens), 0, 0
    left = max(round(settings.epochs * n_examples), 1)
    while left > 0:
        generator = torch.Generator().manual_seed(seed + epoch)
        order = torch.randperm(n_examples, generator=generator).tolist()[:left]
        start = 0
        while start < len(order):
            if settings.max_steps is not None and len(windows) >= settings.max_steps:
                return windows
            size = micro_batches(settings, len(windows), trained_tokens) * settings.micro_batch_size
            window = order[start : start + size]
            start += len(window)
            trained_tokens += sum(n_tokens[index] for index in window)
            windows.examples.append(window)
            windows.epochs.append(epoch + start / n_examples)
        left -= len(order)
        epoch += 1
    return windows


def micro_batches(settings: TrainSection, step: int, trained_tokens: int) -> int:
    """Micro-batches in step `step` (from 0), after `trained_tokens` tokens: from the start to the whole batch, evenly."""
    whole, ramp = settings.gradient_accumulation_steps, settings.batch_ramp
    if ramp is None:
        return whole
    progress = step / ramp.steps if ramp.steps else trained_tokens / (ramp.tokens or 1)
    return ramp.start_accumulation + int((whole - ramp.start_accumulation) * min(progress, 1.0))


def window_loader(
    dataset: Any, windows: Windows, micro_batch_size: int, collate: Callable[[list[Any]], Any]
) -> DataLoader[Any]:
    """One item an optimizer step: the list of its micro-batches."""

    def micro(examples: list[Any]) -> list[Any]:
        return [
            collate(examples[start : start + micro_batch_size])
            for start in range(0, len(examples), micro_batch_size)
        ]

    sampler: Any = windows
    return DataLoader(dataset, batch_sampler=sampler, collate_fn=micro)
