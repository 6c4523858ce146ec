"""What a reader decided, saved at once, and what it says: agreement with the scorer, and what no failure proves."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from finetune.errors import UserError
from finetune.paths import disk_faults, read_jsonl
from finetune.report.review.sample import ReviewItem
from finetune.stats.agreement import cohens_kappa
from finetune.stats.means import wilson_interval

# Key -> is the left answer right, is the right-hand answer right.
KEYS = {"1": (True, False), "2": (False, True), "3": (True, True), "4": (False, False)}
_LONGEST_NOTE = 4000


class VerdictFile:
    """`eval/review.jsonl`: one line a decision; of several about one item the last counts."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> dict[tuple[str, str], dict[str, Any]]:
        """(suite, item) -> its last decision."""
        lines = read_jsonl(self.path) if self.path.is_file() else []
        return {(line["suite"], line["item"]): line for line in lines}

    def add(self, item: ReviewItem, key: str, note: str) -> dict[str, Any]:
        """Save one decision and push it to the disk. Raises UserError for an unknown key or a note beyond bounds."""
        if key not in KEYS:
            raise UserError(f"'{key}' is no verdict", fix=f"one of: {', '.join(KEYS)}")
        if len(note) > _LONGEST_NOTE:
            raise UserError(f"the note has {len(note)} characters", fix=f"at most {_LONGEST_NOTE}")
        right = dict(zip(item.sides, KEYS[key], strict=True))
        line = {
            "suite": item.suite,
            "item": item.item,
            "stratum": item.stratum,
            "sides": list(item.sides),
            "key": key,
            "right": right,
            "scorer": item.right,
            "note": note,
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        with disk_faults(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(line, ensure_ascii=False) + "\n")
                stream.flush()
                os.fsync(stream.fileno())
        return line


def summarise_review(verdicts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Agreement of reader and scorer over both answers of every read item, with Cohen's kappa, and the disagreements.

    `tuned_wrong` counts items whose tuned answer the reader found wrong; `failure_rate_below` is the exact one-sided 95 %
    bound on the failure rate when there were none (0 of 40: below 7.2 %), else None. The sample is drawn evenly from
    four outcomes, so these rates are of the sample, not of the suite.
    """
    pairs = [
        (verdict["right"][arm], verdict["scorer"][arm]) for verdict in verdicts for arm in verdict["right"]
    ]
    n = len(pairs)
    agreed = sum(reader == scorer for reader, scorer in pairs)
    low, high = wilson_interval(agreed, n) if n else (None, None)
    wrong = sum(not verdict["right"]["tuned"] for verdict in verdicts)
    return {
        "read": len(verdicts),
        "answers": n,
        "agreed": agreed,
        "agreement": agreed / n if n else None,
        "low": low,
        "high": high,
        "kappa": cohens_kappa(pairs),
        "tuned_wrong": wrong,
        "failure_rate_below": 1.0 - 0.05 ** (1.0 / len(verdicts)) if verdicts and not wrong else None,
        "disagreements": [
            {"suite": verdict["suite"], "item": verdict["item"], "arm": arm, "note": verdict["note"]}
            for verdict in verdicts
            for arm in verdict["right"]
            if verdict["right"][arm] != verdict["scorer"][arm]
        ],
    }


def review_lines(summary: Mapping[str, Any], planned: int) -> list[str]:
    """The summary for a terminal."""
    if not summary["read"]:
        return [f"0 of {planned} items read"]
    kappa = "not defined" if summary["kappa"] is None else f"{summary['kappa']:.2f}"
    lines = [
        f"{summary['read']} of {planned} items read",
        f"reader and scorer agree on {summary['agreed']} of {summary['answers']} answers: {summary['agreement']:.1%} "
        f"[{summary['low']:.1%}, {summary['high']:.1%}], kappa {kappa}",
    ]
    lines += [
        f"  they differ: {one['suite']} {one['item']} ({one['arm']}) {one['note']}"
        for one in summary["disagreements"]
    ]
    if summary["failure_rate_below"] is not None:
        lines.append(
            f"no tuned answer of {summary['read']} was found wrong: its failure rate on items drawn like these is below "
            f"{summary['failure_rate_below']:.1%} (95 %)"
        )
    return lines
