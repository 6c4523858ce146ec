"""The last screen of a run: the effect, what the items cannot tell, every suite, and what an answer costs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from finetune.evaluation.claims import combine
from finetune.paths import write_json
from finetune.pipeline.screen import last_screen


def _comparison(suite: str, **changes: Any) -> dict[str, Any]:
    return {
        "suite": suite, "metric": "m", "baseline": "few_shot", "arm": "tuned", "n": 60, "mean_a": 0.1, "mean_b": 0.4,
        "difference": 0.3, "low": 0.2, "high": 0.4, "confidence": 0.95, "p_value": 0.001, "test": "McNemar mid-p",
        "fixed": 20, "broken": 2, "both_right": 4, "both_wrong": 34, "margin": 0.02, "verdict": "improved",
        "limits": "60 items cannot tell a difference below 12.0 points (80 % power)", "notes": [], **changes,
    }  # fmt: skip


def _result(suite: str, role: str = "task", cost: Any = None, **changes: Any) -> dict[str, Any]:
    one = _comparison(suite, **changes)
    return {
        "suite": suite, "role": role, "primary_metric": "m", "against": "few_shot", "verdict": one["verdict"],
        "exit_code": 0, "comparisons": [one], "slices": [], "cost": cost,
    }  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    ledger = {"read": 9, "kept": 8, "dropped": {"long": 1}, "quarantined": 0}
    write_json(tmp_path / "data" / "manifest.json", {"ledger": ledger, "leaks": {"exact": 0}})
    write_json(tmp_path / "forecast.json", {"total_bytes": 2_000_000_000, "used_peak_bytes": 1_000_000_000})
    return tmp_path


def _lines(folder: Path, *results: dict[str, Any], correction: Any = "holm") -> dict[str, str]:
    text = last_screen(folder, combine(results, correction), folder / "report.html")
    return {line[:8].strip(): line[9:] for line in text.splitlines()}


def test_an_improvement_is_shown_with_interval_and_cells(folder: Path) -> None:
    lines = _lines(folder, _result("task"))
    assert (
        lines["effect"] == "m 10.0% → 40.0%: +30.0 points [+20.0, +40.0] at 95 %, n = 60; 20 fixed, 2 broken"
    )
    assert lines["verdict"].startswith("IMPROVED: the tuning helped")
    assert not {"limits", "suite", "claims", "cost"} & set(lines)


def test_the_memory_of_the_evaluation_has_a_line_where_it_is_known(folder: Path) -> None:
    said = last_screen(folder, combine([_result("task")], "holm"), folder / "report.html").splitlines()
    assert sum("forecast / used" in line for line in said) == 1
    known = {"total_bytes": 3_000_000_000, "used_peak_bytes": 2_000_000_000}
    write_json(folder / "forecast.json", {**known, "evaluation": known})
    said = last_screen(folder, combine([_result("task")], "holm"), folder / "report.html").splitlines()
    assert "         evaluation: forecast 3 GB, used 2 GB (forecast / used 1.50)" in said


@pytest.mark.parametrize("verdict", ["no-evidence", "inconclusive"])
def test_nothing_shown_says_what_could_not_be_seen(folder: Path, verdict: str) -> None:
    lines = _lines(folder, _result("task", verdict=verdict))
    assert lines["limits"] == "60 items cannot tell a difference below 12.0 points (80 % power)"


def test_every_other_suite_has_a_line_and_the_deciding_one_is_named(folder: Path) -> None:
    guard = _result("guard", "forgetting", mean_a=2.5, mean_b=3.1, difference=0.6, low=0.4, high=0.8,
                    verdict="regressed", fixed=None)  # fmt: skip
    lines = _lines(folder, _result("task"), guard)
    assert lines["suite"] == "guard (forgetting): m +0.6 [+0.4, +0.8] at 95 %, n = 60; regressed"
    assert lines["verdict"] == (
        "REGRESSED: the tuned model is worse (decided by guard; task by itself: improved)"
    )


def test_several_claims_say_how_they_were_corrected(folder: Path) -> None:
    lines = _lines(folder, _result("task", p_value=0.03), _result("other", p_value=0.04))
    assert "2 task suites; Holm" in lines["claims"]
    assert "improved taken alone (p = 0.03), not among 2 task suites" in lines["note"]
    assert lines["verdict"].startswith("NO-EVIDENCE")


def test_costs_are_ratios_with_intervals_and_money_only_when_priced(folder: Path) -> None:
    ratio = {"ratio": 0.5, "low": 0.4, "high": 0.625}
    names = ("prompt_tokens", "output_tokens", "latency_seconds_p50", "latency_seconds_p95", "price")
    side = {
        "prompt_tokens_per_item": 1234.5, "output_tokens_per_item": 20.0, "output_tokens_per_second": 100.0,
        "latency_seconds": {"p50": 1.0, "p95": 2.0}, "price_per_query": None,
    }  # fmt: skip
    cost: dict[str, Any] = {"baseline": side, "arm": side, "ratios": dict.fromkeys(names, ratio)}
    lines = _lines(folder, _result("task", cost=cost))
    assert lines["cost"].startswith("prompt 1,234 → 1,234 tokens (×0.5 [0.4, 0.625])")
    assert "price" not in lines[""]
    priced = {**side, "price_per_query": 0.002}
    even = {"queries_per_month": 12_345.6, "tuning_cost": 50.0, "months": 12.0}
    lines = _lines(
        folder, _result("task", cost={**cost, "baseline": priced, "arm": priced, "break_even": even})
    )
    assert lines[""].endswith(
        "the tuned model is cheaper from 12,346 queries a month (50 for the tuning over 12 months)"
    )
