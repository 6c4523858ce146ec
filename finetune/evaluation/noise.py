"""The noise floor of an evaluation: the same model answers twice, and every change is noise (an A/A run).

Greedy decoding has no random draw, but rounding depends on which rows share a batch; in bf16 that can flip near ties.
A claimed gain below the share of answers that change by themselves is no gain.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from finetune.evaluation.pairing import pair_records
from finetune.evaluation.records import Record
from finetune.evaluation.scoring import scores_of
from finetune.stats.means import wilson_interval


def flip_rate(first: Sequence[Record], second: Sequence[Record], metric: str) -> dict[str, Any]:
    """How many answers, and how many scores of `metric`, changed between two runs of one arm.

    `low` and `high` bound the share of changed scores (Wilson, 95 %).
    """
    left, right = pair_records(first, second)
    changed = sum(one["output"] != other["output"] for one, other in zip(left, right, strict=True))
    pairs = zip(scores_of(left, metric), scores_of(right, metric), strict=True)
    flipped = sum(before != after for before, after in pairs)
    n = len(left)
    low, high = wilson_interval(flipped, n) if n else (None, None)
    return {
        "n": n,
        "metric": metric,
        "answers_changed": changed,
        "scores_flipped": flipped,
        "flip_rate": flipped / n if n else None,
        "low": low,
        "high": high,
    }
