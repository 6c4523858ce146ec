"""Two arms of one suite, item by item: differences with intervals, the verdict, and checks that the fight was fair."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from finetune.errors import ExitCode, UserError
from finetune.evaluation.cost import Spent, cost_of
from finetune.evaluation.early_stop import largest_cluster, seen_records, sequential_result
from finetune.evaluation.fairness import fairness, refuse_unfair
from finetune.evaluation.formats import compare_formats
from finetune.evaluation.pairing import examples, pair_records
from finetune.evaluation.records import Record
from finetune.evaluation.repeats import noise_of_difference, per_item
from finetune.evaluation.reviewed import Reviewed, read_reviewed, run_folder_of
from finetune.evaluation.saved_arms import SavedArm
from finetune.evaluation.scoring import both_scored, clusters_of, scores_of
from finetune.evaluation.slicing import slice_comparisons
from finetune.evaluation.suite import Suite
from finetune.stats import Comparison, compare
from finetune.stats.compare import EXIT_CODES

# Of an arm that stopped early, as its summary says it: {answered, of, largest_cluster}.
Stopped = Mapping[str, int] | None


def compare_records(
    suite: Suite,
    baseline: Sequence[Record],
    arm: Sequence[Record],
    *,
    inner: bool = False,
    metrics: Sequence[str] | None = None,
    slices: bool = True,
    reviewed: Reviewed | None = None,
    stopped: Stopped = None,
) -> dict[str, Any]:
    """Every metric of the suite compared, in the format of `eval/comparison.json`; the primary metric decides.

    Several answers to an item are averaged first; `noise` then says how much of the uncertainty is sampling. slices: also
    compare every slice that the suite declares. The margin guards the primary metric. With no items nothing can be
    shown: differences are null, the verdict is `inconclusive`, and no gate passes. reviewed: what a person read of these
    answers; a judge's verdict stays `inconclusive` until it agreed with that. stopped: what a summary says of an arm that
    stopped early; where the suite may do so, the pairs up to there are compared, and the e-process decides.
    """
    left, right = _pairs(suite, baseline, arm, inner=inner)
    sliced = (
        slice_comparisons(suite, left, right, every=right if stopped else per_item(arm)) if slices else []
    )
    names = list(metrics) if metrics is not None else suite.metrics
    comparisons = [
        _compare_metric(suite, metric, left, right) | _noise(baseline, arm, left, metric) for metric in names
    ]
    decisive = next(one for one in comparisons if one["metric"] == suite.primary_metric)
    if suite.stop_early is not None and left:
        _let_bets_decide(suite, left, right, comparisons, stopped or _whole(baseline))
    result = {
        "suite": suite.name,
        "role": suite.role,
        "primary_metric": suite.primary_metric,
        "against": baseline[0]["arm"] if baseline else None,
        "verdict": decisive["verdict"],
        "exit_code": decisive.pop("exit_code"),
        "comparisons": [
            {key: value for key, value in one.items() if key != "exit_code"} for one in comparisons
        ],
        "slices": [{"suite": suite.name, "metric": suite.primary_metric, **one} for one in sliced],
    }
    if suite.judges():
        from finetune.evaluation.pointwise import withhold_uncalibrated

        withhold_uncalibrated(suite, result, [*baseline, *arm], reviewed or {})
    return result


def compare_folders(
    suite: Suite,
    baseline_folder: Path,
    baseline_arm: str,
    arm_folder: Path,
    arm: str = "tuned",
    *,
    slices: bool = True,
    spent: Spent | None = None,
) -> dict[str, Any]:
    """Compare two saved arms; refuses arms of another suite, other items or another template. Adds costs (with
    slices) and notes."""
    before, after = SavedArm(baseline_folder, baseline_arm), SavedArm(arm_folder, arm)
    return compare_saved(suite, before, after, slices=slices, costs=slices, spent=spent)


def compare_saved(
    suite: Suite,
    baseline: SavedArm,
    arm: SavedArm,
    *,
    inner: bool = False,
    slices: bool = True,
    costs: bool = True,
    spent: Spent | None = None,
) -> dict[str, Any]:
    """Compare two saved arms. Where both were evaluated here, arms of another suite, other items or another template are
    refused, and costs (unless `costs` is False) and notes are added; records from elsewhere must at least answer the
    same items. spent: prices, and how long the tuning took."""
    before, after = baseline.summary(), arm.summary()
    if before is not None and after is not None:
        refuse_unfair(suite, before, after, inner=inner)
    records = baseline.records(), arm.records()
    run_folder = run_folder_of(arm.folder)
    reviewed = read_reviewed(run_folder, suite.name) if run_folder is not None else None
    stopped = next((one.stopped for one in (after, before) if one is not None and one.stopped), None)
    result = compare_records(suite, *records, inner=inner, slices=slices, reviewed=reviewed, stopped=stopped)
    if before is not None and after is not None:
        if costs:
            pairs = _pairs(suite, *records, inner=inner)
            result["cost"] = cost_of(before, after, *pairs, confidence=suite.confidence, spent=spent)
        result |= fairness(before, after)
    result["adapter_sha256"] = after.adapter_sha256 if after is not None else None
    return result


def _pairs(
    suite: Suite, baseline: Sequence[Record], arm: Sequence[Record], *, inner: bool
) -> tuple[list[Record], list[Record]]:
    return pair_records(*seen_records(suite, baseline, arm), inner=inner)


def _whole(baseline: Sequence[Record]) -> dict[str, int]:
    """What a summary would say of an arm that may stop early and did not."""
    return {"of": len(per_item(baseline)), "largest_cluster": largest_cluster(baseline)}


def _let_bets_decide(
    suite: Suite,
    left: Sequence[Record],
    right: Sequence[Record],
    comparisons: Sequence[dict[str, Any]],
    stopped: Mapping[str, int],
) -> None:
    """Put the e-process in place of the test of a fixed number of items, and a note on what it does not cover."""
    found = sequential_result(suite, left, right, of=stopped["of"], largest=stopped["largest_cluster"])
    for one in comparisons:
        if one["metric"] == suite.primary_metric:
            one |= found
        elif found["sequential"]["stopped"]:
            one["notes"] = [
                *one["notes"],
                f"'{suite.primary_metric}' decided when to stop: this interval is not corrected for that",
            ]


def _compare_metric(
    suite: Suite, metric: str, left: Sequence[Record], right: Sequence[Record]
) -> dict[str, Any]:
    head = {
        "suite": suite.name,
        "metric": metric,
        "baseline": left[0]["arm"] if left else None,
        "arm": right[0]["arm"] if right else None,
    }
    if not left:
        return head | _nothing_compared(suite)
    kind = suite.scorer_of(metric)
    if kind.asks_a_model:
        head["missing"] = _missing(left, right, metric)
        left, right = both_scored(left, right, metric)
        if not left:
            return head | _nothing_compared(suite)
    if kind.per_token:
        _refuse_other_tokens(metric, left, right)
    sign = 1.0 if kind.higher_is_better else -1.0
    result = compare(
        [sign * score for score in scores_of(left, metric)],
        [sign * score for score in scores_of(right, metric)],
        clusters=clusters_of(left),
        margin=suite.margin,
        confidence=suite.confidence,
    )
    found = result.to_dict() if sign > 0 else _turned(result.to_dict())
    return (
        head
        | found
        | {
            "limits": result.limits(),
            "higher_is_better": kind.higher_is_better,
            "open_ended": kind.open_ended,
            "off_format": compare_formats(left, right, metric),
            "exit_code": int(result.exit_code),
        }
        | (_guarded(result) if suite.role != "task" else {})
    )


def _guarded(result: Comparison) -> dict[str, Any]:
    """The verdict of a suite that guards: a loss is a regression only when one of the declared margin cannot be excluded."""
    outcome, verdict = result.noninferiority, result.verdict
    if outcome != "pass":
        verdict = "regressed" if outcome == "regressed" else "inconclusive"
    elif verdict != "improved":
        verdict = "no-evidence"
    notes = list(result.notes)
    if result.verdict == "regressed" and outcome == "pass":
        notes.append("a loss is shown, but one as large as the margin is excluded")
    return {"verdict": verdict, "exit_code": int(EXIT_CODES[verdict]), "notes": notes}


def _noise(
    baseline: Sequence[Record], arm: Sequence[Record], paired: Sequence[Record], metric: str
) -> dict[str, Any]:
    found = noise_of_difference(baseline, arm, [record["item"] for record in paired], metric)
    return {} if found is None else {"noise": found.to_dict()}


def _missing(left: Sequence[Record], right: Sequence[Record], metric: str) -> dict[str, int]:
    """Items that the judge gave no score, on either side and in all; they are left out, never counted as lost."""
    sides = {"baseline": left, "arm": right}
    counts = {
        name: sum(one["scores"].get(metric) is None for one in records) for name, records in sides.items()
    }
    return {**counts, "items": len(left) - len(both_scored(left, right, metric)[0])}


def _turned(found: dict[str, Any]) -> dict[str, Any]:
    """A comparison of negated scores, told in the scores' own direction; the verdict stays."""
    turned = {name: 0.0 - found[name] for name in ("difference", "mean_a", "mean_b")}  # never -0.0
    return found | turned | {"low": 0.0 - found["high"], "high": 0.0 - found["low"]}


def _refuse_other_tokens(metric: str, left: Sequence[Record], right: Sequence[Record]) -> None:
    other = [
        one["item"]
        for one, two in zip(left, right, strict=True)
        if one["output_tokens"] != two["output_tokens"]
    ]
    if other:
        raise UserError(
            f"'{metric}' cannot compare these arms: {len(other)} texts have other numbers of tokens{examples(other)}",
            why="the arms use different tokenizers, so a token is not the same piece of text",
            fix="compare them in bits_per_byte",
        )


def _nothing_compared(suite: Suite) -> dict[str, Any]:
    """n = 0: null, never 0.0, and never a pass."""
    empty = dict.fromkeys(
        (
            "difference",
            "low",
            "high",
            "mean_a",
            "mean_b",
            "p_value",
            "fixed",
            "broken",
            "both_right",
            "both_wrong",
        )
    )
    return {
        **empty,
        "n": 0,
        "clusters": 0,
        "confidence": suite.confidence,
        "margin": suite.margin,
        "test": "none",
        "reason": "no items",
        "verdict": "inconclusive",
        "noninferiority": "inconclusive",
        "exit_code": int(ExitCode.INCONCLUSIVE),
    }
