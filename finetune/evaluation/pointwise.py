"""A judge that scores one answer at a time, as a metric of a suite: scores for records, and whether they may be believed.

An answer that the judge never scored in the agreed form has no score (null): it is left out of this metric's means and
paired comparison, and counted there. Never a loss. What the judge says decides nothing before it agreed with a reader.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from finetune.errors import ExitCode, UserError
from finetune.evaluation.judge_model import Question, ask_judge, find_judge
from finetune.evaluation.records import Record
from finetune.evaluation.reviewed import Reviewed, answer_digest
from finetune.evaluation.scorers.judged import PointwiseRules
from finetune.evaluation.suite import Suite
from finetune.stats.agreement import agreement
from finetune.telemetry.progress import Progress


def judge_records(suite: Suite, records: Sequence[Record]) -> list[Record]:
    """The records with a score, or None, for every metric of the suite that a judge gives.

    Raises UserError when a judge cannot be asked, or scored none of the answers.
    """
    judged = [{**record, "scores": dict(record["scores"])} for record in records]
    for metric, rules in suite.judges().items():
        model = find_judge(server=rules.server, model=rules.model, key=rules.key, local=rules.local)
        questions = [Question(rules.told, rules.asked(record)) for record in records]
        with Progress(f"judge {suite.name}, {metric}", len(questions), "answers") as progress:
            scores = ask_judge(model, questions, rules.score_of, tries=rules.tries, on_reply=progress.advance)
        if records and not any(score is not None for score in scores):
            raise UserError(
                f"the judge {model.name} scored none of {len(records)} answers in the agreed form",
                where=f"suite {suite.name}, metric {metric}",
                fix="choose another judge, or a rubric that it understands",
            )
        for record, score in zip(judged, scores, strict=True):
            record["scores"][metric] = score
    return judged


def calibrate_pointwise(
    rules: PointwiseRules,
    metric: str,
    answers: Sequence[Record],
    reviewed: Reviewed,
    *,
    confidence: float = 0.95,
) -> dict[str, Any]:
    """How far the judge's pass or fail agrees with the reader's right or wrong, over the answers that both have seen.

    answers: of one arm or several; equal answers to an item count once. The judge is `calibrated` when the low end of
    kappa's interval is above 0: better than calling as many answers right at random.
    """
    pairs: dict[tuple[str, str], tuple[bool, bool]] = {}
    for record in answers:
        answer = record["item"], answer_digest(record["output"])
        score = record["scores"].get(metric)
        if answer in reviewed and score is not None:
            pairs[answer] = rules.passes(score), reviewed[answer]
    items = [item for item, _ in pairs]
    found = agreement(list(pairs.values()), clusters=items, confidence=confidence)
    return {**found.to_dict(), "calibrated": found.kappa_low is not None and found.kappa_low > 0.0}


def withhold_uncalibrated(
    suite: Suite, result: dict[str, Any], answers: Sequence[Record], reviewed: Reviewed
) -> None:
    """Add `judge` with its calibration to every comparison that a judge decides, and take back what it may not say yet.

    answers: the records of both arms. An uncalibrated judge's verdict is `inconclusive`, whatever its numbers. Changes
    `result`, of `compare_records`, in place.
    """
    judges = suite.judges()
    for one in result["comparisons"]:
        rules = judges.get(one["metric"])
        if rules is None or not one["n"]:
            continue
        trust = calibrate_pointwise(rules, one["metric"], answers, reviewed, confidence=suite.confidence)
        one["judge"] = {"name": rules.model or rules.local, "calibration": trust}
        if trust["calibrated"]:
            continue
        one["verdict"] = one["noninferiority"] = "inconclusive"
        one["notes"] = [*one["notes"], _why_withheld(trust)]
        if one["metric"] == result["primary_metric"]:
            result |= {"verdict": "inconclusive", "exit_code": int(ExitCode.INCONCLUSIVE)}


def _why_withheld(trust: Mapping[str, Any]) -> str:
    read = f"{trust['n']} of its answers were read by hand"
    if trust["kappa"] is not None and trust["kappa_low"] is not None:
        read += f", kappa {trust['kappa']:.2f} [{trust['kappa_low']:.2f}, {trust['kappa_high']:.2f}]"
    return (
        f"the judge is not calibrated ({read}), so its verdict does not count: read more with finetune review, then "
        "compare again"
    )
