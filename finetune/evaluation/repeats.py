"""Several answers to one item: one record an answer on disk, and here the ways to one record an item.

Everything that counts items (pairs, intervals, slices) works on `per_item`; what shows an answer to a person or
a judge works on `first_answers`. With one answer an item, both give the records themselves.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from finetune.evaluation.records import Record, repeat_of
from finetune.stats.repeats import DifferenceNoise, difference_noise

_AVERAGED = ("prompt_tokens", "output_tokens", "latency_seconds")


def answers_by_item(records: Sequence[Record]) -> dict[str, list[Record]]:
    """Item -> its records by repeat, items in the order of their first record."""
    found: dict[str, list[Record]] = {}
    for record in records:
        found.setdefault(record["item"], []).append(record)
    return {item: sorted(group, key=repeat_of) if group[1:] else group for item, group in found.items()}


def per_item(records: Sequence[Record]) -> list[Record]:
    """One record an item: scores, tokens and latency are means over its answers, all else is that of the first.

    A score that one of the answers lacks is None. An item is well-formed for a metric when all of its answers are.
    """
    return [group[0] if len(group) == 1 else _averaged(group) for group in answers_by_item(records).values()]


def first_answers(records: Sequence[Record]) -> list[Record]:
    """One record an item: its first answer with that answer's own scores."""
    return [group[0] for group in answers_by_item(records).values()]


def _averaged(group: Sequence[Record]) -> Record:
    metrics = {metric: None for record in group for metric in record["scores"]}
    means = {name: mean([record[name] for record in group]) for name in _AVERAGED if name in group[0]}
    forms = {
        metric: all(record.get("well_formed", {}).get(metric, False) for record in group)
        for metric in group[0].get("well_formed", {})
    }
    return {
        **group[0],
        **means,
        **({"well_formed": forms} if forms else {}),
        "scores": {metric: mean([record["scores"].get(metric) for record in group]) for metric in metrics},
        "repeats": len(group),
    }


def mean(values: Sequence[float | None]) -> float | None:
    """The mean; None when any value is missing, for a mean over the rest would be of fewer answers than it says."""
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if len(known) == len(values) else None


def samples_of(records: Sequence[Record], metric: str) -> list[list[float]]:
    """The scores of every item's answers, by item and repeat."""
    return [
        [float(record["scores"][metric]) for record in group] for group in answers_by_item(records).values()
    ]


def noise_of_difference(
    baseline: Sequence[Record], arm: Sequence[Record], items: Sequence[str], metric: str
) -> DifferenceNoise | None:
    """How much of the noise of the arms' difference is sampling; None unless both gave the same repeats of each item.

    Items with an answer that has no score are left out, as they are from the difference.
    """
    before, after = answers_by_item(baseline), answers_by_item(arm)
    pairs = [(before[item], after[item]) for item in items]
    pairs = [
        pair for pair in pairs if all(one["scores"].get(metric) is not None for one in (*pair[0], *pair[1]))
    ]
    if any([repeat_of(one) for one in left] != [repeat_of(one) for one in right] for left, right in pairs):
        return None
    differences: list[list[float]] = [
        [float(two["scores"][metric]) - float(one["scores"][metric]) for one, two in zip(*pair, strict=True)]
        for pair in pairs
    ]
    clusters: list[Any] = [left[0]["cluster"] for left, _ in pairs]
    return difference_noise(differences, clusters)


def noise_line(noise: Mapping[str, Any]) -> str:
    """'5 answers an item: 23 % of the squared error is sampling, 77 % the choice of items; …' for people."""
    share = noise["sampling_share"]
    return (
        f"{noise['repeats']:.3g} answers an item: sampling makes {share:.0%} of the squared error, the choice of items "
        f"{1 - share:.0%}; more repeats could narrow the interval by {noise['narrower_at_most']:.0%} at most"
    )
