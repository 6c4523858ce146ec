"""Validation row by row: every row once, whatever the batch size, the packing and the number of processes.

accelerate's loader repeats rows so that every process has as many; here each process takes its own examples, and the
sums come together at the end.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from finetune.training.best_step import RowLosses
from finetune.training.head import IGNORED

_LINE = re.compile(r":\d+$")


def own_batches(n_examples: int, batch_size: int, rank: int, n_ranks: int) -> Iterator[list[int]]:
    """The examples of this process, batch by batch; as many batches on every process, the last ones perhaps empty.

    Models whose weights are spread over processes wait for one another in every forward pass.
    """
    own = list(range(rank, n_examples, n_ranks))
    for number in range(math.ceil(math.ceil(n_examples / n_ranks) / batch_size)):
        yield own[number * batch_size : (number + 1) * batch_size]


def document_of_targets(batch: dict[str, Any]) -> Tensor:
    """For each target [M] of a batch, in the order of the flattened batch, the number of its document in the batch."""
    is_target = batch["labels"][:, 1:] != IGNORED
    if "cu_seq_lens_q" in batch:
        lengths = batch["cu_seq_lens_q"].diff().long()
        documents = torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths)[None]
    else:
        n_rows, n_tokens = batch["labels"].shape
        documents = torch.arange(n_rows, device=is_target.device)[:, None].expand(n_rows, n_tokens)
    return documents[:, 1:][is_target]


def by_source(losses: RowLosses, sources: Sequence[str]) -> dict[str, dict[str, float | int]]:
    """Source -> its token-weighted loss and its targets; empty where all rows come from one source.

    `sources` [rows], in the order of `losses`: a name, or `file:line`, of which the file counts. Methods that judge whole
    examples count each as one target.
    """
    sources = [_LINE.sub("", source) for source in sources]
    if len(set(sources)) < 2:
        return {}
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for source, nll, targets in zip(sources, losses.sums, losses.targets, strict=True):
        sums[source][0] += nll
        sums[source][1] += targets
    return {
        source: {"loss": nll / targets, "target_tokens": int(targets)}
        for source, (nll, targets) in sorted(sums.items())
        if targets
    }


class RowSums:
    """Adds up the losses and targets of every row, by its place in the dataset, in fp64."""

    def __init__(self, n_rows: int, device: torch.device) -> None:
        self._sums = torch.zeros(2, n_rows, dtype=torch.float64, device=device)

    def add(self, nll: Tensor, documents: Tensor, rows: Tensor) -> None:
        """`nll` [M] and `documents` [M] of one batch; `rows` [documents] are the places of its documents."""
        places = rows.to(self._sums.device)[documents]
        self._sums[0].index_add_(0, places, nll.double())
        self._sums[1].index_add_(0, places, torch.ones_like(nll, dtype=torch.float64))

    def over_ranks(self, accelerator: Any) -> RowLosses:
        """The sums of all processes."""
        total = accelerator.reduce(self._sums, reduction="sum")
        return RowLosses(total[0].tolist(), [int(count) for count in total[1].tolist()])
