"""The optimizer steps of one process, shared out over several: the same rows in the same order, each once.

A step is `micro_batch_size` × `gradient_accumulation_steps` examples whatever the number of processes W, so that the loss
curve, the number of steps and where a resumed run goes on do not depend on it. Of the examples of a step, process r
takes number r, r + W, r + 2W, …; accelerate's loader would repeat examples so that every process has as many.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, fields
from itertools import accumulate
from typing import Any

from accelerate.data_loader import SeedableRandomSampler
from torch.utils.data import DataLoader, Dataset

from finetune.errors import UserError
from finetune.recipe.train_section import TrainSection
from finetune.telemetry.callback import StepTally
from finetune.training.branches import Pack

IDLE = "idle"  # key of a batch that is computed only because the other processes wait for it


@dataclass(frozen=True, slots=True)
class Share:
    """An example at `place`, or one of `parts` parts of it. `idle`: another process has it, this one computes along."""

    place: int
    part: int = 0
    parts: int = 1
    idle: bool = False


def micro_batches_of_process(settings: TrainSection, n_processes: int) -> int:
    """Micro-batches of one process in a whole step. Raises UserError where some processes would have none."""
    step = settings.micro_batch_size * settings.gradient_accumulation_steps
    if step < n_processes and not settings.packing:
        raise UserError(
            f"{n_processes} processes share a step of {step} row{'s' if step > 1 else ''}, so that some have nothing to do",
            where="train.gradient_accumulation_steps",
            fix=f"set it to {math.ceil(n_processes / settings.micro_batch_size)} or more, or start fewer processes",
        )
    return math.ceil(math.ceil(step / n_processes) / settings.micro_batch_size)


@dataclass(frozen=True, slots=True)
class Sharing:
    """Which process shares out steps: `rank` of `n_ranks`, its micro-batches of `micro` examples, which may be `packs`."""

    rank: int
    n_ranks: int
    micro: int
    packs: bool

    def n_batches(self, n_examples: int) -> int:
        """Micro-batches that each process has of a step of `n_examples`."""
        return math.ceil(math.ceil(n_examples / self.n_ranks) / self.micro)

    def batches(self, window: Sequence[int]) -> list[list[Share]]:
        """This process's micro-batches of a step. Every process has as many, or those that exchange gradients would wait
        forever for one that has ended. Where a step has fewer packs than there are processes, the rows of a pack are
        shared out.
        """
        if self.packs and len(window) < self.n_ranks:
            which = self.rank % len(window)
            n_parts = len(range(which, self.n_ranks, len(window)))
            return [[Share(window[which], self.rank // len(window), n_parts)]]
        own = window[self.rank :: self.n_ranks]
        starts = range(0, self.n_batches(len(window)) * self.micro, self.micro)
        parts = [[Share(place) for place in own[start : start + self.micro]] for start in starts]
        return [part or [Share(window[0], idle=True)] for part in parts]


class SharedSteps:
    """Batch sampler of one process: the micro-batches that it has of every step."""

    def __init__(self, n_examples: int, settings: TrainSection, seed: int, rank: int, n_ranks: int) -> None:
        self._order = SeedableRandomSampler(range(n_examples), data_seed=seed)
        self._step = settings.micro_batch_size * settings.gradient_accumulation_steps
        self._sharing = Sharing(rank, n_ranks, settings.micro_batch_size, settings.packing)
        self._n_examples = n_examples

    def set_epoch(self, epoch: int) -> None:
        """The order of the examples differs from epoch to epoch, as with one process."""
        self._order.set_epoch(epoch)

    def __len__(self) -> int:
        whole, rest = divmod(self._n_examples, self._step)
        return whole * self._sharing.n_batches(self._step) + self._sharing.n_batches(rest)

    def __iter__(self) -> Iterator[list[Share]]:
        order = list(self._order)
        for start in range(0, len(order), self._step):
            yield from self._sharing.batches(order[start : start + self._step])


class SharedWindows:
    """Batch sampler of one process over steps that are planned: a whole step an item, a list of micro-batches."""

    def __init__(self, windows: Sequence[Sequence[int]], sharing: Sharing) -> None:
        self._windows, self._sharing = windows, sharing

    def __len__(self) -> int:
        return len(self._windows)

    def __iter__(self) -> Iterator[list[list[Share]]]:
        for window in self._windows:
            yield self._sharing.batches(window)


def part_of(example: Any, part: int, parts: int) -> Any:
    """Some of the rows of a pack, about as many tokens as the other parts have; None when there is no row for this part."""
    if isinstance(example, Pack):
        return _part_of_pack(example, part, parts)
    lengths = example["seq_lengths"]
    chosen = _even_parts(lengths, parts)[part]
    if not chosen:
        return None
    starts = [0, *accumulate(lengths)]
    return {
        name: [values[row] for row in chosen]
        if len(values) == len(lengths)
        else [token for row in chosen for token in values[starts[row] : starts[row + 1]]]
        for name, values in example.items()
    }


def _part_of_pack(pack: Pack, part: int, parts: int) -> Pack | None:
    chosen = _even_parts([example.n_tokens for example in pack.examples], parts)[part]
    starts = [0, *accumulate(len(example.answers) for example in pack.examples)]
    known = pack.reference
    reference = None if known is None else [x for row in chosen for x in known[starts[row] : starts[row + 1]]]
    return Pack([pack.examples[row] for row in chosen], reference) if chosen else None


def _even_parts(lengths: Sequence[int], parts: int) -> list[list[int]]:
    """Places in `parts` groups: the longest first, each to the group that has the fewest tokens."""
    groups: list[list[int]] = [[] for _ in range(parts)]
    sizes = [0] * parts
    for place in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        smallest = sizes.index(min(sizes))
        groups[smallest].append(place)
        sizes[smallest] += lengths[place]
    return [sorted(group) for group in groups]


class _Shares(Dataset[Any]):
    """The dataset by shares: whether it is only computed along, and the example or a part of it; a list for a list."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, share: Share | list[Share]) -> Any:
        if isinstance(share, list):
            return [self[one] for one in share]
        example = self.dataset[share.place]
        if share.parts == 1:
            return share.idle, example
        cut = part_of(example, share.part, share.parts)
        return cut is None, example if cut is None else cut


class SharedLoader(DataLoader[Any]):
    """The micro-batches of one process; those that are only computed along have the key `IDLE`. Over `SharedWindows` an
    item is a step, a list of micro-batches."""

    def __init__(
        self, dataset: Any, steps: SharedSteps | SharedWindows, collate: Callable[[list[Any]], Any]
    ) -> None:
        def marked(examples: list[Any]) -> Any:
            if isinstance(examples[0], list):
                return [marked(part) for part in examples]
            batch = collate([example for _, example in examples])
            return {**batch, IDLE: True} if any(idle for idle, _ in examples) else batch

        sampler: Any = steps
        super().__init__(_Shares(dataset), batch_sampler=sampler, collate_fn=marked)
        self.steps = steps

    def set_epoch(self, epoch: int) -> None:
        """Called by the trainer when an epoch begins."""
        if isinstance(self.steps, SharedSteps):
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
