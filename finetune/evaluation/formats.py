"""Answers without the form that a metric needs, counted apart from wrong ones, arm against arm on the same items."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from finetune.evaluation.records import Record
from finetune.evaluation.scoring import off_format


def compare_formats(left: Sequence[Record], right: Sequence[Record], metric: str) -> dict[str, Any] | None:
    """How many answers of either arm miss the metric's format, and how many have it and are not fully right all the same.

    left, right: both arms in one order. None for a metric that takes any text, or for records that were scored before
    formats were noted.
    """
    before, after = off_format(left, metric), off_format(right, metric)
    if before is None or after is None:
        return None
    return {
        "baseline": sum(before),
        "arm": sum(after),
        "only_baseline": sum(one and not two for one, two in zip(before, after, strict=True)),
        "only_arm": sum(two and not one for one, two in zip(before, after, strict=True)),
        "both": sum(one and two for one, two in zip(before, after, strict=True)),
        "wrong_in_format": {
            "baseline": _wrong_in_format(left, before, metric),
            "arm": _wrong_in_format(right, after, metric),
        },
    }


def format_line(off: dict[str, Any], n: int) -> str:
    """'off-format: 12 → 3 of 240 (10 mended, 1 new); in format but not fully right: 40 → 20'."""
    wrong = off["wrong_in_format"]
    return (
        f"off-format: {off['baseline']} → {off['arm']} of {n} ({off['only_baseline']} mended, {off['only_arm']} new); "
        f"in format but not fully right: {wrong['baseline']} → {wrong['arm']}"
    )


def _wrong_in_format(records: Sequence[Record], off: Sequence[bool], metric: str) -> int:
    return sum(
        record["scores"][metric] < 1.0 and not is_off for record, is_off in zip(records, off, strict=True)
    )
