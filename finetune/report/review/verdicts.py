"""What a reader decided, saved at once, and what it says: agreement with the scorer, and what no failure proves."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from finetune.errors import UserError
from finetune.evaluation.reviewed import read_verdicts
from finetune.paths import disk_faults
from finetune.report.review.sample import ReviewItem
from finetune.stats import failure_rate_upper_bound
from finetune.stats.agreement import agreement

# Key -> is the left answer right, is the right-hand answer right.
KEYS = {"1": (True, False), "2": (False, True), "3": (True, True), "4": (False, False)}
_LONGEST_NOTE = 4000


class VerdictFile:
    """`eval/review.jsonl`: one line a decision; of several about one item the last counts."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> dict[tuple[str, str], dict[str, Any]]:
        """(suite, item) -> its last decision."""
        return {(line["suite"], line["item"]): line for line in read_verdicts(self.path)}

    def of(self, items: Sequence[ReviewItem]) -> list[dict[str, Any]]:
        """The decisions on these items' very answers; one on an older answer does not count."""
        saved = self.read()
        found = [(item, saved.get((item.suite, item.item))) for item in items]
        return [line for item, line in found if line is not None and line["answers"] == item.digests]

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
            "answers": item.digests,
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


def key_of(right: Mapping[str, bool], sides: Sequence[str]) -> str:
    """The key that says the same with the arms on these sides."""
    wanted = tuple(right[side] for side in sides)
    return next(key for key, decided in KEYS.items() if decided == wanted)


def summarise_review(verdicts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Agreement of reader and scorer over both answers of every read item, with Cohen's kappa, both with interval, and the
    disagreements.

    `tuned_wrong` counts items whose tuned answer the reader found wrong; `failure_rate_below` is the exact one-sided 95 %
    bound on the failure rate that this shows (0 of 40: below 7.2 %). The sample is drawn evenly from four outcomes, so
    these rates are of items drawn like these, not of the suite.
    """
    pairs = [
        (verdict["right"][arm], verdict["scorer"][arm]) for verdict in verdicts for arm in verdict["right"]
    ]
    items = [(verdict["suite"], verdict["item"]) for verdict in verdicts for _ in verdict["right"]]
    found = agreement(pairs, clusters=items)
    wrong = sum(not verdict["right"]["tuned"] for verdict in verdicts)
    bound = failure_rate_upper_bound(wrong, len(verdicts)) if verdicts else None
    return {
        "read": len(verdicts),
        "answers": len(pairs),
        **{key: value for key, value in found.to_dict().items() if key != "n"},
        "tuned_wrong": wrong,
        "failure_rate_below": bound,
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
    kappa = "kappa not defined (only one kind of answer)"
    if summary["kappa"] is not None:
        kappa = f"kappa {summary['kappa']:.2f}"
        if summary["kappa_low"] is not None:
            kappa += f" [{summary['kappa_low']:.2f}, {summary['kappa_high']:.2f}]"
    wrong = (
        f"no tuned answer of {summary['read']} was"
        if not summary["tuned_wrong"]
        else (f"{summary['tuned_wrong']} tuned answers of {summary['read']} were")
    )
    return [
        f"{summary['read']} of {planned} items read",
        f"reader and scorer agree on {summary['agreed']} of {summary['answers']} answers: {summary['agreement']:.1%} "
        f"[{summary['low']:.1%}, {summary['high']:.1%}], {kappa}",
        *(
            f"  they differ: {one['suite']} {one['item']} ({one['arm']}) {one['note']}".rstrip()
            for one in summary["disagreements"]
        ),
        f"{wrong} found wrong: the failure rate on items drawn like these is below "
        f"{summary['failure_rate_below']:.1%} (95 %)",
    ]
