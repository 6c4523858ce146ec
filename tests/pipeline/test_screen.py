"""The last screen of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from finetune.paths import write_json
from finetune.pipeline.screen import last_screen

OFF = {
    "baseline": 12, "arm": 3, "only_baseline": 10, "only_arm": 1, "both": 2,
    "wrong_in_format": {"baseline": 40, "arm": 20},
}  # fmt: skip


@pytest.mark.parametrize(("off", "shown"), [(OFF, True), (None, False)])
def test_format_failures_have_a_line_of_their_own(
    off: dict[str, Any] | None, shown: bool, tmp_path: Path
) -> None:
    ledger = {"read": 3, "kept": 2, "dropped": {"short": 1}, "quarantined": 0}
    write_json(tmp_path / "data" / "manifest.json", {"ledger": ledger, "leaks": {"exact": 0}})
    write_json(tmp_path / "forecast.json", {"total_bytes": 10})
    one = {
        "suite": "s", "metric": "exact_match", "baseline": "few_shot", "arm": "tuned", "difference": 0.1, "low": 0.05,
        "high": 0.15, "confidence": 0.95, "n": 240, "p_value": 0.01, "test": "McNemar", "mean_a": 0.2, "mean_b": 0.3,
        "off_format": off, "fixed": None,
    }  # fmt: skip
    comparison = {
        "suite": "s", "primary_metric": "exact_match", "against": "few_shot", "verdict": "improved",
        "comparisons": [one],
    }  # fmt: skip
    screen = last_screen(tmp_path, comparison, tmp_path / "report.html")
    assert ("format   off-format: 12 → 3 of 240 (10 mended, 1 new)" in screen) is shown
    assert "2 kept + 1 dropped" in screen
