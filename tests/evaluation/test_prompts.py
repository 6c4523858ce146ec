"""The untuned arms are told and shown, never the item itself; the tuned arm sees what training showed."""

from __future__ import annotations

from typing import Any

import pytest

from finetune.data.rows import Row
from finetune.data.tokenise import prompt_ids, tokenise_row
from finetune.errors import UserError
from finetune.evaluation.context_window import refuse_too_long
from finetune.evaluation.items import Item, item_from_row, items_from_rows
from finetune.evaluation.prompts import arm_messages, build_prompts, few_shot_examples
from finetune.evaluation.suite import Suite


def _row(index: int, intent: str = "A", group: str | None = None) -> Row:
    messages = (
        {"role": "system", "content": "own system"},
        {"role": "user", "content": f"say {index}"},
        {"role": "assistant", "content": f'{{"intent":"{intent}","n":{index}}}'},
    )
    return Row(f"row-{index}", messages, group or f"g{index}", "made", {"intent": intent})


def test_the_tuned_arm_is_the_training_prefix(suite: Suite, tiny_tokenizer: Any) -> None:
    row = _row(1)
    prompt = build_prompts(suite, [item_from_row(row)], tiny_tokenizer, arm="tuned")[0]
    trained = tokenise_row(row, tiny_tokenizer)
    first_target = next(index for index, label in enumerate(trained.labels) if label != -100)
    assert prompt.ids == trained.input_ids[:first_target]
    assert prompt.text.endswith("say 1<|im_end|>\n<|im_start|>assistant\n")


def test_zero_shot_puts_the_suites_system_in_place_of_the_items(suite: Suite) -> None:
    messages = arm_messages(suite, item_from_row(_row(1)), "zero_shot")
    assert messages == [
        {"role": "system", "content": "Answer with JSON."},
        {"role": "user", "content": "say 1"},
    ]


def test_few_shot_shows_k_examples_of_different_intents_as_turns(suite: Suite, tiny_tokenizer: Any) -> None:
    rows = [_row(index, intent="AABBB"[index % 5]) for index in range(10)]
    item = item_from_row(_row(99))
    prompt = build_prompts(suite, [item], tiny_tokenizer, arm="few_shot", few_shot=rows)[0]
    assert prompt.text.count("<|im_start|>assistant") == 3
    assert prompt.text.count("Answer with JSON.") == 1
    assert "own system" not in prompt.text
    assert prompt.text.count('"intent":"A"') == prompt.text.count('"intent":"B"') == 1


def test_an_item_is_never_its_own_example_whatever_its_id(suite: Suite) -> None:
    rows = [_row(index) for index in range(12)]
    asked = [
        Item(f"other-{index}", tuple(rows[index].prompt), rows[index].answer, "c") for index in range(10)
    ]
    section = suite.few_shot
    assert section is not None
    shown = few_shot_examples(section, rows, asked)
    assert {item.id for item in shown} == {"row-10", "row-11"}
    with pytest.raises(UserError, match="2 few-shot examples are asked for, 1 rows can be shown"):
        few_shot_examples(section, rows[:11], asked)


def test_examples_depend_on_seed_and_content_not_on_the_order_of_rows(suite: Suite) -> None:
    rows = [_row(index, intent=f"I{index % 7}", group=f"g{index % 3}") for index in range(40)]
    section = suite.few_shot
    assert section is not None
    section = section.model_copy(update={"k": 9})
    shown = few_shot_examples(section, rows, [])
    assert [item.id for item in shown] == [item.id for item in few_shot_examples(section, rows[::-1], [])]
    other = few_shot_examples(section.model_copy(update={"seed": 4}), rows, [])
    assert [item.id for item in shown] != [item.id for item in other]
    assert len({item.id for item in shown}) == 9
    assert {item.tags["intent"] for item in shown} == {f"I{index}" for index in range(7)}


def test_a_missing_tag_to_spread_by_is_named(suite: Suite) -> None:
    rows = [Row("r", _row(1).messages, "g", "made", {}), _row(2)]
    with pytest.raises(UserError, match="row r has no tag 'intent'"):
        few_shot_examples(suite.few_shot, rows, [])


def test_prompts_longer_than_the_context_name_every_item(suite: Suite, tiny_tokenizer: Any) -> None:
    items = items_from_rows([_row(1), _row(2)])
    tokens = len(prompt_ids(items[0].messages, tiny_tokenizer)[0])
    prompts = build_prompts(suite, items, tiny_tokenizer, arm="tuned")
    refuse_too_long(suite, items, prompts, tokens + 12, "tuned", tiny_tokenizer)
    with pytest.raises(UserError) as caught:
        refuse_too_long(suite, items, prompts, tokens + 11, "tuned", tiny_tokenizer)
    assert [fault.where for fault in caught.value.faults] == [
        "suite tiny, arm tuned, item row-1",
        "suite tiny, arm tuned, item row-2",
    ]
    assert f"needs {tokens + 12} tokens; the context is {tokens + 11}" in str(caught.value)


@pytest.mark.parametrize("arm", ["zero_shot", "few_shot", "tuned"])
def test_every_arm_has_one_bos_where_template_and_tokenizer_both_add_one(
    suite: Suite, make_tiny_tokenizer: Any, arm: str
) -> None:
    from tokenizers import processors

    tokenizer = make_tiny_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    bos = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", bos)]
    )
    tokenizer.chat_template = "{{ bos_token }}" + tokenizer.chat_template
    assert tokenizer("x")["input_ids"][0] == bos
    rows = [_row(index, intent="AABBB"[index % 5]) for index in range(10)]
    prompt = build_prompts(suite, [item_from_row(_row(99))], tokenizer, arm=arm, few_shot=rows)[0]
    assert prompt.ids[0] == bos
    assert prompt.ids.count(bos) == 1
    tokenizer.chat_template = "{{ bos_token }}" + tokenizer.chat_template
    with pytest.raises(UserError, match="two BOS"):
        build_prompts(suite, [item_from_row(_row(99))], tokenizer, arm=arm, few_shot=rows)


@pytest.mark.parametrize(("task", "needed"), [("choice", 5 + 7), ("text", 1 + 7)])
def test_choices_and_texts_too_long_for_the_context_are_named(
    suite: Suite, tiny_tokenizer: Any, task: str, needed: int
) -> None:
    changed = suite.model_copy(update={"task": task, "prompt_format": "raw"})
    asked = ({"role": "user", "content": "why?\n"},)
    item = Item("a", asked, "because", "a", check={"choices": ["because", "no"]})
    prompts = build_prompts(changed, [item], tiny_tokenizer, arm="tuned")
    refuse_too_long(changed, [item], prompts, needed, "tuned", tiny_tokenizer)
    with pytest.raises(UserError, match=f"needs {needed} tokens; the context is {needed - 1}"):
        refuse_too_long(changed, [item], prompts, needed - 1, "tuned", tiny_tokenizer)
