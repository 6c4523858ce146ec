"""The noise floor of an evaluation: the same model answers twice, and every change is noise (an A/A run).

Greedy decoding has no random draw, but rounding depends on which rows share a batch; in bf16 that can flip near ties.
Sampled answers are drawn with another seed the second time, so that their noise is in the floor as well.
A claimed gain below the share of answers that change by themselves is no gain.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from finetune.evaluation.pairing import pair_records
from finetune.evaluation.records import Record
from finetune.evaluation.repeats import answers_by_item
from finetune.evaluation.scoring import both_scored, scores_of
from finetune.evaluation.suite import Suite
from finetune.stats.means import wilson_interval


def with_other_seed(suite: Suite) -> Suite:
    """The suite for the second of two runs: sampled with another seed, the same one where nothing is sampled."""
    if not suite.decoding.is_sampled:
        return suite
    decoding = suite.decoding.model_copy(update={"seed": (suite.decoding.seed + 1) % 2**32})
    return suite.model_copy(update={"decoding": decoding})


def flip_rate(
    first: Sequence[Record], second: Sequence[Record], metric: str, *, may_lack: bool = False
) -> dict[str, Any]:
    """On how many items an answer, and on how many the score of `metric`, changed between two runs of one arm.

    `low` and `high` bound the share of changed scores (Wilson, 95 %). may_lack: a judge's metric, whose share is taken
    over the items that were scored both times.
    """
    left, right = pair_records(first, second)
    said = [
        {item: [record["output"] for record in group] for item, group in answers_by_item(records).items()}
        for records in (first, second)
    ]
    changed = sum(said[0][record["item"]] != said[1][record["item"]] for record in left)
    scored = both_scored(left, right, metric) if may_lack else (left, right)
    pairs = zip(*(scores_of(records, metric) for records in scored), strict=True)
    flipped = sum(before != after for before, after in pairs)
    n = len(scored[0])
    low, high = wilson_interval(flipped, n) if n else (None, None)
    return {
        "n": len(left),
        "metric": metric,
        "answers_changed": changed,
        "scores_flipped": flipped,
        "flip_rate": flipped / n if n else None,
        "low": low,
        "high": high,
    }
