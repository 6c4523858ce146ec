"""Slices say where something was lost, and many looks are paid for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from finetune.errors import UserError
from finetune.evaluation.claims import combine
from finetune.evaluation.compare import compare_records
from finetune.evaluation.items import Item
from finetune.evaluation.run import prepare_arm
from finetune.evaluation.screen import comparison_lines
from finetune.evaluation.suite import SlicesSection, Suite, load_suite


def _records(arm: str, wrong: set[int], n: int = 90) -> list[dict[str, Any]]:
    return [
        {
            "item": f"item-{index}", "arm": arm, "cluster": f"item-{index}", "source": "made",
            "tags": {"intent": f"I{index % 3}"}, "prompt_tokens": 10 + index, "output_tokens": 3,
            "scores": dict.fromkeys(("exact_match", "valid_json", "intent_accuracy", "slot_f1"), float(index not in wrong)),
        }
        for index in range(n)
    ]  # fmt: skip


@pytest.fixture
def sliced(suite: Suite) -> Suite:
    return suite.model_copy(update={"slices": SlicesSection(by=["intent", "length", "source"])})


def test_the_worst_slice_comes_first_and_losses_do_not_hide_in_the_mean(sliced: Suite) -> None:
    base = _records("zero_shot", {index for index in range(90) if index % 3 == 2 and index < 63})
    tuned = _records("tuned", {index for index in range(90) if index % 3 == 1 and index < 60})
    result = compare_records(sliced, base, tuned)
    assert abs(result["comparisons"][0]["difference"]) < 0.02
    slices = {(one["by"], one["value"]): one for one in result["slices"]}
    assert result["slices"][0]["value"] == "I1"
    assert slices["intent", "I1"]["difference"] == pytest.approx(-2 / 3)
    assert slices["intent", "I1"]["broken"] == 20
    assert slices["intent", "I1"]["different"] and slices["intent", "I2"]["different"]
    assert not slices["intent", "I0"]["different"]
    assert slices["intent", "I0"]["p_value"] == 1.0
    assert slices["source", "made"]["n"] == 90
    assert [slices["length", name]["n"] for name in ("short", "medium", "long")] == [30, 30, 30]
    assert any("intent I1" in line for line in comparison_lines(result))
    assert len(combine([result, result])["slices"]) == 2 * len(result["slices"])


def test_p_values_are_corrected_over_all_slices(sliced: Suite) -> None:
    base, tuned = _records("zero_shot", set()), _records("tuned", {1, 4, 7, 10, 13, 16})
    for one in compare_records(sliced, base, tuned)["slices"]:
        assert one["p_adjusted"] >= one["p_value"]
    worst = compare_records(sliced, base, tuned)["slices"][0]
    assert worst["p_value"] <= 0.05 < worst["p_adjusted"]
    assert not worst["different"]


def test_a_tag_that_is_missing_is_named(suite: Suite) -> None:
    asked = suite.model_copy(update={"slices": SlicesSection(by=["colour"])})
    with pytest.raises(UserError, match="item 'item-0' has no tag 'colour'"):
        compare_records(asked, _records("zero_shot", set()), _records("tuned", set()))


def test_no_slices_are_no_slices(suite: Suite) -> None:
    assert compare_records(suite, _records("zero_shot", set()), _records("tuned", set()))["slices"] == []
    assert compare_records(suite, [], [])["slices"] == []


def test_small_slices_are_pooled_for_alone_they_show_nothing(suite: Suite) -> None:
    base, tuned = _records("zero_shot", set()), _records("tuned", {0})
    for records in (base, tuned):
        for index, record in enumerate(records):
            record["tags"] = {"intent": f"rare-{index}" if index < 5 else f"I{index % 2}"}
    asked = suite.model_copy(update={"slices": SlicesSection(by=["intent"])})
    found = {one["value"]: one["n"] for one in compare_records(asked, base, tuned)["slices"]}
    assert found == {"I0": 42, "I1": 43, "5 rare ones": 5}
    assert compare_records(asked, base, tuned, slices=False)["slices"] == []


def test_a_tag_to_slice_by_is_looked_for_before_any_answer(
    suite: Suite, items: list[Item], tiny_tokenizer: Any
) -> None:
    asked = suite.model_copy(update={"slices": SlicesSection(by=["length", "intnt"])})
    with pytest.raises(UserError, match="10 of 10 items have no tag 'intnt'") as caught:
        prepare_arm(tiny_tokenizer, asked, items, arm="zero_shot", key="k")
    assert "did you mean 'intent'?" in str(caught.value)


def test_a_slice_of_one_cluster_of_losses_is_null_and_spoils_nothing(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text('{"id": "a", "reference": "x"}\n')
    (tmp_path / "t.yaml").write_text(
        "suite: 1\nname: t\nrole: forgetting\ntask: text\nitems: {jsonl: t.jsonl}\nscorers: [nll_per_token]\n"
        "primary_metric: nll_per_token\nslices: {by: [intent]}\n"
    )
    losses = load_suite(tmp_path / "t.yaml")

    def records(arm: str, loss: float) -> list[dict[str, Any]]:
        made = _records(arm, set(), 40)
        for n, record in enumerate(made):
            record |= {
                "tags": {"intent": "rare" if n == 39 else "usual"},
                "scores": {"nll_per_token": loss + n},
            }
        return made

    result = compare_records(losses, records("zero_shot", 3.0), records("tuned", 2.5))
    assert result["verdict"] == "improved"
    slices = {one["value"]: one for one in result["slices"]}
    assert slices["usual"]["difference"] == pytest.approx(-0.5)
    assert (slices["rare"]["n"], slices["rare"]["difference"], slices["rare"]["p_adjusted"]) == (
        1,
        None,
        None,
    )
    assert any("rare" in line and "no margin of error" in line for line in comparison_lines(result))
