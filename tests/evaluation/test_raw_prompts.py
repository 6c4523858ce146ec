"""Base models are asked without a chat template: the text itself, examples before it, BOS as the tokenizer has it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from finetune.errors import UserError
from finetune.evaluation.item_source import RawSection
from finetune.evaluation.items import Item
from finetune.evaluation.prompts import build_prompts
from finetune.evaluation.raw_prompts import answer_behind, encode_raw
from finetune.evaluation.records import read_records
from finetune.evaluation.run import evaluate_arm
from finetune.evaluation.suite import Suite, load_suite
from finetune.evaluation.suite_data import load_suite_data

SUITE = """\
suite: 1
name: base
prompt_format: raw
items: {jsonl: items.jsonl}
zero_shot: {system: Answer in one word.}
few_shot: {k: 2, seed: 3, jsonl: shown.jsonl}
decoding: {max_new_tokens: 8}
scorers: [normalised_match]
primary_metric: normalised_match
"""


@pytest.fixture
def base_suite(tmp_path: Path) -> Suite:
    folder = tmp_path / "base"
    folder.mkdir()
    for name, count in (("items", 4), ("shown", 3)):
        lines = [
            {"id": f"{name}{n}", "prompt": f"{name} {n}?\nAnswer:", "reference": f"r{n}"}
            for n in range(count)
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "base.yaml").write_text(SUITE)
    return load_suite(folder / "base.yaml")


@pytest.fixture
def plain_tokenizer(tiny_tokenizer: Any) -> Any:
    """Without a chat template, as base models come."""
    tiny_tokenizer.chat_template = None
    return tiny_tokenizer


def _texts(suite: Suite, tokenizer: Any, arm: Any) -> list[str]:
    data = load_suite_data(suite)
    prompts = build_prompts(suite, data.items, tokenizer, arm=arm, few_shot=data.few_shot_rows)
    return [prompt.text for prompt in prompts]


def test_every_arm_sees_the_text(base_suite: Suite, plain_tokenizer: Any) -> None:
    assert _texts(base_suite, plain_tokenizer, "tuned")[0] == "items 0?\nAnswer:"
    assert _texts(base_suite, plain_tokenizer, "zero_shot")[0] == "Answer in one word.\n\nitems 0?\nAnswer:"
    shown = _texts(base_suite, plain_tokenizer, "few_shot")[0].split("\n\n")
    assert (shown[0], shown[-1], len(shown)) == ("Answer in one word.", "items 0?\nAnswer:", 4)
    assert all(part in {f"shown {n}?\nAnswer: r{n}" for n in range(3)} for part in shown[1:3])


def test_answers_end_where_the_next_example_would_begin(base_suite: Suite) -> None:
    assert base_suite.decoding.stop == ["\n\n"]
    path = base_suite.path
    path.write_text(SUITE.replace("max_new_tokens: 8", "max_new_tokens: 8, stop: ['.']"))
    assert load_suite(path).decoding.stop == ["."]
    path.write_text(SUITE + "raw: {example_separator: '###'}\n")
    assert load_suite(path).decoding.stop == ["###"]


@pytest.mark.parametrize(
    ("prompt", "answer", "behind"),
    [("Q:", "a", " a"), ("Q: ", "a", "a"), ("Q:\n", "a", "a"), ("Q:", " a", " a"), ("", "a", " a")],
)
def test_a_space_stands_before_an_answer_unless_there_is_one(prompt: str, answer: str, behind: str) -> None:
    assert answer_behind(prompt, answer, RawSection()) == behind
    assert answer_behind("答案：", "巴黎", RawSection(answer_separator="")) == "巴黎"


def test_bos_is_added_where_the_tokenizer_adds_it(tiny_tokenizer: Any) -> None:
    from tokenizers.processors import TemplateProcessing

    plain = tiny_tokenizer("ab", add_special_tokens=False)["input_ids"]
    assert encode_raw("ab", tiny_tokenizer) == (plain, 0)
    tiny_tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A <|im_end|>", special_tokens=[("<|im_start|>", 1), ("<|im_end|>", 2)]
    )
    assert encode_raw("ab", tiny_tokenizer) == ([1, *plain], 1)
    assert encode_raw("<|im_start|>ab", tiny_tokenizer) == ([1, *plain], 0)


def test_a_conversation_cannot_be_written_without_a_template(base_suite: Suite, plain_tokenizer: Any) -> None:
    turns = ({"role": "system", "content": "s"}, {"role": "user", "content": "u"})
    with pytest.raises(UserError, match="item a is a conversation"):
        build_prompts(base_suite, [Item("a", turns, "r", "a")], plain_tokenizer, arm="tuned")


def test_a_model_without_a_template_answers(
    base_suite: Suite, lively_model: Any, plain_tokenizer: Any, tmp_path: Path
) -> None:
    data = load_suite_data(base_suite)
    summary = evaluate_arm(
        lively_model, plain_tokenizer, base_suite, data.items, arm="few_shot", few_shot=data.few_shot_rows,
        batch_size=2, out_folder=tmp_path / "out", key="k",
    )  # fmt: skip
    assert summary.n == 4
    records = read_records(tmp_path / "out", "few_shot")
    assert all(record["prompt"].startswith("Answer in one word.\n\nshown") for record in records)
    assert len({record["output"] for record in records}) > 1


def test_choices_are_measured_behind_a_space(
    base_suite: Suite, lively_model: Any, plain_tokenizer: Any, tmp_path: Path
) -> None:
    from finetune.evaluation.likelihood import Request, log_likelihoods

    text = SUITE.replace("normalised_match", "choice_accuracy").replace(
        "name: base", "name: base\ntask: choice"
    )
    base_suite.path.write_text(text)
    suite = load_suite(base_suite.path)
    item = Item("a", ({"role": "user", "content": "Q:"},), "yes", "a", check={"choices": ["yes", "no"]})
    evaluate_arm(
        lively_model, plain_tokenizer, suite, [item], arm="tuned", batch_size=1, out_folder=tmp_path, key="k"
    )
    measured = json.loads(read_records(tmp_path, "tuned")[0]["output"])
    ids = [plain_tokenizer(one, add_special_tokens=False)["input_ids"] for one in ("Q:", " yes", " no")]
    expected = list(log_likelihoods(lively_model, [Request(n, ids[0], ids[n + 1]) for n in range(2)]))
    by_index = {one.index: one.log_likelihood for one in expected}
    assert measured["log_likelihoods"] == pytest.approx([by_index[0], by_index[1]], rel=1e-5)
    assert measured["bytes"] == [3, 2]
