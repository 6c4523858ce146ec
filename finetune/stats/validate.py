"""Scores on their way in: finite, at least one, and of matching length, or a UserError that says which and how many."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from finetune.errors import UserError
from finetune.stats.distributions import FloatArray

_LARGEST_SCORE = 1e100  # squares of larger ones leave the range of a double, and every interval with them


def checked_scores(values: Any, *, name: str = "scores") -> FloatArray:
    """Shape [n] of finite floats; [n, samples] is averaged per item. Raises UserError for none, NaN or infinity."""
    if not hasattr(values, "__len__"):
        values = list(values)
    try:
        scores = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"{name} are not numbers",
            why=str(error),
            fix="give one number an item, or the same number of samples of each",
        ) from None
    if scores.size == 0:
        raise UserError(
            f"{name} are empty", why="no items, no verdict", fix="check the file and the filters before it"
        )
    if scores.ndim == 2:
        scores = scores.mean(axis=1)
    if scores.ndim != 1:
        raise UserError(f"{name} must have shape [items] or [items, samples], not {list(scores.shape)}")
    bad = np.flatnonzero(~np.isfinite(scores))
    if bad.size:
        raise UserError(
            f"{bad.size} of {scores.size} {name} are not finite numbers",
            where=f"item number {int(bad[0]) + 1}",
            fix="score these items again, or remove them from both arms",
        )
    largest = float(np.abs(scores).max())
    if largest > _LARGEST_SCORE:
        raise UserError(
            f"{name} reach {largest:.3g}, too large to compute an interval with",
            fix="check the scorer, or give the scores in a larger unit",
        )
    return scores


def checked_clusters(clusters: Sequence[Hashable] | None, n: int) -> Sequence[Hashable] | None:
    """The labels, or None when there are none or when every item is a cluster of its own."""
    if clusters is None:
        return None
    if len(clusters) != n:
        raise UserError(f"{len(clusters)} cluster labels for {n} items", fix="give one label an item")
    if any(label is None for label in clusters):
        raise UserError("an item has no cluster label", fix="label every item or leave the clusters out")
    return None if len(set(clusters)) == n else clusters


def checked_confidence(confidence: float) -> float:
    if not 0.5 <= confidence < 1.0:
        raise UserError(f"confidence {confidence} is not in [0.5, 1)", fix="write 95 % as 0.95")
    return confidence


def checked_margin(margin: float | None, *, bounded: bool) -> float | None:
    """The greatest acceptable loss, at least 0, or None for no margin; at most 1 for `bounded` scores, which lie in [0, 1]."""
    if margin is not None and not 0.0 <= margin < float("inf"):
        raise UserError(
            f"margin {margin} must be a number that is not negative",
            fix="give the acceptable loss as 0.02 for two points",
        )
    if bounded and margin is not None and margin > 1.0:
        raise UserError(
            f"margin {margin:g} allows any loss: all scores lie between 0 and 1",
            fix=f"for {margin:g} points write {margin / 100:g}",
        )
    return margin


def checked_seed(seed: int) -> int:
    if seed < 0:
        raise UserError(f"seed {seed} must not be negative", fix="give 0 or any other whole number above it")
    return seed


def is_binary(scores: FloatArray) -> bool:
    """Every score is exactly 0 or 1."""
    return bool(np.all((scores == 0.0) | (scores == 1.0)))


def is_bounded(scores: FloatArray) -> bool:
    """Every score lies within [0, 1], as accuracies, F1 and other shares do."""
    return bool(scores.min() >= 0.0 and scores.max() <= 1.0)
