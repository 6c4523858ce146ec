"""From saved answers to scores and means: pure, so that a suite can be scored again without generating again."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from finetune.errors import Fault, UserError
from finetune.evaluation.items import Item
from finetune.evaluation.records import ArmSummary, Record
from finetune.evaluation.repeats import answers_by_item, per_item, samples_of
from finetune.evaluation.scorers.json_object import NotAnObjectError
from finetune.evaluation.scorers.kind import Score
from finetune.evaluation.suite import Suite
from finetune.stats import mean_interval, variance_parts

_FAULTS_SHOWN = 5
_FOR_PLAIN_TEXT = (
    "where answers are plain text, set scorers: [text_match] and primary_metric: text_match, or normalised_match where case "
    "and punctuation do not matter (`finetune eval scorers` lists all); else write the reference as one JSON object"
)


def check_references(suite: Suite, items: Sequence[Item]) -> None:
    """Refuse items whose reference cannot be scored, before anything is generated; names them all at once."""
    faults = []
    functions = suite.score_functions()
    for item in items:
        try:
            _apply(functions, item.reference, item.reference, item.check)
        except (ValueError, UserError) as error:
            faults.append(_unscored(error, f"suite {suite.name}, item {item.id}"))
    _refuse(faults)


def score_answer(
    suite: Suite, output: str, reference: str, check: Mapping[str, Any] | None = None
) -> dict[str, float]:
    """Every metric of the suite for one answer. A score that is no finite number is an error, never a zero."""
    return _apply(suite.score_functions(), output, reference, check)


def _apply(
    functions: Mapping[str, Score], output: str, reference: str, check: Mapping[str, Any] | None
) -> dict[str, float]:
    scores = {metric: float(score(output, reference, check)) for metric, score in functions.items()}
    for metric, value in scores.items():
        if not math.isfinite(value):
            raise UserError(f"metric '{metric}' gave {value}", fix="mend the scorer")
    return scores


def score_records(suite: Suite, records: Sequence[Record]) -> list[Record]:
    """The records with the suite's scores in place of whatever scores they had, and for metrics that need a format,
    whether the answer has it (`well_formed`). Metrics of a judge ask it, and are None where it gave no score. Raises
    UserError naming the items that cannot be scored."""
    functions, formats = suite.score_functions(), suite.format_functions()
    scored, faults = [], []
    for record in records:
        output, check = record["output"], record.get("task_scores", record.get("check"))
        try:
            scores = _apply(functions, output, record["reference"], check)
        except (ValueError, UserError) as error:
            faults.append(_unscored(error, f"suite {suite.name}, arm {record['arm']}, item {record['item']}"))
            continue
        found: Record = {**record, "scores": scores}
        if formats:
            found["well_formed"] = {metric: has(output) for metric, has in formats.items()}
        scored.append(found)
    _refuse(faults)
    if suite.judges():
        from finetune.evaluation.pointwise import judge_records

        return judge_records(suite, scored)
    return scored


def off_format(records: Sequence[Record], metric: str) -> list[bool] | None:
    """For each record, whether its answer has not the form that the metric needs; None for a metric that needs none."""
    marks = [record.get("well_formed", {}).get(metric) for record in records]
    return None if None in marks or not marks else [not mark for mark in marks]


def _unscored(error: ValueError | UserError, where: str) -> Fault:
    if isinstance(error, UserError):
        first = error.faults[0]
        return Fault(first.what, where, first.why, first.fix)
    if isinstance(error, NotAnObjectError):
        return Fault(str(error), where, "the suite's scorers compare objects by their keys", _FOR_PLAIN_TEXT)
    return Fault(str(error), where, fix="mend the item, or the scorer's parameters")


def _refuse(faults: Sequence[Fault]) -> None:
    if len(faults) > _FAULTS_SHOWN:
        more = Fault(f"{len(faults) - _FAULTS_SHOWN} more items cannot be scored")
        faults = [*faults[:_FAULTS_SHOWN], more]
    if faults:
        raise UserError(faults)


def summarise(
    records: Sequence[Record],
    metrics: Sequence[str],
    *,
    confidence: float = 0.95,
    may_lack: Collection[str] = (),
) -> dict[str, dict[str, Any]]:
    """Metric -> mean over items with interval, clustered where items share a cluster. No records: null with n = 0.

    Several answers to an item are averaged first; `variance` then says how far they differ among themselves. may_lack:
    metrics of a judge; their means leave out the items without a score and count them in `missing`.
    """
    return {
        metric: _judged_mean(records, metric, confidence)
        if metric in may_lack
        else _mean(records, metric, confidence)
        for metric in metrics
    }


def rescored(suite: Suite, records: Sequence[Record], summary: ArmSummary) -> tuple[list[Record], ArmSummary]:
    """Saved answers and their summary, scored with the suite as it is now."""
    scored = score_records(suite, records)
    metrics = summarise(scored, suite.metrics, confidence=suite.confidence, may_lack=suite.judges())
    return scored, replace(summary, metrics=metrics, suite_digest=suite.digest)


def summarise_arm(
    suite: Suite,
    records: Sequence[Record],
    *,
    arm: str,
    seconds: float,
    key: str,
    items_digest: str,
    adapter_sha256: str | None,
    batch_size: int,
    template_sha256: str,
    backend: str = "transformers",
) -> ArmSummary:
    """What one arm did, from its scored records."""
    latencies = [record["latency_seconds"] for record in records]
    return ArmSummary(
        suite=suite.name,
        suite_digest=suite.digest,
        items_digest=items_digest,
        arm=arm,
        n=len(records),
        metrics=summarise(records, suite.metrics, confidence=suite.confidence, may_lack=suite.judges()),
        output_tokens=sum(record["output_tokens"] for record in records),
        prompt_tokens=sum(record["prompt_tokens"] for record in records),
        seconds=round(seconds, 3),
        latency_seconds={f"p{share}": round(float(np.percentile(latencies, share)), 4) for share in (50, 95)},
        finish_reasons=dict(sorted(Counter(record["finish_reason"] for record in records).items())),
        adapter_sha256=adapter_sha256,
        key=key,
        batch_size=batch_size,
        template_sha256=template_sha256,
        backend=backend,
        repeats=max(map(len, answers_by_item(records).values()), default=1),
    )


def scores_of(records: Sequence[Record], metric: str) -> list[float]:
    """One score a record. A record without this metric is a user error that names the item."""
    values = []
    for record in records:
        value = record["scores"].get(metric)
        if value is None:
            raise UserError(
                f"item '{record['item']}' has no score '{metric}'",
                where=f"arm {record['arm']}",
                fix="score the saved answers again: finetune eval score RUN",
            )
        values.append(float(value))
    return values


def both_scored(
    left: Sequence[Record], right: Sequence[Record], metric: str
) -> tuple[list[Record], list[Record]]:
    """The pairs of records that have a score on both sides: a judge's metric may lack some. left, right: in one order."""
    pairs = [
        (one, two)
        for one, two in zip(left, right, strict=True)
        if one["scores"].get(metric) is not None and two["scores"].get(metric) is not None
    ]
    return [one for one, _ in pairs], [two for _, two in pairs]


def clusters_of(records: Sequence[Record]) -> list[Hashable]:
    return [record["cluster"] for record in records]


def _judged_mean(records: Sequence[Record], metric: str, confidence: float) -> dict[str, Any]:
    lacking = {record["item"] for record in records if record["scores"].get(metric) is None}
    found = _mean([record for record in records if record["item"] not in lacking], metric, confidence)
    return {**found, "missing": len(lacking)}


def _mean(records: Sequence[Record], metric: str, confidence: float) -> dict[str, Any]:
    if not records:
        return {"mean": None, "low": None, "high": None, "n": 0, "method": "no items"}
    every = scores_of(records, metric)
    items = per_item(records)
    interval = mean_interval(scores_of(items, metric), clusters=clusters_of(items), confidence=confidence)
    found = interval.to_dict()
    if len(every) > len(items) > 1:
        found["variance"] = variance_parts(samples_of(records, metric)).to_dict()
    off = off_format(records, metric)
    if off is not None:
        found["off_format"] = sum(off)
    if metric == "nll_per_token":
        found["perplexity"] = math.exp(interval.mean)
    return found
