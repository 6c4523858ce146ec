"""Validation of methods that compare answers: every example once, its loss by itself, whatever the batch or the processes."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import nn

from finetune.training.answers import Answers, Losses
from finetune.training.best_step import RowLosses
from finetune.training.validation import own_batches


def validate_answers(trainer: Any, model: nn.Module) -> tuple[RowLosses, dict[str, float]]:
    """The loss of every validation example, in the packs' order, and the means of everything else that was measured.

    An example's loss is its own part of the mean: its pair loss, and with `nll_weight` its chosen answer's nll, weighted so
    that the mean over examples is the token-weighted mean. `model` is in eval mode, gradients are off.
    """
    packs = trainer.eval_dataset
    sizes = [len(packs[index].examples) for index in range(len(packs))]
    first = [0, *torch.tensor(sizes).cumsum(0).tolist()]
    # own loss, nll of the chosen answer, its targets; each example is filled by one process
    table = torch.zeros(3, first[-1], dtype=torch.float64)
    measures: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    n_targets = 0
    accelerator = trainer.accelerator
    batches = own_batches(
        len(packs),
        trainer.args.per_device_eval_batch_size,
        accelerator.process_index,
        accelerator.num_processes,
    )
    scored = []
    for indices in batches:
        chosen = [packs[index] for index in indices or [0]]
        batch = trainer._prepare_inputs(trainer.data_collator(chosen))
        with trainer.compute_loss_context_manager(), accelerator.autocast():
            answers = trainer.score(model, batch)
        scored.append((indices, answers, batch))
    own = [(answers, batch) for indices, answers, batch in scored if indices]
    with trainer.validation_of(own), trainer.compute_loss_context_manager(), accelerator.autocast():
        for indices, answers, batch in scored:
            whole, each = trainer.losses(answers, batch), trainer.losses_of_examples(answers, batch)
            for name, sums in whole.measures.items():  # the same names on every process, or sums do not meet
                for place, value in enumerate(sums):
                    measures[name][place] += value if indices else 0.0
            if not indices:
                continue  # only to keep step with the other processes
            places = [place for index in indices for place in range(first[index], first[index + 1])]
            table[:, places] = torch.tensor(each, dtype=torch.float64).T
            n_targets += trainer.n_targets(batch)
    return _together(trainer, table, measures, n_targets)


def _together(
    trainer: Any, table: torch.Tensor, measures: dict[str, list[float]], n_targets: int
) -> tuple[RowLosses, dict[str, float]]:
    counted = [float(n_targets), *(value for pair in measures.values() for value in pair)]
    packed = torch.cat([table.flatten(), torch.tensor(counted, dtype=torch.float64)]).to(trainer.args.device)
    summed = trainer.accelerator.reduce(packed, reduction="sum").cpu()
    own, nll, targets = summed[: table.numel()].view(3, -1)
    rest = summed[table.numel() :].tolist()
    losses = own
    if trainer.nll_weight:
        losses = losses + trainer.nll_weight * nll * (len(nll) / targets.sum().clamp(min=1.0))
    pairs = zip(measures, rest[1::2], rest[2::2], strict=True)
    means = {name: value / number for name, value, number in pairs if number}
    found = {"loss": float(losses.mean()), "target_tokens": rest[0], "examples": float(len(losses)), **means}
    return RowLosses(losses.tolist(), [1] * len(losses)), found


def losses_one_by_one(
    trainer: Any, answers: Answers, batch: dict[str, Any]
) -> list[tuple[float, float, int]]:
    """(own loss, nll of the chosen answer, its targets) of every example, each as a micro-batch of its own."""
    n_examples = trainer.n_examples(batch)
    stride = len(answers.lengths) // n_examples
    found = []
    for index in range(n_examples):
        part = slice(index * stride, (index + 1) * stride)
        one = {"reference": batch["reference"][part]} if "reference" in batch else {}
        losses: Losses = trainer.losses(Answers(answers.by_target[part], answers.lengths[part]), one)
        nll = float(losses.nll_sum) if losses.nll_sum is not None else 0.0
        found.append((float(losses.example_sum), nll, losses.nll_targets))
    return found
