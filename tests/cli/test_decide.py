"""`finetune decide` on a real, tiny model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def suite(make_showing_suite: Callable[..., Path]) -> Path:
    return make_showing_suite("exact_match", '{"a": 1}', 12)


def test_every_way_of_asking_is_measured(
    suite: Path, call: Any, tiny_model_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "facts.txt").write_text("The answer is always the same.")
    code, told = call(
        "decide", tiny_model_folder, "--suite", suite, "--documents", tmp_path / "facts.txt", "--goal", "0.9"
    )
    assert code == 0
    ways = {one["arm"]: one for one in told["standings"]}
    assert list(ways) == ["zero_shot", "few_shot", "documents"]
    assert ways["documents"]["prompt_tokens"] > ways["zero_shot"]["prompt_tokens"]
    assert ways["few_shot"]["gain"]["n"] == 12 and ways["zero_shot"]["gain"] is None
    # nothing that random weights say is JSON: form comes before tuning
    assert told["first"] == "format" and ways["zero_shot"]["off_format"] == 12
    assert told["items_needed"] > 0 and told["effect"] == pytest.approx(0.9)
    # and whether the content of what is off-format would be right, it does not know
    assert {one["name"]: one["applies"] for one in told["reasons"]}["domain, skill or style"] is None


def test_no_answer_without_a_suite(call: Any, tiny_model_folder: Path) -> None:
    code, told = call("decide", tiny_model_folder, "--examples", "5000")
    assert code == 2 and "without an evaluation" in told["error"][0]["what"]


def test_a_metric_that_is_no_share_and_empty_documents_are_refused(
    suite: Path, call: Any, tiny_model_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "empty.txt").write_text("\n")
    code, told = call("decide", tiny_model_folder, "--suite", suite, "--documents", tmp_path / "empty.txt")
    assert code == 2 and "is empty" in told["error"][0]["what"]
    (tmp_path / "long.txt").write_text("The answer is always the same. " * 60)
    code, told = call("decide", tiny_model_folder, "--suite", suite, "--documents", tmp_path / "long.txt")
    (fault,) = told["error"]
    assert code == 2 and fault["where"] == "--documents" and "the context is 512" in fault["why"]
    code, told = call("decide", tiny_model_folder, "--suite", "forgetting")
    assert code == 2 and "no share of right answers" in told["error"][0]["what"]
