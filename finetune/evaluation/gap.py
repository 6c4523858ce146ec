"""Three arms of one suite: how far the student has come from what it was towards its teacher."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from finetune.evaluation.pairing import pair_records
from finetune.evaluation.records import Record
from finetune.evaluation.scoring import clusters_of, scores_of
from finetune.evaluation.suite import Suite
from finetune.stats.gap import gap_share


def gaps_closed(
    suite: Suite, before: Sequence[Record], after: Sequence[Record], teacher: Sequence[Record]
) -> dict[str, dict[str, Any]]:
    """Metric -> `GapShare` as a dict, over the items that all three arms answer; metrics that a judge gives are left out.

    Means of metrics of which lower is better are turned round, so that a share above 0 is always an approach.
    """
    found = {}
    for metric in suite.metrics:
        kind = suite.scorer_of(metric)
        if kind.asks_a_model:
            continue
        first, middle = pair_records(before, after, inner=True)
        middle, last = pair_records(middle, teacher, inner=True)
        shared = {record["item"] for record in middle}
        first = [record for record in first if record["item"] in shared]
        if not first:
            continue
        sign = 1.0 if kind.higher_is_better else -1.0
        arms = [[sign * score for score in scores_of(records, metric)] for records in (first, middle, last)]
        found[metric] = gap_share(*arms, clusters=clusters_of(first), confidence=suite.confidence).to_dict()
    return found
