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


def test_no_answer_without_a_suite(call: Any, tiny_model_folder: Path) -> None:
    code, told = call("decide", tiny_model_folder, "--examples", "5000")
    assert code == 2 and "without an evaluation" in told["error"][0]["what"]


def test_a_metric_that_is_no_share_and_empty_documents_are_refused(
    suite: Path, call: Any, tiny_model_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "empty.txt").write_text("\n")
    code, told = call("decide", tiny_model_folder, "--suite", suite, "--documents", tmp_path / "empty.txt")
    assert code == 2 and "is empty" in told["error"][0]["what"]
    code, told = call("decide", tiny_model_folder, "--suite", "forgetting")
    assert code == 2 and "no share of right answers" in told["error"][0]["what"]
