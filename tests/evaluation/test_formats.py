"""A format failure is counted apart from a wrong answer: per record, per arm, and arm against arm."""

from __future__ import annotations

from typing import Any

from finetune.evaluation.compare import compare_records
from finetune.evaluation.formats import compare_formats
from finetune.evaluation.records import Record
from finetune.evaluation.scoring import score_records, summarise
from finetune.evaluation.screen import comparison_lines
from finetune.evaluation.suite import Suite

RIGHT, WRONG, OFF = '{"intent":"a"}', '{"intent":"b"}', "a"


def _scored(suite: Suite, arm: str, outputs: list[str]) -> list[Record]:
    records: list[dict[str, Any]] = [
        {
            "item": f"i{place}", "arm": arm, "cluster": f"i{place}", "tags": {}, "output": output,
            "reference": RIGHT, "output_tokens": 1, "prompt_tokens": 1,
        }
        for place, output in enumerate(outputs)
    ]  # fmt: skip
    return score_records(suite, records)


def test_every_record_says_whether_its_answer_has_the_form(suite: Suite) -> None:
    right, wrong, off = _scored(suite, "tuned", [RIGHT, WRONG, OFF])
    assert right["well_formed"] == {"exact_match": True, "intent_accuracy": True, "slot_f1": True}
    assert wrong["well_formed"]["exact_match"] and wrong["scores"]["exact_match"] == 0.0
    assert not off["well_formed"]["exact_match"]


def test_the_summary_counts_them_for_metrics_that_need_a_form(suite: Suite) -> None:
    found = summarise(_scored(suite, "tuned", [RIGHT, WRONG, OFF, OFF]), suite.metrics)
    assert found["exact_match"]["off_format"] == 2
    assert "off_format" not in found["valid_json"]


def test_arms_are_paired_on_it(suite: Suite) -> None:
    before = _scored(suite, "zero_shot", [OFF, OFF, WRONG, RIGHT, WRONG, OFF])
    after = _scored(suite, "tuned", [RIGHT, WRONG, OFF, RIGHT, WRONG, OFF])
    assert compare_formats(before, after, "exact_match") == {
        "baseline": 3, "arm": 2, "only_baseline": 2, "only_arm": 1, "both": 1,
        "wrong_in_format": {"baseline": 2, "arm": 2},
    }  # fmt: skip
    assert compare_formats(before, after, "valid_json") is None
    result = compare_records(suite, before, after, slices=False)
    assert result["comparisons"][0]["off_format"]["only_baseline"] == 2
    assert "off-format: 3 → 2 of 6 (2 mended, 1 new)" in "\n".join(comparison_lines(result))


def test_records_scored_before_formats_were_noted_are_compared_all_the_same(suite: Suite) -> None:
    old = [
        {name: value for name, value in record.items() if name != "well_formed"}
        for record in _scored(suite, "zero_shot", [RIGHT, WRONG])
    ]
    result = compare_records(suite, old, _scored(suite, "tuned", [RIGHT, RIGHT]), slices=False)
    assert result["comparisons"][0]["off_format"] is None
    assert not any("off-format" in line for line in comparison_lines(result))
