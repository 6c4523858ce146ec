"""Stopping when enough is seen: items in a random order, a look after every block, a verdict that looking does not spoil.

The order is a property of the items' clusters and the suite's seed alone, so both arms, and runs of other days, answer the
same clusters first. The verdict comes from `finetune.stats.sequential`: its e-value and its interval hold at every
look, whatever made one stop.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from finetune.errors import UserError
from finetune.evaluation.answer_keys import Ask
from finetune.evaluation.items import Item
from finetune.evaluation.pairing import examples
from finetune.evaluation.records import Record
from finetune.evaluation.scoring import clusters_of, score_records, scores_of
from finetune.evaluation.suite import StopEarlySection, Suite
from finetune.stats.compare import EXIT_CODES, Verdict, decide
from finetune.stats.noninferiority import Outcome, noninferiority
from finetune.stats.sequential import SequentialComparison, sequential_compare


def place_of(section: StopEarlySection, cluster: str) -> str:
    """Where a cluster stands in the random order: clusters are answered by rising places."""
    return hashlib.sha256(f"{section.seed}/{cluster}".encode()).hexdigest()


def blocks_of(section: StopEarlySection, items: Sequence[Item], asks: Sequence[Ask]) -> list[list[Ask]]:
    """All asks in the order of their clusters, cut into blocks of whole clusters with `block_items` items or more."""
    clusters: dict[str, list[Ask]] = {}
    for ask in asks:
        clusters.setdefault(items[ask.place].cluster, []).append(ask)
    blocks: list[list[Ask]] = [[]]
    for cluster in sorted(clusters, key=lambda name: place_of(section, name)):
        if len(blocks[-1]) >= section.block_items:
            blocks.append([])
        blocks[-1] += clusters[cluster]
    return blocks


def seen_records(
    suite: Suite, baseline: Sequence[Record], arm: Sequence[Record]
) -> tuple[Sequence[Record], Sequence[Record]]:
    """Both arms up to where the one that stopped first stopped; as they are in a suite that does not stop early."""
    section = suite.stop_early
    if section is None or not baseline or not arm:
        return baseline, arm
    places = {record["cluster"]: place_of(section, record["cluster"]) for record in (*baseline, *arm)}
    end = min(max(places[record["cluster"]] for record in side) for side in (baseline, arm))
    first, second = (
        [record for record in side if places[record["cluster"]] <= end] for side in (baseline, arm)
    )
    return first, second


def largest_cluster(records: Sequence[Record]) -> int:
    """Items of the largest cluster among the answers to a whole suite."""
    return max(Counter(record["cluster"] for record in records).values(), default=1)


@dataclass(frozen=True)
class Look:
    """What the pairs seen so far say. `ends`: no further item is needed."""

    comparison: SequentialComparison
    verdict: Verdict
    noninferiority: Outcome
    ends: bool


def look_at(suite: Suite, left: Sequence[Record], right: Sequence[Record], largest: int) -> Look:
    """Judge the pairs seen. A task ends with a difference; a guarding suite also when a loss beyond its margin is excluded.

    left, right: both arms in one order. largest: items of the suite's largest cluster, seen or not.
    Raises UserError when a score of the primary metric is neither right nor wrong.
    """
    metric = suite.primary_metric
    before, after = scores_of(left, metric), scores_of(right, metric)
    graded = next((score for score in (*before, *after) if score not in (0.0, 1.0)), None)
    if graded is not None:
        raise UserError(
            f"suite {suite.name} is to stop early, but '{metric}' gave {graded:g}",
            where=str(suite.path),
            why="the bets are on items that are right (1) or wrong (0)",
            fix="choose a primary metric that is right or wrong, or leave stop_early out",
        )
    if not suite.scorer_of(metric).higher_is_better:
        before, after = after, before
    found = sequential_compare(
        before, after, clusters=clusters_of(left), largest_cluster=largest, confidence=suite.confidence
    )
    verdict = decide(found.low, found.high, found.is_decided, suite.margin)
    guard = noninferiority(found.low, found.high, suite.margin)
    ends = verdict in ("improved", "regressed") or (suite.role != "task" and guard == "pass")
    return Look(found, verdict, guard, ends)


class EarlyStop:
    """Decides, while an arm is answered block by block, whether the baseline's answers call for more."""

    def __init__(self, suite: Suite, baseline: Sequence[Record], items: Sequence[Item]) -> None:
        """Refuses, before any answer, a baseline that lacks items, and scores that are not right or wrong."""
        metric = suite.primary_metric
        if metric in suite.judges():
            raise UserError(
                f"suite {suite.name} is to stop early, but a judge may leave '{metric}' out",
                where=str(suite.path),
                fix="choose a primary metric that code decides, or leave stop_early out",
            )
        decisive = [one for one in suite.scoring if one.name == metric]
        self._suite = suite.model_copy(update={"scorers": decisive})
        self._baseline = {one["item"]: one for one in score_records(self._suite, baseline)}
        self._largest = largest_cluster(baseline)
        self._seen: list[Record] = []
        missing = [item.id for item in items if item.id not in self._baseline]
        if missing:
            raise UserError(
                f"the baseline lacks {len(missing)} items of suite {suite.name}{examples(missing)}",
                why="an arm that may stop early is held beside it item by item",
                fix="evaluate the baseline again",
            )
        every = list(self._baseline.values())
        look_at(self._suite, every, every, self._largest)

    def enough(self, block: Sequence[Record]) -> bool:
        """Whether the answers of all blocks so far, this one the last, end the comparison."""
        self._seen += score_records(self._suite, block)
        before = [self._baseline[record["item"]] for record in self._seen]
        return look_at(self._suite, before, self._seen, self._largest).ends


def sequential_result(
    suite: Suite, left: Sequence[Record], right: Sequence[Record], *, of: int, largest: int
) -> dict[str, Any]:
    """The fields of a comparison that the e-process decides, in place of those of the test of a fixed number of items."""
    assert suite.stop_early is not None
    look = look_at(suite, left, right, largest)
    found, block = look.comparison, suite.stop_early.block_items
    turned = not suite.scorer_of(suite.primary_metric).higher_is_better
    low, high = (-found.high, -found.low) if turned else (found.low, found.high)
    needed = 1.0 / (1.0 - suite.confidence)
    return {
        "low": low,
        "high": high,
        "one_sided_low": found.low,
        "p_value": found.p_value,
        "test": f"e-process, looked at after every {block} items",
        "interval": "confidence sequence",
        "reason": "the suite may stop early, so the evidence must hold at every look",
        "notes": [],
        "verdict": look.verdict,
        "noninferiority": look.noninferiority,
        "exit_code": int(EXIT_CODES[look.verdict]),
        "least_detectable": None,
        "items_to_settle": None,
        "limits": f"after {found.n} of {of} items the e-value is {found.e_value:.3g}; a difference needs {needed:.4g}",
        "sequential": {
            "e_value": found.e_value,
            "needed": needed,
            "answered": found.n,
            "of": of,
            "stopped": found.n < of,
            "clusters": found.units,
            "block_items": block,
        },
    }


def sequential_line(found: Mapping[str, Any]) -> str:
    """'stopped after 75 of 240 items: e-value 43.1, 20 is enough' for people."""
    where = "stopped after" if found["stopped"] else "went through all:"
    return (
        f"{where} {found['answered']} of {found['of']} items; e-value {found['e_value']:.3g}, {found['needed']:.4g} is enough "
        "(valid at every look)"
    )
