"""Was the fight fair? What must be the same on both sides or nothing is compared, and what a reader must know."""

from __future__ import annotations

from typing import Any

from finetune.errors import Fault, UserError
from finetune.evaluation.records import ArmSummary
from finetune.evaluation.suite import Suite

WARNING = "warning: "  # how a note begins that the last screen of a run must show
_CUT_SHARE_WORTH_A_NOTE = 0.1
_CUT_GAP_WORTH_A_WARNING = 0.05
_SAME = (
    ("suite_digest", "the suite"),
    ("items_digest", "the set of items"),
    ("template_sha256", "the chat template"),
    ("backend", "the backend"),
)


def refuse_unfair(suite: Suite, baseline: ArmSummary, arm: ArmSummary, *, inner: bool = False) -> None:
    """All that must be the same on both sides, or a UserError with every difference. `inner` allows other items."""
    faults = [
        Fault(
            f"{what} differs: {getattr(baseline, name)[:12]} in the baseline ({baseline.arm}), "
            f"{getattr(arm, name)[:12]} in the arm ({arm.arm})",
            where=f"suite {suite.name}",
            why="the arms were not asked the same thing, so their difference would mean nothing",
            fix="evaluate both arms again with the same suite, items and tokenizer",
        )
        for name, what in _SAME
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


def cut_share(summary: ArmSummary) -> float:
    """Share of the answers that the token limit ended."""
    return summary.finish_reasons.get("length", 0) / sum(summary.finish_reasons.values())


def fairness(baseline: ArmSummary, arm: ArmSummary) -> dict[str, Any]:
    """How the answers of both arms ended, and remarks that are no errors (`notes`) for every reader."""
    cut = {"baseline": cut_share(baseline), "arm": cut_share(arm)}
    ended = {"baseline": baseline.finish_reasons, "arm": arm.finish_reasons}
    return {"finish_reasons": ended, "cut": cut, "notes": _notes(baseline, arm)}


def _notes(baseline: ArmSummary, arm: ArmSummary) -> list[str]:
    notes = []
    before, after = cut_share(baseline), cut_share(arm)
    if abs(after - before) >= _CUT_GAP_WORTH_A_WARNING:
        more, share, less, other = (
            (arm.arm, after, baseline.arm, before)
            if after > before
            else (baseline.arm, before, arm.arm, after)
        )
        notes.append(
            f"{WARNING}the token limit cut {share:.1%} of the answers of {more} and {other:.1%} of those of {less}; "
            "part of the difference may be the limit: raise decoding.max_new_tokens"
        )
    else:
        notes += [
            f"{cut_share(summary):.0%} of the answers of {summary.arm} were cut at the token limit"
            for summary in (baseline, arm)
            if cut_share(summary) > _CUT_SHARE_WORTH_A_NOTE
        ]
    if baseline.batch_size != arm.batch_size:
        notes.append("the arms ran with different batch sizes: their latencies are not comparable")
    return notes
