"""Chat templates of the families that users tune: what is learnt, what the model is given, what is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from finetune.data.rows import Row
from finetune.data.tokenise import generation_stop_ids, prompt_ids, tokenise_row, tokenise_rows
from finetune.errors import UserError

WithTemplate = Callable[..., Any]


@dataclass(frozen=True)
class Family:
    """A template with its special tokens; `said` is how an answer "one" is learnt, header and closing included."""

    template: str
    extra: tuple[str, ...]
    special: dict[str, str]
    said: str
    stop: tuple[str, ...]


CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{% for m in messages %}{% set content = '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim "
    "+ '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"
)
GENERATION = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "<|im_end|>{% endgeneration %}\n{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Reasoning of turns before the last question is left out; later ones keep it, empty when there is none.
QWEN3 = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}{% if m.role == 'assistant' %}{% set reasoning = m.reasoning_content or '' %}"
    "{% if loop.index0 > ns.last and (loop.last or reasoning) %}{{ '<|im_start|>assistant\n<think>\n' + reasoning + "
    "'\n</think>\n\n' + m.content }}{% else %}{{ '<|im_start|>assistant\n' + m.content }}{% endif %}{{ '<|im_end|>\n' }}"
    "{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

FAMILIES = {
    "chatml": Family(CHATML, (), {}, "one<|im_end|>", ("<|im_end|>",)),
    "llama3": Family(
        LLAMA3,
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|end_of_text|>"),
        {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"},
        "one<|eot_id|>",
        ("<|end_of_text|>", "<|eot_id|>"),
    ),
    "mistral": Family(MISTRAL, ("<s>", "</s>"), {"bos_token": "<s>", "eos_token": "</s>"}, " one</s>", ("</s>",)),
    "generation": Family(GENERATION, (), {}, "one<|im_end|>", ("<|im_end|>",)),
}  # fmt: skip


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest, with_template: WithTemplate) -> tuple[Family, Any]:
    found = FAMILIES[request.param]
    return found, with_template(found.template, found.extra, **found.special)


def row_of(*contents: str, **marks: Any) -> Row:
    turns = [{"role": "assistant" if n % 2 else "user", "content": c} for n, c in enumerate(contents)]
    turns[1] = {**turns[1], **marks}
    return Row("r1", tuple(turns), "g", "rows.jsonl:7")


def spans_of(row: Row, tokenizer: Any, **options: Any) -> list[str]:
    done = tokenise_row(row, tokenizer, **options)
    return [tokenizer.decode(done.input_ids[first:past]) for first, past in done.spans()]


def test_every_answer_and_its_end_are_learnt_and_nothing_else(family: tuple[Family, Any]) -> None:
    found, tokenizer = family
    row = row_of("first question", "one", "second question", "one", "third", "one")
    assert spans_of(row, tokenizer) == [found.said] * 3
    assert spans_of(row, tokenizer, train_on="last") == [found.said]


def test_the_ids_are_those_of_the_template_and_of_the_prompt_in_use(family: tuple[Family, Any]) -> None:
    _, tokenizer = family
    row = row_of("q", "one", "more", "two")
    done = tokenise_row(row, tokenizer)
    whole = tokenizer.apply_chat_template(list(row.messages), return_dict=True)["input_ids"]
    assert done.input_ids == whole
    for (first, _), turn in zip(done.spans(), (1, 3), strict=True):
        assert prompt_ids(row.messages[:turn], tokenizer)[0] == done.input_ids[:first]


def test_one_bos_at_most(family: tuple[Family, Any]) -> None:
    found, tokenizer = family
    bos = found.special.get("bos_token")
    if bos is not None:
        ids = tokenise_row(row_of("q", "one"), tokenizer).input_ids
        assert ids.count(tokenizer.convert_tokens_to_ids(bos)) == 1


def test_generation_stops_where_training_learns_to(family: tuple[Family, Any]) -> None:
    found, tokenizer = family
    assert generation_stop_ids(tokenizer) == sorted(tokenizer.convert_tokens_to_ids(list(found.stop)))


def test_turns_marked_are_read_and_not_learnt(family: tuple[Family, Any]) -> None:
    found, tokenizer = family
    for mark in ({"train": False}, {"weight": 0}):
        row = row_of("q", "bad", "again", "one", **mark)
        assert spans_of(row, tokenizer) == [found.said]
        assert "bad" in tokenizer.decode(tokenise_row(row, tokenizer).input_ids)


def test_long_conversations_are_shortened_or_split_with_whole_answers(family: tuple[Family, Any]) -> None:
    found, tokenizer = family
    row = row_of(*(part for n in range(6) for part in (f"question {n} " + "x" * 20, "one")))
    whole = len(tokenise_row(row, tokenizer).input_ids)
    for policy in ("truncate_prompt", "split"):
        split = tokenise_rows([row], tokenizer, max_tokens=whole // 2, long_rows=policy)  # type: ignore[arg-type]
        spans = [tokenizer.decode(part.input_ids[a:b]) for part in split.rows for a, b in part.spans()]
        assert set(spans) == {found.said}
        assert len(spans) == 6 if policy == "split" else 1 <= len(spans) < 6


def test_a_template_without_generation_prompt_is_refused_only_where_answers_have_a_header(
    with_template: WithTemplate,
) -> None:
    headed = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    with pytest.raises(UserError, match="no generation prompt"):
        tokenise_row(row_of("q", "a"), with_template(headed))


def test_reasoning_of_the_last_answer_is_learnt_and_rewritten_history_refused_by_name(
    with_template: WithTemplate,
) -> None:
    tokenizer = with_template(QWEN3, ("<think>", "</think>"))
    row = row_of("q", "seven", reasoning_content="one plus six")
    assert spans_of(row, tokenizer) == ["<think>\none plus six\n</think>\n\nseven<|im_end|>"]
    two = row_of("q", "seven", "more", "eight", reasoning_content="one plus six")
    with pytest.raises(
        UserError, match=r"row r1 \(rows\.jsonl:7\), turn 1: the chat template rewrites history"
    ) as caught:
        tokenise_row(two, tokenizer)
    assert "data.train_on to each" in str(caught.value)
    assert spans_of(two, tokenizer, train_on="last") == ["<think>\n\n</think>\n\neight<|im_end|>"]
    each = tokenise_rows([two], tokenizer, max_tokens=500, train_on="each")
    assert [part.row_id for part in each.rows] == ["r1#0", "r1#1"]
    assert [tokenizer.decode(part.input_ids[a:b]) for part in each.rows for a, b in part.spans()] == [
        "<think>\none plus six\n</think>\n\nseven<|im_end|>",
        "<think>\n\n</think>\n\neight<|im_end|>",
    ]
    assert (each.counts["read"], each.counts["kept"]) == (2, 2)


def test_each_answer_in_a_row_of_its_own_leaves_out_those_not_trained(family: tuple[Family, Any]) -> None:
    found, tokenizer = family
    rows = [row_of("q", "bad", "again", "one", "more", "one", train=False), row_of("q", "one")]
    each = tokenise_rows(rows, tokenizer, max_tokens=500, train_on="each")
    assert [tokenizer.decode(part.input_ids[a:b]) for part in each.rows for a, b in part.spans()] == [
        found.said
    ] * 3
    for part, (row, turns) in zip(each.rows, [(0, 3), (0, 5), (1, 1)], strict=True):
        prompt, _ = prompt_ids(rows[row].messages[:turns], tokenizer)
        assert part.input_ids[: part.spans()[0][0]] == prompt
