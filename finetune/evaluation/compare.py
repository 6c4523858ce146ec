"""Two arms of one suite, item by item: differences with intervals, the verdict, and checks that the fight was fair."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from finetune.errors import ExitCode, Fault, UserError
from finetune.evaluation.cost import Spent, cost_of
from finetune.evaluation.formats import compare_formats
from finetune.evaluation.items import refuse_duplicates
from finetune.evaluation.records import ArmSummary, Record
from finetune.evaluation.saved_arms import SavedArm
from finetune.evaluation.scoring import clusters_of, scores_of
from finetune.evaluation.slicing import slice_comparisons
from finetune.evaluation.suite import Suite
from finetune.stats import compare

_SHOWN = 3
_CUT_SHARE_WORTH_A_NOTE = 0.1


def pair_records(
    baseline: Sequence[Record], arm: Sequence[Record], *, inner: bool = False
) -> tuple[list[Record], list[Record]]:
    """The records of both arms in one order, joined by item.

    Raises UserError when an item is repeated or, unless `inner`, when an item has an answer on one side only.
    """
    for records, side in ((baseline, "the baseline"), (arm, "the arm")):
        refuse_duplicates([record["item"] for record in records], side)
    left = {record["item"]: record for record in baseline}
    right = {record["item"]: record for record in arm}
    only_left = [item for item in left if item not in right]
    only_right = [item for item in right if item not in left]
    if (only_left or only_right) and not inner:
        raise UserError(
            f"the arms do not answer the same items: {len(only_left)} only in the baseline{_examples(only_left)}, "
            f"{len(only_right)} only in the arm{_examples(only_right)}",
            why="a paired comparison needs both answers to every item",
            fix="evaluate both arms on the same suite and items, or compare what they share with --inner",
        )
    shared = [item for item in left if item in right]
    return [left[item] for item in shared], [right[item] for item in shared]


def compare_records(
    suite: Suite,
    baseline: Sequence[Record],
    arm: Sequence[Record],
    *,
    inner: bool = False,
    metrics: Sequence[str] | None = None,
    slices: bool = True,
) -> dict[str, Any]:
    """Every metric of the suite compared, in the format of `eval/comparison.json`; the primary metric decides.

    slices: also compare every slice that the suite declares. The margin guards the primary metric. With no items nothing can be shown: differences are null, the verdict is
    `inconclusive`, and no gate passes.
    """
    left, right = pair_records(baseline, arm, inner=inner)
    sliced = slice_comparisons(suite, left, right, every=arm) if slices else []
    names = list(metrics) if metrics is not None else suite.metrics
    comparisons = [_compare_metric(suite, metric, left, right) for metric in names]
    decisive = next(one for one in comparisons if one["metric"] == suite.primary_metric)
    return {
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
    """Compare two saved arms; refuses arms of another suite, other items or another template. Adds costs and notes."""
    before, after = SavedArm(baseline_folder, baseline_arm), SavedArm(arm_folder, arm)
    return compare_saved(suite, before, after, slices=slices, spent=spent)


def compare_saved(
    suite: Suite,
    baseline: SavedArm,
    arm: SavedArm,
    *,
    inner: bool = False,
    slices: bool = True,
    spent: Spent | None = None,
) -> dict[str, Any]:
    """Compare two saved arms. Where both were evaluated here, arms of another suite, other items or another template are
    refused, and costs and notes are added; records from elsewhere must at least answer the same items. spent: prices,
    and how long the tuning took."""
    before, after = baseline.summary(), arm.summary()
    if before is not None and after is not None:
        refuse_unfair(suite, before, after, inner=inner)
    records = baseline.records(), arm.records()
    result = compare_records(suite, *records, inner=inner, slices=slices)
    if before is not None and after is not None:
        pairs = pair_records(*records, inner=inner)
        result["cost"] = cost_of(before, after, *pairs, confidence=suite.confidence, spent=spent or Spent())
        result["notes"] = _notes(before, after)
    result["adapter_sha256"] = after.adapter_sha256 if after is not None else None
    return result


def refuse_unfair(suite: Suite, baseline: ArmSummary, arm: ArmSummary, *, inner: bool = False) -> None:
    """All that must be the same on both sides, or a UserError with every difference. `inner` allows other items."""
    faults = [
        Fault(
            f"{what} differs: {getattr(baseline, name)[:12]} in {baseline.arm}, {getattr(arm, name)[:12]} in {arm.arm}",
            where=f"suite {suite.name}",
            why="the arms were not asked the same thing, so their difference would mean nothing",
            fix="evaluate both arms again with the same suite, items and tokenizer",
        )
        for name, what in (
            ("suite_digest", "the suite"),
            ("items_digest", "the set of items"),
            ("template_sha256", "the chat template"),
            ("backend", "the backend"),
        )
        if getattr(baseline, name) != getattr(arm, name) and not (inner and name == "items_digest")
    ]
    if baseline.suite_digest == arm.suite_digest != suite.digest:
        faults.append(
            Fault(
                f"suite {suite.name} has changed since both arms ran: {arm.suite_digest[:12]} then, "
                f"{suite.digest[:12]} now",
                where=str(suite.path),
                fix="evaluate both arms again, or score the saved answers again: finetune eval score RUN",
            )
        )
    if faults:
        raise UserError(faults)


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
            "off_format": compare_formats(left, right, metric),
            "exit_code": int(result.exit_code),
        }
    )


def _turned(found: dict[str, Any]) -> dict[str, Any]:
    """A comparison of negated scores, told in the scores' own direction; the verdict stays."""
    turned = {name: -found[name] for name in ("difference", "mean_a", "mean_b")}
    return found | turned | {"low": -found["high"], "high": -found["low"]}


def _refuse_other_tokens(metric: str, left: Sequence[Record], right: Sequence[Record]) -> None:
    other = [
        one["item"]
        for one, two in zip(left, right, strict=True)
        if one["output_tokens"] != two["output_tokens"]
    ]
    if other:
        raise UserError(
            f"'{metric}' cannot compare these arms: {len(other)} texts have other numbers of tokens{_examples(other)}",
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


def _notes(*summaries: ArmSummary) -> list[str]:
    """Remarks on fairness that are no errors."""
    notes = []
    for summary in summaries:
        cut = summary.finish_reasons.get("length", 0) / summary.n
        if cut > _CUT_SHARE_WORTH_A_NOTE:
            notes.append(f"{cut:.0%} of the answers of {summary.arm} were cut at the token limit")
    if summaries[0].batch_size != summaries[1].batch_size:
        notes.append("the arms ran with different batch sizes: their latencies are not comparable")
    return notes


def _examples(items: Sequence[str]) -> str:
    if not items:
        return ""
    return f" ({', '.join(items[:_SHOWN])}{', …' if len(items) > _SHOWN else ''})"
