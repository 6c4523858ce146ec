"""A task's documents are answered by our models, and score as with the harness's own backend."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from finetune.evaluation.compare import compare_folders
from finetune.evaluation.records import Record, read_records
from finetune.evaluation.run import evaluate_arm
from finetune.evaluation.suite import Suite
from finetune.evaluation.suite_data import load_suite_data

Samples = Callable[..., list[dict[str, Any]]]
Make = Callable[..., Suite]


@pytest.fixture
def answered(lively_model: Any, tiny_tokenizer: Any, tmp_path: Path) -> Callable[..., list[Record]]:
    def call(suite: Suite, *, model: Any = None, folder: str = "out", arm: Any = "zero_shot") -> list[Record]:
        items = load_suite_data(suite).items
        evaluate_arm(
            model if model is not None else lively_model, tiny_tokenizer, suite, items,
            arm=arm, batch_size=3, out_folder=tmp_path / folder, key=folder,
        )  # fmt: skip
        return read_records(tmp_path / folder, arm)

    return call


def test_choices_score_as_with_the_hf_backend(
    answered: Any, task_suite: Make, samples_of: Samples, lively_model: Any, tiny_tokenizer: Any
) -> None:
    suite = task_suite("larger_choice")
    theirs = samples_of(lively_model, tiny_tokenizer, "larger_choice")
    ours = answered(suite)
    assert [record["item"] for record in ours] == [str(sample["doc_id"]) for sample in theirs]
    for record, sample in zip(ours, theirs, strict=True):
        assert record["scores"] == {"acc": sample["acc"], "acc_norm": sample["acc_norm"]}
        found = json.loads(record["output"])["responses"]
        assert [one[0] for one in found] == pytest.approx(
            [one[0] for one in sample["filtered_resps"]], rel=1e-4
        )
        assert [one[1] for one in found] == [one[1] for one in sample["filtered_resps"]]
        assert record["prompt"] == sample["arguments"][0][0]
        assert record["reference"] == sample["doc"]["choices"][1]


def test_answers_in_writing_and_filters_are_those_of_the_hf_backend(
    answered: Any, task_suite: Make, samples_of: Samples, lively_model: Any, tiny_tokenizer: Any
) -> None:
    suite = task_suite("larger_write")
    assert suite.metrics == ["exact_match,whole", "exact_match,first-letter"]
    theirs = samples_of(lively_model, tiny_tokenizer, "larger_write")
    ours = answered(suite)
    whole = {sample["doc_id"]: sample for sample in theirs if sample["filter"] == "whole"}
    for record in ours:
        sample = whole[int(record["item"])]
        assert record["output"] == sample["resps"][0][0]
        assert record["prompt"] == sample["arguments"][0][0]
        assert record["scores"]["exact_match,whole"] == sample["exact_match"]
    assert len({record["output"] for record in ours}) > 1
    assert "Train: " in ours[0]["prompt"]


def test_texts_go_through_the_context_in_windows(
    answered: Any, task_suite: Make, samples_of: Samples, lively_model: Any, tiny_tokenizer: Any
) -> None:
    suite = task_suite("larger_text")
    assert suite.metrics == ["log_word_perplexity", "bits_per_byte"]
    assert not suite.scorer_of("log_word_perplexity").higher_is_better
    theirs = samples_of(lively_model, tiny_tokenizer, "larger_text")
    ours = answered(suite)
    for record, sample in zip(ours, theirs, strict=True):
        (found,) = json.loads(record["output"])["responses"]
        assert found == pytest.approx(sample["word_perplexity"][0], rel=1e-4)
    totals = [sum(sample["word_perplexity"][part] for sample in theirs) for part in (0, 1)]
    mean = sum(record["scores"]["log_word_perplexity"] for record in ours) / len(ours)
    assert mean == pytest.approx(-totals[0] / totals[1], rel=1e-5)
    total_bytes = sum(sample["bits_per_byte"][1] for sample in theirs)
    mean_bits = sum(record["scores"]["bits_per_byte"] for record in ours) / len(ours)
    assert mean_bits == pytest.approx(-totals[0] / total_bytes / math.log(2), rel=1e-5)


def test_a_likelihood_is_scored_by_its_logarithm(
    answered: Any, task_suite: Make, samples_of: Samples, lively_model: Any, tiny_tokenizer: Any
) -> None:
    theirs = samples_of(lively_model, tiny_tokenizer, "larger_last")
    for record, sample in zip(answered(task_suite("larger_last")), theirs, strict=True):
        assert record["scores"]["log_perplexity"] == pytest.approx(-sample["perplexity"], rel=1e-4)
        assert record["scores"]["acc"] == sample["acc"]


def test_a_chat_template_is_applied_where_the_suite_says_so(
    answered: Any, task_suite: Make, samples_of: Samples, lively_model: Any, tiny_tokenizer: Any
) -> None:
    suite = task_suite("larger_write", "prompt_format: chat")
    theirs = samples_of(
        lively_model, tiny_tokenizer, "larger_write", apply_chat_template=True, fewshot_as_multiturn=True
    )
    ours = answered(suite)
    for record in ours:
        sample = next(one for one in theirs if one["doc_id"] == int(record["item"]))
        assert record["prompt"] == sample["arguments"][0][0]
        assert record["output"] == sample["resps"][0][0]
    assert ours[0]["prompt"].startswith("<|im_start|>system")


def test_a_group_is_one_suite(answered: Any, task_suite: Make) -> None:
    suite = task_suite("larger", "slices: {by: [task], min_items: 1}")
    assert suite.metrics == ["acc"]
    records = answered(suite)
    assert len(records) == 14
    assert records[0]["item"] == "larger_choice/0"
    assert {record["tags"]["task"] for record in records} == {"larger_choice", "larger_last"}


def test_base_and_tuned_are_paired(
    answered: Any, task_suite: Make, make_tiny_model: Any, tmp_path: Path
) -> None:
    suite = task_suite("larger_text", "primary_metric: bits_per_byte", "margin: 0.1")
    answered(suite, folder="base")
    answered(suite, model=make_tiny_model(seed=3), folder="tuned", arm="tuned")
    result = compare_folders(suite, tmp_path / "base", "zero_shot", tmp_path / "tuned")
    one = next(one for one in result["comparisons"] if one["metric"] == "bits_per_byte")
    assert one["n"] == 7
    assert one["difference"] < 0  # a flat model is less surprised than a lively one, which is better
    assert result["verdict"] == "improved"


def test_an_interrupted_task_continues(
    answered: Any, task_suite: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    from finetune.evaluation.harness import answers

    suite = task_suite("larger_choice")
    expected = answered(suite, folder="whole")
    monkeypatch.setattr(answers, "_DOCUMENTS_AT_ONCE", 2)
    asked: list[int] = []
    real = answers.HarnessModel.loglikelihood

    def dying(self: Any, requests: Any, **options: Any) -> Any:
        if len(asked) == 2:
            raise KeyboardInterrupt
        asked.append(len(requests))
        return real(self, requests, **options)

    monkeypatch.setattr(answers.HarnessModel, "loglikelihood", dying)
    with pytest.raises(KeyboardInterrupt):
        answered(suite, folder="cut")
    monkeypatch.setattr(answers.HarnessModel, "loglikelihood", real)
    counted: list[int] = []

    def counting(self: Any, requests: Any, **options: Any) -> Any:
        counted.append(len(requests))
        return real(self, requests, **options)

    monkeypatch.setattr(answers.HarnessModel, "loglikelihood", counting)
    found = answered(suite, folder="cut")
    assert sum(counted) == 2 * (7 - 4)
    assert [one["scores"] for one in found] == [one["scores"] for one in expected]
