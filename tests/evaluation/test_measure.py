"""Choices and whole texts: likelihoods saved like answers, token-weighted, and fair between tokenizers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from finetune.errors import UserError
from finetune.evaluation.compare import compare_folders, compare_records
from finetune.evaluation.gate import describe_difference
from finetune.evaluation.items import Item
from finetune.evaluation.records import read_records
from finetune.evaluation.run import evaluate_arm
from finetune.evaluation.scorers.measured import (
    bits_per_byte,
    choice_accuracy,
    choice_accuracy_per_byte,
    choice_accuracy_per_token,
    kl_per_token,
    nll_per_token,
)
from finetune.evaluation.screen import describe_means
from finetune.evaluation.suite import Suite, load_suite

TEXTS = ["short", "a somewhat longer text of many words", "ünïcödé", "x" * 90, "and one more"]


def _suite(tmp_path: Path, task: str, scorers: str) -> Suite:
    (tmp_path / "items.jsonl").write_text(
        '{"id":"a","messages":[{"role":"user","content":"q"}],"reference":"x"}\n'
    )
    path = tmp_path / f"{task}.yaml"
    primary = scorers.split(",")[0]
    path.write_text(
        f"suite: 1\nname: {task}\ntask: {task}\nrole: forgetting\nitems: {{jsonl: items.jsonl}}\n"
        f"scorers: [{scorers}]\nprimary_metric: {primary}\nmargin: 0.05\n"
    )
    return load_suite(path)


def _texts(copies: int = 1) -> list[Item]:
    texts = [f"{text}{' ' * copy}" for copy in range(copies) for text in TEXTS]
    return [Item(f"text-{index}", (), text, f"text-{index}") for index, text in enumerate(texts)]


def _choices(n: int = 6) -> list[Item]:
    return [
        Item(
            f"q-{index}",
            ({"role": "user", "content": f"question {index}"},),
            "two words",
            f"q-{index}",
            check={"choices": ["a", "two words", "something rather longer"]},
        )
        for index in range(n)
    ]


def _tuned(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    tuned = get_peft_model(model, LoraConfig(r=4, lora_alpha=16, target_modules="all-linear")).eval()
    with torch.no_grad():
        for name, parameter in tuned.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.2)
    return tuned


def test_the_mean_over_texts_is_total_over_total(
    lively_model: Any, tiny_tokenizer: Any, tmp_path: Path
) -> None:
    suite = _suite(tmp_path, "text", "nll_per_token, bits_per_byte")
    summary = evaluate_arm(
        lively_model,
        tiny_tokenizer,
        suite,
        _texts(),
        arm="zero_shot",
        batch_size=2,
        out_folder=tmp_path,
        key="k",
    )
    total, tokens = 0.0, 0
    for text in TEXTS:
        ids = torch.tensor([[1, *tiny_tokenizer(text)["input_ids"]]])
        with torch.no_grad():
            loss = lively_model(input_ids=ids, labels=ids).loss
        total += float(loss) * (ids.shape[1] - 1)
        tokens += ids.shape[1] - 1
    n_bytes = sum(len(text.encode()) for text in TEXTS)
    assert summary.metrics["nll_per_token"]["mean"] == pytest.approx(total / tokens, rel=1e-5)
    assert summary.metrics["bits_per_byte"]["mean"] == pytest.approx(total / math.log(2) / n_bytes, rel=1e-5)
    assert summary.metrics["nll_per_token"]["perplexity"] == pytest.approx(math.exp(total / tokens), rel=1e-4)
    assert summary.output_tokens == tokens


def test_a_choice_is_the_likeliest_answer_behind_its_prompt(
    lively_model: Any, tiny_tokenizer: Any, tmp_path: Path
) -> None:
    suite = _suite(tmp_path, "choice", "choice_accuracy, choice_accuracy_per_token, choice_accuracy_per_byte")
    evaluate_arm(
        lively_model,
        tiny_tokenizer,
        suite,
        _choices(),
        arm="tuned",
        batch_size=2,
        out_folder=tmp_path,
        key="k",
    )
    record = read_records(tmp_path, "tuned")[2]
    measured = json.loads(record["output"])
    prompt = tiny_tokenizer(record["prompt"])["input_ids"]
    for choice, value in zip(measured["choices"], measured["log_likelihoods"], strict=True):
        own = tiny_tokenizer(choice)["input_ids"]
        with torch.no_grad():
            logs = lively_model(input_ids=torch.tensor([prompt + own])).logits[0].log_softmax(-1)
        expected = sum(float(logs[len(prompt) - 1 + place, token]) for place, token in enumerate(own))
        assert value == pytest.approx(expected, rel=1e-4)


def test_length_normalisation_changes_which_choice_wins() -> None:
    measured = {"choices": ["a", "b"], "log_likelihoods": [-2.0, -3.0], "tokens": [1, 2], "bytes": [1, 1]}
    output = json.dumps(measured)
    assert (choice_accuracy(output, "a"), choice_accuracy(output, "b")) == (1.0, 0.0)
    assert (choice_accuracy_per_token(output, "a"), choice_accuracy_per_token(output, "b")) == (0.0, 1.0)
    assert choice_accuracy_per_byte(output, "a") == 1.0


@pytest.mark.parametrize(
    ("check", "reference", "message"),
    [
        (None, "x", "at least two different"),
        ({"choices": ["x"]}, "x", "at least two different"),
        ({"choices": ["x", "x"]}, "x", "at least two different"),
        ({"choices": ["x", ""]}, "x", "not empty"),
        ({"choices": ["x", 3]}, "x", "not empty"),
        ({"choices": ["x", "y"]}, "z", "none of check.choices"),
        ({"choices": "xy"}, "x", "must be a list"),
        ({"choices": None}, "x", "must be a list"),
    ],
)
def test_bad_choices_are_reported_per_item_before_the_run(
    tiny_tokenizer: Any, tmp_path: Path, check: Any, reference: str, message: str
) -> None:
    suite = _suite(tmp_path, "choice", "choice_accuracy")
    bad = Item("bad", ({"role": "user", "content": "q"},), reference, "bad", check=check)
    with pytest.raises(UserError, match=message) as caught:
        evaluate_arm(
            None,
            tiny_tokenizer,
            suite,
            [*_choices(), bad],
            arm="tuned",
            batch_size=2,
            out_folder=tmp_path,
            key="k",
        )
    assert [fault.where for fault in caught.value.faults] == ["suite choice, item bad"]


def test_forgetting_is_seen_as_kl_and_as_loss(lively_model: Any, tiny_tokenizer: Any, tmp_path: Path) -> None:
    suite = _suite(tmp_path, "text", "kl_per_token, nll_per_token")
    options: dict[str, Any] = {"batch_size": 2, "out_folder": tmp_path}
    base = evaluate_arm(
        lively_model, tiny_tokenizer, suite, _texts(8), arm="zero_shot", key="base", **options
    )
    assert base.metrics["kl_per_token"]["mean"] == 0.0
    tuned = evaluate_arm(
        _tuned(lively_model), tiny_tokenizer, suite, _texts(8), arm="tuned", key="tuned", **options
    )
    assert tuned.metrics["kl_per_token"]["mean"] > 0.05
    result = compare_folders(suite, tmp_path, "zero_shot", tmp_path)
    kl = result["comparisons"][0]
    assert kl["higher_is_better"] is False
    assert kl["difference"] == pytest.approx(tuned.metrics["kl_per_token"]["mean"])
    assert " points" not in describe_difference(kl) and describe_means(kl).startswith(
        "0 → "
    )  # nats, no share
    assert kl["low"] <= kl["difference"] <= kl["high"]
    assert result["verdict"] == "regressed"


def test_a_lower_loss_is_an_improvement(tmp_path: Path) -> None:
    suite = _suite(tmp_path, "text", "nll_per_token")
    before = [
        {"item": f"i{n}", "arm": "zero_shot", "cluster": f"i{n}", "output_tokens": 5, "scores": {"nll_per_token": 2.0 + n / 50}}
        for n in range(40)
    ]  # fmt: skip
    after = [
        {
            **one,
            "arm": "tuned",
            "scores": {"nll_per_token": one["scores"]["nll_per_token"] - 0.5 - n % 3 / 10},
        }
        for n, one in enumerate(before)
    ]
    result = compare_records(suite, before, after)
    one = result["comparisons"][0]
    assert result["verdict"] == "improved"
    assert one["difference"] == pytest.approx(-0.5975)
    assert one["low"] < -0.5975 < one["high"] < 0
    assert one["mean_a"] == pytest.approx(2.39)


def test_arms_with_other_tokenizers_are_compared_in_bits_per_byte_only(tmp_path: Path) -> None:
    suite = _suite(tmp_path, "text", "bits_per_byte, nll_per_token")
    before = [
        {"item": f"i{n}", "arm": "zero_shot", "cluster": f"i{n}", "output_tokens": 5,
         "scores": {"bits_per_byte": 1.0 + n, "nll_per_token": 2.0}}
        for n in range(40)
    ]  # fmt: skip
    after = [{**one, "arm": "tuned", "output_tokens": 4} for one in before]
    assert compare_records(suite, before, after, metrics=["bits_per_byte"])["comparisons"][0]["n"] == 40
    with pytest.raises(UserError, match="use different tokenizers"):
        compare_records(suite, before, after)


def test_kl_without_adapter_needs_the_base(lively_model: Any, tiny_tokenizer: Any, tmp_path: Path) -> None:
    suite = _suite(tmp_path, "text", "kl_per_token")
    options: dict[str, Any] = {"arm": "tuned", "batch_size": 2, "out_folder": tmp_path, "key": "k"}
    with pytest.raises(UserError, match="KL to the base needs the base"):
        evaluate_arm(lively_model, tiny_tokenizer, suite, _texts(), **options)
    summary = evaluate_arm(lively_model, tiny_tokenizer, suite, _texts(), base_model=lively_model, **options)
    assert summary.metrics["kl_per_token"]["mean"] == 0.0


def test_scorers_must_fit_the_suites_task(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="'exact_match' scores suites with task: generate, not text"):
        _suite(tmp_path, "text", "exact_match")


def test_measured_scores_by_hand() -> None:
    output = json.dumps(
        {"log_likelihood": -6.0, "tokens": 3, "bytes": 8, "mean_tokens": 2.0, "mean_bytes": 4.0, "kl": 1.0}
    )
    assert nll_per_token(output, "") == 3.0
    assert bits_per_byte(output, "") == pytest.approx(1.5 / math.log(2))
    assert kl_per_token(output, "") == 0.5


@pytest.mark.parametrize(
    ("clusters", "message"), [(["c"], "has one text"), (["c", "c"], "share one cluster")]
)
def test_a_likelihood_of_one_unit_is_refused_before_it_is_measured(
    tiny_tokenizer: Any, tmp_path: Path, clusters: list[str], message: str
) -> None:
    suite = _suite(tmp_path, "text", "nll_per_token")
    items = [Item(f"t{n}", (), f"text {n}", cluster) for n, cluster in enumerate(clusters)]
    with pytest.raises(UserError, match=message):
        evaluate_arm(
            None, tiny_tokenizer, suite, items, arm="tuned", batch_size=2, out_folder=tmp_path, key="k"
        )
