"""Arms are paired by item, only when they were asked the same, and nothing compared is never a pass."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from finetune.errors import ExitCode, UserError
from finetune.evaluation.claims import combine
from finetune.evaluation.compare import compare_folders, compare_records
from finetune.evaluation.items import Item
from finetune.evaluation.records import ArmSummary, Record, read_summary, write_arm
from finetune.evaluation.run import evaluate_arm
from finetune.evaluation.scoring import scores_of, summarise
from finetune.evaluation.suite import SlicesSection, Suite, load_suite

METRICS = ("exact_match", "valid_json", "intent_accuracy", "slot_f1")


def _records(arm: str, scores: list[float], *, clusters: int = 1000) -> list[Record]:
    return [
        {
            "item": f"item-{index}",
            "arm": arm,
            "cluster": f"c{index % clusters}",
            "tags": {"intent": f"I{index % 3}"},
            "output_tokens": 3,
            "scores": dict.fromkeys(METRICS, score),
        }
        for index, score in enumerate(scores)
    ]


def test_the_four_cells_and_the_verdict(suite: Suite) -> None:
    before = _records("few_shot", [0, 0, 0, 0, 1, 1] * 20)
    after = _records("tuned", [1, 1, 1, 0, 1, 0] * 20)
    result = compare_records(suite, before, after)
    primary = result["comparisons"][0]
    assert result["primary_metric"] == primary["metric"] == "exact_match"
    assert (primary["fixed"], primary["broken"], primary["both_right"], primary["both_wrong"]) == (
        60,
        20,
        20,
        20,
    )
    assert primary["difference"] == pytest.approx(1 / 3)
    assert primary["low"] < 1 / 3 < primary["high"]
    assert (result["against"], primary["baseline"], primary["arm"]) == ("few_shot", "few_shot", "tuned")
    assert result["verdict"] == "improved"
    assert result["exit_code"] == ExitCode.DONE
    json.dumps(result, allow_nan=False)


@pytest.mark.parametrize(
    ("before", "after", "verdict", "code"),
    [
        ([0.0] * 50, [1.0] * 50, "improved", ExitCode.DONE),
        ([1.0] * 50, [0.0] * 50, "regressed", ExitCode.REGRESSED),
        ([0.0, 1.0] * 10, [1.0, 0.0] * 10, "inconclusive", ExitCode.INCONCLUSIVE),
        ([1.0, 0.0] * 500, [1.0, 0.0] * 500, "no-evidence", ExitCode.NO_EVIDENCE),
    ],
)
def test_every_verdict_has_its_exit_code(
    suite: Suite, before: list[float], after: list[float], verdict: str, code: ExitCode
) -> None:
    result = compare_records(suite, _records("zero_shot", before), _records("tuned", after))
    assert (result["verdict"], result["exit_code"]) == (verdict, code)


def test_records_are_joined_by_item_not_by_place(suite: Suite) -> None:
    before = _records("zero_shot", [1.0, 0.0, 1.0, 0.0] * 10)
    after = [dict(record, arm="tuned") for record in before[::-1]]
    primary = compare_records(suite, before, after)["comparisons"][0]
    assert (primary["fixed"], primary["broken"]) == (0, 0)
    assert primary["p_value"] == 1.0


def test_items_on_one_side_only_are_counted_and_refused_unless_inner(suite: Suite) -> None:
    before, after = _records("zero_shot", [0.0] * 10), _records("tuned", [1.0] * 10)
    with pytest.raises(UserError) as caught:
        compare_records(suite, before[:8], after[3:])
    assert "3 only in the baseline (item-0, item-1, item-2), 2 only in the arm (item-8, item-9)" in str(
        caught.value
    )
    assert compare_records(suite, before[:8], after[3:], inner=True)["comparisons"][0]["n"] == 5


def test_repeated_items_are_refused(suite: Suite) -> None:
    before = _records("zero_shot", [0.0] * 3)
    with pytest.raises(UserError, match="more than once"):
        compare_records(suite, [*before, before[0]], before)


def test_an_item_without_a_score_is_an_error(suite: Suite) -> None:
    before, after = _records("zero_shot", [0.0] * 3), _records("tuned", [1.0] * 3)
    after[1]["scores"] = {}
    with pytest.raises(UserError, match="item 'item-1' has no score 'exact_match'"):
        compare_records(suite, before, after)
    with pytest.raises(UserError, match="item-1"):
        scores_of(after, "exact_match")


def test_nothing_compared_is_null_and_never_a_pass(suite: Suite) -> None:
    result = compare_records(suite, [], [])
    primary = result["comparisons"][0]
    assert (primary["n"], primary["difference"], primary["low"], primary["p_value"]) == (0, None, None, None)
    assert result["verdict"] == "inconclusive"
    assert result["exit_code"] == ExitCode.INCONCLUSIVE
    assert primary["noninferiority"] != "pass"


def test_an_empty_bucket_is_null_and_keeps_the_others(suite: Suite) -> None:
    """Three slices of which one has no pair left."""
    sliced = suite.model_copy(update={"slices": SlicesSection(by=["intent"])})
    before, after = _records("zero_shot", [0.0, 1.0] * 15), _records("tuned", [1.0, 1.0] * 15)
    before = [record for record in before if record["tags"]["intent"] != "I2"]
    found = {one["value"]: one for one in compare_records(sliced, before, after, inner=True)["slices"]}
    assert (found["I2"]["n"], found["I2"]["difference"], found["I2"]["p_adjusted"]) == (0, None, None)
    assert (found["I0"]["n"], found["I0"]["difference"]) == (10, 0.5)
    assert found["I1"]["n"] == 10
    assert list(found)[-1] == "I2"
    json.dumps(list(found.values()), allow_nan=False)
    assert summarise([], ["slot_f1"])["slot_f1"]["mean"] is None


def test_a_guarding_suite_that_regressed_decides(suite: Suite) -> None:
    gained = compare_records(suite, _records("few_shot", [0.0] * 50), _records("tuned", [1.0] * 50))
    guard = suite.model_copy(update={"name": "guard", "role": "regression"})
    lost = compare_records(guard, _records("few_shot", [1.0] * 50), _records("tuned", [0.0] * 50))
    combined = combine([gained, lost])
    assert (combined["verdict"], combined["exit_code"]) == ("regressed", ExitCode.REGRESSED)
    assert {one["suite"] for one in combined["comparisons"]} == {"tiny", "guard"}
    assert combine([gained])["verdict"] == "improved"


def test_a_guarding_suite_forgives_a_loss_within_its_margin(suite: Suite) -> None:
    guard = suite.model_copy(update={"name": "guard", "role": "regression", "margin": 0.2})
    before = _records("few_shot", [1.0] * 200)
    lost = compare_records(guard, before, _records("tuned", [0.0] * 10 + [1.0] * 190))
    one = lost["comparisons"][0]
    assert one["high"] < 0.0 and one["noninferiority"] == "pass"  # a loss is shown, and bounded
    assert (lost["verdict"], lost["exit_code"]) == ("no-evidence", ExitCode.NO_EVIDENCE)
    assert "one as large as the margin is excluded" in one["notes"][-1]
    gained = compare_records(suite, _records("few_shot", [0.0] * 50), _records("tuned", [1.0] * 50))
    assert combine([gained, lost])["verdict"] == "improved"
    more = compare_records(guard, before, _records("tuned", [0.0] * 60 + [1.0] * 140))
    assert combine([gained, more])["verdict"] == "regressed"
    few = compare_records(guard, before[:9], _records("tuned", [0.0] + [1.0] * 8))
    assert few["verdict"] == "inconclusive"
    assert (
        compare_records(suite, before, _records("tuned", [0.0] * 10 + [1.0] * 190))["verdict"] == "regressed"
    )


@pytest.fixture
def run_arm(lively_model: Any, tiny_tokenizer: Any, items: list[Item], tmp_path: Path) -> Any:
    def call(suite: Suite, arm: str, asked: list[Item] = items) -> ArmSummary:
        return evaluate_arm(
            lively_model, tiny_tokenizer, suite, asked, arm=arm, batch_size=4, out_folder=tmp_path, key="k"
        )

    return call


def test_saved_arms_are_compared_with_costs_and_notes(suite: Suite, run_arm: Any, tmp_path: Path) -> None:
    baseline, tuned = run_arm(suite, "zero_shot"), run_arm(suite, "tuned")
    result = compare_folders(suite, tmp_path, "zero_shot", tmp_path)
    assert result["comparisons"][0]["n"] == 10
    assert result["cost"]["arm"]["output_tokens_per_item"] == tuned.output_tokens / 10
    assert result["cost"]["seconds_ratio"] == tuned.seconds / baseline.seconds
    assert result["cost"]["ratios"]["output_tokens"]["n"] == 10
    assert result["cut"]["arm"] == tuned.finish_reasons["length"] / 10
    json.dumps(result, allow_nan=False)


def test_arms_of_another_suite_items_or_template_are_refused(
    suite: Suite, run_arm: Any, items: list[Item], tmp_path: Path, tiny_tokenizer: Any
) -> None:
    run_arm(suite, "zero_shot")
    run_arm(suite, "tuned", items[:9])
    with pytest.raises(UserError, match="the set of items differs"):
        compare_folders(suite, tmp_path, "zero_shot", tmp_path)
    tiny_tokenizer.chat_template = tiny_tokenizer.chat_template.replace("You are tiny.", "You are small.")
    run_arm(suite, "tuned")
    with pytest.raises(UserError, match="the chat template differs"):
        compare_folders(suite, tmp_path, "zero_shot", tmp_path)


def test_a_suite_changed_since_its_baseline_is_named_by_digest(
    suite: Suite, run_arm: Any, tmp_path: Path
) -> None:
    before = suite.digest
    run_arm(suite, "zero_shot")
    run_arm(suite, "tuned")
    suite.path.write_text(suite.path.read_text().replace("version: 1", "") + "version: 2\n")
    changed = load_suite(suite.path)
    with pytest.raises(UserError, match="has changed since both arms ran") as caught:
        compare_folders(changed, tmp_path, "zero_shot", tmp_path)
    assert before[:12] in str(caught.value)
    run_arm(changed, "tuned")
    with pytest.raises(UserError, match="the suite differs"):
        compare_folders(changed, tmp_path, "zero_shot", tmp_path)


def test_a_summary_reads_back_as_it_was(suite: Suite, run_arm: Any, tmp_path: Path) -> None:
    summary = run_arm(suite, "zero_shot")
    saved = write_arm(tmp_path / "copy", summary, _records("zero_shot", [1.0]))
    assert read_summary(tmp_path / "copy", "zero_shot") == saved
    assert saved == replace(summary, records_sha256=saved.records_sha256)
