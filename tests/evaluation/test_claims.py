"""Several suites: a claim must survive the correction declared before the run; guards only have to hold."""

from __future__ import annotations

from typing import Any

import pytest

from finetune.errors import ExitCode
from finetune.evaluation.claims import combine, correct_claims, primary_of


def _result(
    suite: str, p_value: float | None, *, role: str = "task", verdict: str = "improved"
) -> dict[str, Any]:
    one = {
        "suite": suite, "metric": "m", "baseline": "few_shot", "p_value": p_value, "confidence": 0.95,
        "verdict": verdict, "low": 0.01, "high": 0.2, "margin": 0.02, "notes": [],
    }  # fmt: skip
    other = {**one, "baseline": "zero_shot", "p_value": 0.5}
    return {
        "suite": suite, "role": role, "primary_metric": "m", "against": "few_shot", "verdict": verdict,
        "exit_code": 0, "comparisons": [other, one], "slices": [{"suite": suite}], "cost": {"of": suite},
    }  # fmt: skip


def test_holm_takes_back_a_claim_that_many_looks_would_make_by_chance() -> None:
    results = [_result("a", 0.03), _result("b", 0.001), _result("c", 0.4, verdict="no-evidence")]
    corrected = correct_claims(results, "holm")
    assert [primary_of(one)["p_adjusted"] for one in corrected] == pytest.approx([0.06, 0.003, 0.4])
    assert [one["verdict"] for one in corrected] == ["no-evidence", "improved", "no-evidence"]
    assert corrected[0]["exit_code"] == ExitCode.NO_EVIDENCE
    assert "not among 3 task suites (holm: p = 0.06)" in primary_of(corrected[0])["notes"][0]
    assert results[0]["verdict"] == "improved" and "p_adjusted" not in primary_of(results[0])
    assert "p_adjusted" not in corrected[0]["comparisons"][0]  # only the deciding comparison makes a claim


def test_bh_is_less_strict_and_one_claim_is_left_as_it_is() -> None:
    results = [_result("a", 0.03), _result("b", 0.001), _result("c", 0.04)]
    assert [one["verdict"] for one in correct_claims(results, "bh")] == ["improved"] * 3
    alone = correct_claims([_result("a", 0.03), _result("g", 0.9, role="regression")], "holm")
    assert primary_of(alone[0])["p_adjusted"] == 0.03
    assert "p_adjusted" not in primary_of(alone[1])


def test_all_must_pass_needs_no_correction_and_claims_only_the_whole() -> None:
    results = [_result("a", 0.03), _result("b", 0.04), _result("c", 0.045)]
    found = combine(results, "all-must-pass")
    assert found["verdict"] == "improved"
    assert "no correction is needed" in found["correction"]["explained"]
    found = combine([*results, _result("d", 0.3, verdict="no-evidence")], "all-must-pass")
    assert (found["verdict"], found["exit_code"]) == ("no-evidence", ExitCode.NO_EVIDENCE)
    single = [_result("a", 0.001), _result("d", 0.3, verdict="no-evidence")]
    assert combine(single, "bh")["verdict"] == "improved"  # the first suite decides


def test_a_suite_without_items_makes_no_claim() -> None:
    found = combine([_result("a", 0.03), _result("b", None, verdict="inconclusive")], "holm")
    assert found["verdict"] == "improved"


def test_what_belongs_to_each_suite_is_kept() -> None:
    found = combine([_result("a", 0.001), _result("b", 0.5, verdict="no-evidence")])
    assert found["primary_metrics"] == {"a": "m", "b": "m"}
    assert [one["cost"] for one in found["suites"]] == [{"of": "a"}, {"of": "b"}]
    assert all("comparisons" not in one for one in found["suites"])
    assert [one["suite"] for one in found["comparisons"]] == ["a", "a", "b", "b"]
    assert found["slices"] == [{"suite": "a"}, {"suite": "b"}]


def test_a_loss_is_never_corrected_away() -> None:
    results = [_result("a", 0.04, verdict="regressed"), _result("b", 0.9, verdict="no-evidence")]
    assert correct_claims(results, "holm")[0]["verdict"] == "regressed"
