"""Each thing that a chat template can break is found by itself, also where several are broken at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from finetune.data.rows import Row
from finetune.data.template_breaches import answers_have_an_end, breaches_of

CONTENT, END = "{{ message['content'] }}", "{{ message['content'] }}<|im_end|>"
FIRST = "{% for message in messages %}"
PROMPT = "<|im_start|>assistant\n{% endif %}"

Make = Callable[..., Any]


def spoilt(make: Make, *changes: tuple[str, str]) -> Any:
    tokenizer = make()
    template = tokenizer.chat_template
    for old, new in changes:
        assert old in template
        template = template.replace(old, new)
    tokenizer.chat_template = template
    return tokenizer


def chat(*turns: str, kind: str = "chat") -> Row:
    roles = ("user", "assistant")
    messages = tuple({"role": roles[n % 2], "content": text} for n, text in enumerate(turns))
    return Row("r", messages, "g", "rows.jsonl", kind=kind)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ((), set()),
        (((FIRST, "{{ bos_token }}" + FIRST),), {"bos"}),
        (((PROMPT, "<|im_start|>assistant: \n{% endif %}"),), {"prompt"}),
        (((CONTENT, "{{ message['content'] | upper }}"),), {"answer"}),
        (
            (
                (FIRST, "{{ bos_token }}" + FIRST),
                (PROMPT, "<|im_start|>bot\n{% endif %}"),
                (CONTENT, "{{ message['content'] | upper }}"),
            ),
            {"bos", "prompt", "answer"},
        ),
        (((FIRST, "{{ raise_exception('no such turns') }}" + FIRST),), {"row"}),
    ],
)
def test_every_breach_is_found_and_no_other(
    make_tiny_tokenizer: Make, changes: tuple[tuple[str, str], ...], found: set[str]
) -> None:
    tokenizer = spoilt(make_tiny_tokenizer, *changes)
    assert set(breaches_of(chat("is it?", "it is"), tokenizer)) == found
    assert set(breaches_of(chat("is it?", "it is", kind="kto"), tokenizer)) == found


def test_the_remedy_is_one_that_helps(make_tiny_tokenizer: Make) -> None:
    """Learning earlier answers by themselves mends a template that strips them, and not one whose prompt is another."""
    strips = "{% if loop.last or message['role'] != 'assistant' %}" + CONTENT + "{% else %}-{% endif %}"
    stripped = spoilt(make_tiny_tokenizer, (CONTENT, strips))
    row = chat("a", "first", "b", "second")
    assert set(breaches_of(row, stripped)) == {"answer"}
    assert set(breaches_of(row, stripped, train_on="last")) == set()
    assert set(breaches_of(row, stripped, train_on="each")) == set()
    other = spoilt(make_tiny_tokenizer, (PROMPT, "<|im_start|>bot\n{% endif %}"))
    (fault,) = breaches_of(chat("a", "b"), other).values()
    assert "generation prompt" in fault.fix and "train_on" not in fault.fix
    assert set(breaches_of(row, other, train_on="each")) == {"prompt"}


def test_both_answers_of_a_pair_are_looked_at(make_tiny_tokenizer: Make) -> None:
    tokenizer = spoilt(make_tiny_tokenizer, (CONTENT, "{{ message['content'] | replace('bad', '') }}"))
    asked, good, bad = ({"role": role, "content": text} for role, text in (("user", "?"), ("assistant", "good"), ("assistant", "bad")))  # fmt: skip
    pair = Row("p", (asked,), "g", "s", kind="preference", chosen=(good,), rejected=(bad,))
    assert set(breaches_of(pair, tokenizer)) == {"answer"}
    assert breaches_of(Row("t", (), "g", "s", kind="text", text="words"), tokenizer) == {}


def test_whether_answers_end_is_told_of_rewritten_ones_too(make_tiny_tokenizer: Make) -> None:
    assert answers_have_an_end(make_tiny_tokenizer())
    upper = "{{ message['content'] | upper }}"
    assert answers_have_an_end(spoilt(make_tiny_tokenizer, (CONTENT, upper)))
    assert not answers_have_an_end(spoilt(make_tiny_tokenizer, (END, CONTENT)))
    assert not answers_have_an_end(spoilt(make_tiny_tokenizer, (END, upper)))
