"""One comparison cut into slices: where did the tuned model gain, and where did it lose?

Many slices are many looks, so p-values are corrected as the suite declared before the run. The worst slices come first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from finetune.errors import UserError, did_you_mean
from finetune.evaluation.items import Item
from finetune.evaluation.records import Record
from finetune.evaluation.scoring import both_scored, clusters_of, scores_of
from finetune.evaluation.suite import Suite
from finetune.stats import compare
from finetune.stats.multiplicity import adjust

SOURCE, LENGTH = "source", "length"
_LENGTH_CLASSES = ("short", "medium", "long")


def check_slices(suite: Suite, items: Sequence[Item]) -> None:
    """Refuse, before any answer, a tag to slice by that items lack."""
    for key in suite.slices.by:
        lacking = [item for item in items if key not in (SOURCE, LENGTH) and key not in item.tags]
        if lacking:
            tags = sorted({tag for item in items for tag in item.tags})
            raise UserError(
                f"{len(lacking)} of {len(items)} items have no tag '{key}', e.g. '{lacking[0].id}'",
                where=f"suite {suite.name}: slices.by",
                fix=did_you_mean(key, [SOURCE, LENGTH, *tags]),
            )


def slice_comparisons(
    suite: Suite, left: Sequence[Record], right: Sequence[Record], *, every: Sequence[Record] | None = None
) -> list[dict[str, Any]]:
    """The primary metric in every slice that the suite declares, the largest loss first.

    left, right: both arms in one order. every: records whose slices have to appear although no pair of them may be left
    (`right` by default); such a slice is null with n = 0, and the others are kept. `p_adjusted` is corrected over all
    slices of all keys together; a slice counts as different only when it stays at or below 1 - confidence.
    """
    if suite.scorer_of(suite.primary_metric).asks_a_model:
        left, right = both_scored(left, right, suite.primary_metric)
    found: list[dict[str, Any]] = []
    for key in suite.slices.by:
        bucket_of = _bucketing(key, right if every is None else every)
        members: dict[str, list[int]] = {
            bucket_of(record): [] for record in (right if every is None else every)
        }
        for place, record in enumerate(right):
            members[bucket_of(record)].append(place)
        members = _pooled(members, suite.slices.min_items)
        for value, places in members.items():
            pair = [left[place] for place in places], [right[place] for place in places]
            found.append({"by": key, "value": value, "n": len(places), **_compare_slice(suite, *pair)})
    filled = [one for one in found if one["p_value"] is not None]
    adjusted = adjust([one["p_value"] for one in filled], suite.slices.correction)
    for one, p_value in zip(filled, adjusted, strict=True):
        one |= {"p_adjusted": p_value, "different": p_value <= 1.0 - suite.confidence}
    sign = _sign(suite)
    return sorted(
        found,
        key=lambda one: (not one["n"], sign * (one["difference"] or 0.0), -one["n"], one["by"], one["value"]),
    )


def _pooled(members: dict[str, list[int]], min_items: int) -> dict[str, list[int]]:
    """Small slices joined into one; those without any pair stay, so that nobody overlooks them."""
    small = [value for value, places in members.items() if 0 < len(places) < min_items]
    if len(small) < 2:
        return members
    kept = {value: places for value, places in members.items() if value not in small}
    return {**kept, f"{len(small)} rare ones": sorted(place for value in small for place in members[value])}


def _sign(suite: Suite) -> float:
    return 1.0 if suite.scorer_of(suite.primary_metric).higher_is_better else -1.0


def _compare_slice(suite: Suite, before: Sequence[Record], after: Sequence[Record]) -> dict[str, Any]:
    names = (
        "mean_a", "mean_b", "difference", "low", "high", "p_value", "fixed", "broken", "p_adjusted", "different"
    )  # fmt: skip
    empty: dict[str, Any] = {**dict.fromkeys(names), "correction": suite.slices.correction}
    if not before:
        return empty
    sign, metric, clusters = _sign(suite), suite.primary_metric, clusters_of(before)
    first = [sign * score for score in scores_of(before, metric)]
    second = [sign * score for score in scores_of(after, metric)]
    if len(set(clusters)) < 2 and not all(0.0 <= score <= 1.0 for score in (*first, *second)):
        return (
            empty  # one unit of an unlimited score has no margin of error, and no number stands without one
        )
    result = compare(first, second, clusters=clusters, confidence=suite.confidence)
    low, high = sorted((sign * result.low, sign * result.high))
    return empty | {
        "mean_a": sign * result.mean_a,
        "mean_b": sign * result.mean_b,
        "difference": sign * result.difference,
        "low": low,
        "high": high,
        "p_value": result.p_value,
        "fixed": result.fixed,
        "broken": result.broken,
        "open_ended": suite.scorer_of(metric).open_ended,
    }


def _bucketing(key: str, records: Sequence[Record]) -> Callable[[Record], str]:
    if key == SOURCE:
        return lambda record: str(record.get("source", ""))
    if key == LENGTH:
        return _length_classes(records)

    def by_tag(record: Record) -> str:
        value = record["tags"].get(key)
        if value is None:
            raise UserError(
                f"item '{record['item']}' has no tag '{key}'",
                where="slices.by",
                fix="name `source`, `length` or a tag of every item",
            )
        return str(value)

    return by_tag


def _length_classes(records: Sequence[Record]) -> Callable[[Record], str]:
    """Thirds of the items by the length of what is asked, in tokens of the tuned arm's prompt."""
    lengths = sorted(record["prompt_tokens"] for record in records)
    cuts = [lengths[len(lengths) * third // 3] for third in (1, 2)] if lengths else [0, 0]
    return lambda record: _LENGTH_CLASSES[sum(record["prompt_tokens"] >= cut for cut in cuts)]
