"""Weights of a row's answers: which turn of a conversation counts how much, by the row and by the recipe."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from finetune.data.tokenise import TokenisedRow
from finetune.training.head import IGNORED


def row_weights(row: TokenisedRow, turn_weights: Sequence[float] = ()) -> list[float]:
    """A weight for every token of a row, 0 where it is no target: that of `turn_weights` times the row's own.

    The last weight is the last answer's, the one before it that of the answer before; earlier answers take the first.
    """
    weights = [0.0] * len(row.labels)
    for back, (first, last) in enumerate(reversed(row.spans()), start=1):
        weight = float(turn_weights[max(len(turn_weights) - back, 0)]) if turn_weights else 1.0
        weights[first:last] = [weight] * (last - first)
    if row.weights is None:
        return weights
    return [weight * own for weight, own in zip(weights, row.weights, strict=True)]


class WeightedCollator:
    """A collator of TRL whose batches also hold `rows`, the places of their rows in order, and `target_weights` [B, T], when
    their examples have weights."""

    def __init__(self, collate: Callable[[list[dict[str, Any]]], dict[str, Any]]) -> None:
        self._collate = collate

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        batch = self._collate(examples)
        if "rows" in examples[0]:
            batch["rows"] = [row for example in examples for row in example["rows"]]
        if "weights" not in examples[0]:
            return batch
        given = [torch.tensor(example["weights"], dtype=torch.float32) for example in examples]
        labels = batch["labels"]
        if labels.shape[0] == 1 and len(given) > 1:  # laid end to end
            batch["target_weights"] = torch.cat(given)[None]
        else:
            weights = torch.zeros(labels.shape, dtype=torch.float32)
            for row, values in enumerate(given):
                weights[row, : len(values)] = values
            batch["target_weights"] = weights
        return batch


def target_weights(inputs: dict[str, Any]) -> Tensor | None:
    """The weights [M] of a batch's targets, in their order; None when all weigh 1."""
    if "target_weights" not in inputs:
        return None
    is_target = inputs["labels"][:, 1:] != IGNORED
    weights: Tensor = inputs["target_weights"][:, 1:][is_target]
    return weights
