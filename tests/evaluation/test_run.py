"""An arm is saved as it goes, continues after a kill, and is scored from what is saved."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from finetune.errors import UserError
from finetune.evaluation import answering as answering_module
from finetune.evaluation.generate import Completion, generate
from finetune.evaluation.items import Item
from finetune.evaluation.records import partial_path, read_records, read_summary, records_path
from finetune.evaluation.run import evaluate_arm, prepare_arm
from finetune.evaluation.suite import Suite, load_suite


@pytest.fixture
def evaluate(lively_model: Any, tiny_tokenizer: Any, suite: Suite, items: list[Item], tmp_path: Path) -> Any:
    def call(**changes: Any) -> Any:
        options: dict[str, Any] = {
            "arm": "zero_shot", "batch_size": 4, "out_folder": tmp_path / "out", "key": "weights-1"
        }  # fmt: skip
        options |= changes
        chosen = options.pop("suite", suite)
        asked = options.pop("items", items)
        return evaluate_arm(lively_model, tiny_tokenizer, chosen, asked, **options)

    return call


class _Calls:
    """Counts prompts given to the decoder; can die after some answers, as a kill would."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[int] = []
        self.die_after: int | None = None
        monkeypatch.setattr(answering_module, "generate", self._generate)

    def _generate(self, model: Any, prompts: Any, rule: Any, **options: Any) -> Iterator[Completion]:
        self.asked.append(len(prompts))
        for number, answer in enumerate(generate(model, prompts, rule, **options)):
            if number == self.die_after:
                raise KeyboardInterrupt
            yield answer


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> _Calls:
    return _Calls(monkeypatch)


def test_records_and_summary_are_complete(
    evaluate: Any, items: list[Item], tmp_path: Path, suite: Suite
) -> None:
    summary = evaluate()
    records = read_records(tmp_path / "out", "zero_shot")
    assert [record["item"] for record in records] == [item.id for item in items]
    assert set(records[0]) >= {
        "item", "arm", "cluster", "tags", "prompt", "reference", "output", "prompt_tokens", "output_tokens",
        "finish_reason", "latency_seconds", "scores",
    }  # fmt: skip
    assert set(records[0]["scores"]) == set(suite.metrics)
    assert records[0]["prompt"].startswith("<|im_start|>system\nAnswer with JSON.")
    assert summary == read_summary(tmp_path / "out", "zero_shot")
    assert summary.n == 10
    assert summary.output_tokens == sum(record["output_tokens"] for record in records)
    assert sum(summary.finish_reasons.values()) == 10
    assert set(summary.metrics["exact_match"]) >= {"mean", "low", "high", "n", "method"}
    assert "variance" not in summary.metrics["exact_match"]
    assert summary.metrics["exact_match"]["method"].startswith("clustered")
    assert not partial_path(tmp_path / "out", "zero_shot").exists()


def test_answers_do_not_depend_on_the_batch_size(evaluate: Any, tmp_path: Path) -> None:
    texts = set()
    for batch_size in (1, 2, 5, 32):
        evaluate(batch_size=batch_size, out_folder=tmp_path / str(batch_size))
        texts.add(tuple(record["output"] for record in read_records(tmp_path / str(batch_size), "zero_shot")))
    assert len(texts) == 1


def test_a_complete_arm_is_not_run_again(evaluate: Any, calls: _Calls) -> None:
    first = evaluate()
    assert evaluate() == first
    assert calls.asked == [10]


def test_a_killed_run_continues_where_it_was_and_gives_the_same_answers(
    evaluate: Any, calls: _Calls, tmp_path: Path
) -> None:
    evaluate(out_folder=tmp_path / "whole")
    calls.die_after = 6
    with pytest.raises(KeyboardInterrupt):
        evaluate()
    assert not records_path(tmp_path / "out", "zero_shot").exists()
    calls.die_after = None
    evaluate()
    assert calls.asked == [10, 10, 4]
    whole, continued = (read_records(tmp_path / name, "zero_shot") for name in ("whole", "out"))
    for record in whole + continued:
        record.pop("latency_seconds")
    assert continued == whole


def test_a_line_cut_by_the_kill_is_answered_again(evaluate: Any, calls: _Calls, tmp_path: Path) -> None:
    calls.die_after = 6
    with pytest.raises(KeyboardInterrupt):
        evaluate()
    path = partial_path(tmp_path / "out", "zero_shot")
    path.write_bytes(path.read_bytes()[:-20])
    calls.die_after = 2
    with pytest.raises(KeyboardInterrupt):
        evaluate()
    calls.die_after = None
    evaluate()
    assert calls.asked == [10, 5, 3]
    assert len(read_records(tmp_path / "out", "zero_shot")) == 10


@pytest.mark.parametrize("change", ["weights", "decoding", "prompt", "template", "tokenizer"])
def test_whatever_decides_the_answers_asks_for_all_of_them_again(
    evaluate: Any, calls: _Calls, suite: Suite, tiny_tokenizer: Any, change: str
) -> None:
    evaluate()
    if change == "weights":
        evaluate(key="weights-2")
    elif change == "template":  # another template, though it renders these conversations alike
        tiny_tokenizer.chat_template += "{# changed #}"
        evaluate()
    elif change == "tokenizer":  # other texts for some ids, though not for those of the prompts
        tiny_tokenizer.add_tokens(["never seen"])
        evaluate()
    else:
        old, new = (
            ("max_new_tokens: 12", "max_new_tokens: 11") if change == "decoding" else ("with JSON", "in JSON")
        )
        suite.path.write_text(suite.path.read_text().replace(old, new))
        evaluate(suite=load_suite(suite.path))
    assert calls.asked == [10, 10]


def test_only_items_that_are_new_or_changed_are_asked(
    evaluate: Any, calls: _Calls, items: list[Item], tmp_path: Path
) -> None:
    evaluate(items=items[:6])
    outputs = {record["item"]: record["output"] for record in read_records(tmp_path / "out", "zero_shot")}
    changed = [replace(items[0], messages=({"role": "user", "content": "another"},)), *items[1:]]
    summary = evaluate(items=changed)
    assert calls.asked == [6, 5]
    records = read_records(tmp_path / "out", "zero_shot")
    assert [record["item"] for record in records] == [item.id for item in items]
    assert all(record["output"] == outputs[record["item"]] for record in records[1:6])
    assert summary.n == 10


def test_a_changed_tag_or_reference_changes_the_record_without_an_answer(
    evaluate: Any, calls: _Calls, items: list[Item], tmp_path: Path
) -> None:
    before = evaluate()
    evaluate(items=[replace(items[0], tags={"intent": "other"}, reference="{}"), *items[1:]])
    assert calls.asked == [10]
    record = read_records(tmp_path / "out", "zero_shot")[0]
    assert (record["tags"], record["reference"]) == ({"intent": "other"}, "{}")
    assert read_summary(tmp_path / "out", "zero_shot").items_digest != before.items_digest


def test_answers_of_the_same_arm_in_other_folders_are_used(
    evaluate: Any,
    calls: _Calls,
    suite: Suite,
    items: list[Item],
    tmp_path: Path,
    lively_model: Any,
    tiny_tokenizer: Any,
) -> None:
    evaluate(items=items[:4], out_folder=tmp_path / "first")
    evaluate(items=items[3:7], out_folder=tmp_path / "second")
    job = prepare_arm(tiny_tokenizer, suite, items, arm="zero_shot", key="weights-1")
    folders = [tmp_path / "first", tmp_path / "second", tmp_path / "nothing"]
    job.evaluate(lively_model, tmp_path / "out", batch_size=4, reuse=folders)
    assert calls.asked == [4, 4, 3]
    assert len(read_records(tmp_path / "out", "zero_shot")) == 10


def test_another_scorer_needs_no_new_answers(evaluate: Any, calls: _Calls, suite: Suite) -> None:
    before = evaluate()
    suite.path.write_text(suite.path.read_text().replace("[exact_match, valid_json,", "[exact_match,"))
    after = evaluate(suite=load_suite(suite.path))
    assert calls.asked == [10]
    assert set(after.metrics) == set(before.metrics) - {"valid_json"}
    assert after.suite_digest != before.suite_digest


def test_an_empty_suite_is_an_error_before_any_work(evaluate: Any, calls: _Calls, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the suite has no items"):
        evaluate(items=[])
    assert calls.asked == []
    assert not (tmp_path / "out").exists()


def test_references_that_cannot_be_scored_are_found_before_any_work(
    evaluate: Any, calls: _Calls, items: list[Item]
) -> None:
    broken = [
        Item("bad-1", items[0].messages, "Paris", "c"),
        items[1],
        Item("bad-2", items[2].messages, "[]", "c"),
    ]
    with pytest.raises(UserError) as caught:
        evaluate(items=broken)
    assert [fault.where for fault in caught.value.faults] == [
        "suite tiny, item bad-1",
        "suite tiny, item bad-2",
    ]
    assert calls.asked == []


def test_an_item_longer_than_the_context_is_named(evaluate: Any, items: list[Item]) -> None:
    long = Item("long", ({"role": "user", "content": "x" * 600},), "{}", "c")
    with pytest.raises(UserError, match="item long"):
        evaluate(items=[*items, long])


def test_a_turn_terminator_that_is_not_eos_ends_an_answer(
    lively_model: Any, tiny_tokenizer: Any, suite: Suite, items: list[Item], tmp_path: Path
) -> None:
    """The template ends turns with '<|end|>' while eos_token is another one."""
    tiny_tokenizer.add_special_tokens({"additional_special_tokens": ["<|end|>"]})
    lively_model.resize_token_embeddings(260, mean_resizing=False)
    tiny_tokenizer.chat_template = tiny_tokenizer.chat_template.replace("<|im_end|>", "<|end|>")
    end = tiny_tokenizer.convert_tokens_to_ids("<|end|>")
    with torch.no_grad():  # likely, but not always first
        lively_model.lm_head.weight[end] = 3 * lively_model.lm_head.weight[100]
    summary = evaluate_arm(
        lively_model, tiny_tokenizer, suite, items, arm="tuned", batch_size=4, out_folder=tmp_path, key="k"
    )
    assert summary.finish_reasons.get("stop", 0) > 0
    stopped = [r for r in read_records(tmp_path, "tuned") if r["finish_reason"] == "stop"]
    assert all("<|end|>" not in record["output"] for record in stopped)


def test_the_files_are_plain_json(evaluate: Any, tmp_path: Path) -> None:
    evaluate()
    for line in records_path(tmp_path / "out", "zero_shot").read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} in a record"))
