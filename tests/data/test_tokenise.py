"""What is learnt is the answers and their end-of-turn tokens, whatever the chat template looks like; or it is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from finetune.data.rows import Row
from finetune.data.tokenise import (
    IGNORED,
    TokenisedRow,
    generation_stop_ids,
    prompt_ids,
    tokenise_row,
    tokenise_rows,
)
from finetune.errors import UserError

WithTemplate = Callable[..., Any]

HEADER = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
# Like Phi-3's: its own end-of-turn token, and EOS only at the very end of a conversation.
PHI = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
)
PHI_TOKENS = ("<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<eos>")
# Like Llama 2's: BOS before each exchange, the answer between spaces, EOS as the end of turn.
LLAMA2 = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token }}[INST] {{ m.content }} [/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content }} {{ eos_token }}{% endif %}{% endfor %}"
)
# Like Gemma's: BOS, its own role name, trimmed content, no system turn.
GEMMA = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "<turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}</turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<turn>model\n{% endif %}"
)
# Like reasoning models': an empty think block before the last answer, none before the earlier ones.
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}" + HEADER
)
STRIPPING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content.split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
    + HEADER
)


def generation_template(before_end: str = "", after_end: str = "<|im_end|>\n") -> str:
    return (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
        "{% generation %}{{ m.content }}" + before_end + "{% endgeneration %}" + after_end + "{% else %}"
        "{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}" + HEADER
    )


def row_of(*contents: str, system: str | None = None, **marks: Any) -> Row:
    """Alternating user and assistant turns; `marks` go on the first answer."""
    turns: list[dict[str, Any]] = [{"role": "system", "content": system}] if system is not None else []
    for number, content in enumerate(contents):
        turns.append({"role": "assistant" if number % 2 else "user", "content": content})
    if marks:
        next(turn for turn in turns if turn["role"] == "assistant").update(marks)
    return Row(id="r1", messages=tuple(turns), group="g", source="rows.jsonl:7")


def spans_of(done: TokenisedRow, tokenizer: Any) -> list[str]:
    return [tokenizer.decode(done.input_ids[first:last]) for first, last in done.spans()]


def check_account(done: TokenisedRow) -> None:
    assert len(done.input_ids) == len(done.labels)
    assert done.n_targets == sum(label != IGNORED for label in done.labels)
    assert all(label in (IGNORED, token) for token, label in zip(done.input_ids, done.labels, strict=True))
    assert done.labels[0] == IGNORED


@pytest.mark.parametrize("system", [None, "", "Be brief."])
@pytest.mark.parametrize("answers", [["seven"], ["one", "two\nlines "], ["a", "b", "c", " d"]])
def test_spans_decode_to_exactly_the_answers_and_their_end_of_turn(
    tiny_tokenizer: Any, answers: list[str], system: str | None
) -> None:
    """One and several turns; pad == EOS == end of turn; the default system turn is masked."""
    contents = [part for number, answer in enumerate(answers) for part in (f"question {number}", answer)]
    done = tokenise_row(row_of(*contents, system=system), tiny_tokenizer)
    check_account(done)
    assert spans_of(done, tiny_tokenizer) == [f"{answer}<|im_end|>" for answer in answers]
    whole = tiny_tokenizer.apply_chat_template(
        list(row_of(*contents, system=system).messages), return_dict=True
    )
    assert done.input_ids == whole["input_ids"]


def test_the_prompt_is_measured_in_tokens_not_in_dictionary_keys(tiny_tokenizer: Any) -> None:
    """CM01: a template call that returns a dict has length 2; the prompt has as many tokens as it has."""
    row = row_of("one plus six?", "seven")
    ids, text = prompt_ids(row.messages[:1], tiny_tokenizer)
    given_ids = tiny_tokenizer.apply_chat_template(
        list(row.messages[:1]), add_generation_prompt=True, return_dict=True
    )["input_ids"]
    assert ids == given_ids
    assert tiny_tokenizer.decode(ids) == text
    done = tokenise_row(row, tiny_tokenizer)
    assert done.input_ids[: len(ids)] == ids
    assert done.labels[: len(ids)] == [IGNORED] * len(ids)
    assert done.labels[len(ids)] != IGNORED


def test_every_turn_is_asked_as_it_will_be_when_the_model_is_used(tiny_tokenizer: Any) -> None:
    row = row_of("q1", "a1", "q2", "a2", "q3", "a3")
    done = tokenise_row(row, tiny_tokenizer)
    for (first, _), index in zip(done.spans(), (1, 3, 5), strict=True):
        assert prompt_ids(row.messages[:index], tiny_tokenizer)[0] == done.input_ids[:first]


@pytest.mark.parametrize(
    ("before_end", "after_end"), [("", "<|im_end|>\n"), ("<|im_end|>", "\n"), ("<|im_end|>\n", "")]
)
@pytest.mark.parametrize("answers", [["seven"], [" lead", "\n\n", "last"]])
def test_generation_blocks_are_followed_and_completed(
    with_template: WithTemplate, before_end: str, after_end: str, answers: list[str]
) -> None:
    """CM02, with the block: the answer and its end-of-turn token, whether the block holds the latter or not."""
    tokenizer = with_template(generation_template(before_end, after_end))
    contents = [part for answer in answers for part in ("q", answer)]
    done = tokenise_row(row_of(*contents), tokenizer)
    check_account(done)
    assert spans_of(done, tokenizer) == [f"{answer}<|im_end|>" for answer in answers]


def test_without_generation_block_the_mask_is_neither_empty_nor_full(tiny_tokenizer: Any) -> None:
    """CM02, without the block."""
    done = tokenise_row(row_of("q", "seven"), tiny_tokenizer)
    assert 0 < done.n_targets < len(done.input_ids)
    assert spans_of(done, tiny_tokenizer) == ["seven<|im_end|>"]


@pytest.mark.parametrize(
    "block", ["{% generation %}{% endgeneration %}", "{% generation %}x{% endgeneration %}"]
)
def test_a_generation_block_that_marks_something_else_is_refused(
    with_template: WithTemplate, block: str
) -> None:
    template = (
        block
        + "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        + HEADER
    )
    with pytest.raises(UserError, match="generation block"):
        tokenise_row(row_of("q", "a"), with_template(template))
    everything = "{% generation %}" + template.removeprefix(block) + "{% endgeneration %}"
    with pytest.raises(UserError, match="generation block"):
        tokenise_row(row_of("q", "a"), with_template(everything))


def test_an_end_of_turn_that_is_not_eos_is_learnt_and_stops_generation(with_template: WithTemplate) -> None:
    """CM03: '<|end|>' of both answers is a target, that of the questions is not, and generation stops at it."""
    tokenizer = with_template(PHI, PHI_TOKENS, eos_token="<eos>", pad_token="<eos>")
    end, eos = tokenizer.convert_tokens_to_ids(["<|end|>", "<eos>"])
    done = tokenise_row(row_of("q1", "a1", "q2", "a2"), tokenizer)
    check_account(done)
    assert spans_of(done, tokenizer) == ["a1<|end|>", "a2<|end|>"]
    assert done.labels.count(end) == 2
    assert done.input_ids.count(end) == 4
    assert generation_stop_ids(tokenizer) == sorted([end, eos])


def test_pad_equal_to_end_of_turn_hides_nothing(tiny_tokenizer: Any) -> None:
    """SP01 and CM05: two rows of unequal length each learn one real end-of-turn token; no row is lost."""
    assert tiny_tokenizer.pad_token_id == tiny_tokenizer.eos_token_id == 2
    rows = [row_of("q", "short"), row_of("a longer question", "and a longer answer")]
    split = tokenise_rows(rows, tiny_tokenizer, max_tokens=300)
    assert [row.labels.count(2) for row in split.rows] == [1, 1]
    assert split.counts["kept"] == 2
    assert generation_stop_ids(tiny_tokenizer) == [2]


def test_one_bos_and_the_same_prompt_as_when_used(with_template: WithTemplate) -> None:
    """CM08: the template writes BOS; the tokenizer would add another one."""
    tokenizer = with_template(GEMMA, ("<bos>", "<turn>", "</turn>"), bos_token="<bos>", eos_token="</turn>")
    from tokenizers.processors import TemplateProcessing

    bos = tokenizer.convert_tokens_to_ids("<bos>")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", bos)]
    )
    assert tokenizer("x")["input_ids"][0] == bos  # it would add one
    row = row_of("q", " seven ")
    done = tokenise_row(row, tokenizer)
    assert done.input_ids.count(bos) == 1
    assert done.input_ids[0] == bos
    assert done.input_ids == tokenizer.apply_chat_template(list(row.messages), return_dict=True)["input_ids"]
    ids, _ = prompt_ids(row.messages[:1], tokenizer)
    assert ids == done.input_ids[: len(ids)]
    assert spans_of(done, tokenizer) == ["seven</turn>"]


def test_a_text_that_was_rendered_before_keeps_one_bos_and_one_eos(with_template: WithTemplate) -> None:
    """CM08, from a text column: the tokenizer adds what the rendering holds already."""
    from tokenizers.processors import TemplateProcessing

    tokenizer = with_template(GEMMA, ("<bos>", "<turn>", "</turn>"), bos_token="<bos>", eos_token="</turn>")
    bos, eos = tokenizer.convert_tokens_to_ids(["<bos>", "</turn>"])
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A </turn>", special_tokens=[("<bos>", bos), ("</turn>", eos)]
    )
    messages = list(row_of("q", "seven").messages)
    rendered = tokenizer.apply_chat_template(messages, tokenize=False).removesuffix("\n")
    wanted = tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"]
    done = tokenise_row(Row("r", (), "g", "s", kind="text", text=rendered), tokenizer)
    assert done.input_ids == wanted[: len(done.input_ids)]
    assert (done.input_ids.count(bos), done.input_ids[0], done.input_ids[-1]) == (1, bos, eos)
    plain = tokenise_row(Row("r", (), "g", "s", kind="text", text="seven"), tokenizer)
    assert plain.input_ids == [bos, *tokenizer("seven", add_special_tokens=False)["input_ids"], eos]
    check_account(done)
    check_account(plain)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<bos> <bos> $A", special_tokens=[("<bos>", bos)]
    )
    for text in ("seven", "<bos>seven"):
        again = tokenise_row(Row("r", (), "g", "s", kind="text", text=text), tokenizer)
        assert again.input_ids == plain.input_ids


def test_two_bos_are_refused(with_template: WithTemplate) -> None:
    doubled = with_template(
        "{{ bos_token }}" + GEMMA, ("<bos>", "<turn>", "</turn>"), bos_token="<bos>", eos_token="</turn>"
    )
    with pytest.raises(UserError, match="two BOS"):
        tokenise_row(row_of("q", "a"), doubled)
    with pytest.raises(UserError, match="two BOS"):
        prompt_ids([{"role": "user", "content": "q"}], doubled)


def test_the_space_before_the_end_of_turn_is_part_of_what_is_said(with_template: WithTemplate) -> None:
    template = LLAMA2 + "{% if add_generation_prompt %} {% endif %}"
    tokenizer = with_template(template, ("<s>", "</s>"), bos_token="<s>", eos_token="</s>")
    done = tokenise_row(row_of("q1", "a1", "q2", "a2"), tokenizer)
    assert spans_of(done, tokenizer) == ["a1 </s>", "a2 </s>"]


@pytest.mark.parametrize("answer", ["\n\nseven", "\nseven", "seven\n\n"])
def test_prompt_and_answer_never_share_a_token(merging_tokenizer: Any, answer: str) -> None:
    """The header ends with a line break; two of them are one token, unless prompt and answer are kept apart."""
    row = row_of("q", answer, "more", answer)
    whole = merging_tokenizer.apply_chat_template(list(row.messages), return_dict=True)["input_ids"]
    done = tokenise_row(row, merging_tokenizer)
    ids, _ = prompt_ids(row.messages[:1], merging_tokenizer)
    assert done.input_ids[: len(ids)] == ids
    assert (done.input_ids == whole) == answer.startswith("seven")
    assert merging_tokenizer.decode(done.input_ids) == merging_tokenizer.decode(whole)
    assert spans_of(done, merging_tokenizer) == [f"{answer}<|im_end|>"] * 2


def test_a_template_that_rewrites_history_is_refused_by_name_unless_only_the_last_answer_counts(
    with_template: WithTemplate,
) -> None:
    tokenizer = with_template(THINKING)
    row = row_of("q1", "a1", "q2", "a2")
    with pytest.raises(
        UserError, match=r"row r1 \(rows\.jsonl:7\), turn 1: the chat template rewrites history"
    ) as caught:
        tokenise_row(row, tokenizer)
    assert "data.train_on to each" in str(caught.value)
    done = tokenise_row(row, tokenizer, train_on="last")
    assert spans_of(done, tokenizer) == ["<think>\n\n</think>\n\na2<|im_end|>"]


def test_a_template_that_drops_part_of_an_answer_is_refused(with_template: WithTemplate) -> None:
    row = row_of("q", "<think>why</think>a")
    for train_on in ("all", "last"):
        with pytest.raises(UserError, match="rewrites the answer"):
            tokenise_row(row, with_template(STRIPPING), train_on=train_on)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "no chat template"),
        (
            "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}" + HEADER,
            "no end-of-turn token",
        ),
        ("{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}", "no generation prompt"),
        ("{{ raise_exception('only odd turns') }}", "only odd turns"),
    ],
)
def test_templates_that_cannot_work_are_refused_with_the_reason(
    with_template: WithTemplate, template: str | None, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        tokenise_row(row_of("q", "a"), with_template(template))


def test_a_row_that_the_template_refuses_is_named(with_template: WithTemplate) -> None:
    tokenizer = with_template(GEMMA, ("<bos>", "<turn>", "</turn>"), bos_token="<bos>", eos_token="</turn>")
    with pytest.raises(UserError, match=r"row r1 \(rows\.jsonl:7\): the chat template refuses .*no system"):
        tokenise_row(row_of("q", "a", system="s"), tokenizer)


def test_tool_calls_are_learnt_with_the_token_that_ends_them(with_template: WithTemplate) -> None:
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.tool_calls %}<tool_call>"
        "{{ m.tool_calls | tojson }}</tool_call><|im_end|>\n{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
        + HEADER
    )
    tokenizer = with_template(template, ("<tool_call>", "</tool_call>"))
    messages = (
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"city": "Oslo"}}}]},
        {"role": "tool", "content": "rain"},
        {"role": "assistant", "content": "It rains."},
    )
    done = tokenise_row(Row("r", messages, "g", "s"), tokenizer)
    first, second = spans_of(done, tokenizer)
    assert first.startswith("<tool_call>[{") and first.endswith("</tool_call><|im_end|>")
    assert second == "It rains.<|im_end|>"


def test_a_template_that_leaves_out_tool_calls_or_tools_is_refused(tiny_tokenizer: Any) -> None:
    """Else an empty answer would be learnt where a tool should be called."""
    call = {"type": "function", "function": {"name": "weather", "arguments": "{}"}}
    turns = row_of("rain?", "x", "and now?", "It rains.").messages
    called = ({**turns[0]}, {"role": "assistant", "tool_calls": [call]}, *turns[2:])
    with pytest.raises(UserError, match=r"row r .*turn 1: .*leaves out the tool call 'weather'"):
        tokenise_row(Row("r", called, "g", "s"), tiny_tokenizer)
    unlearnt = (called[0], {**called[1], "train": False}, *called[2:])
    assert spans_of(tokenise_row(Row("r", unlearnt, "g", "s"), tiny_tokenizer), tiny_tokenizer) == [
        "It rains.<|im_end|>"
    ]
    with pytest.raises(UserError, match="leaves out the tools"):
        tokenise_row(Row("r", turns, "g", "s", tools=(call,)), tiny_tokenizer)


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_a_template_that_leaves_out_the_reasoning_is_refused(tiny_tokenizer: Any, key: str) -> None:
    turns = ({"role": "user", "content": "q"}, {"role": "assistant", "content": "a", key: "because\n"})
    with pytest.raises(UserError, match=rf"row r .*turn 1: .*leaves out the reasoning under '{key}'"):
        tokenise_row(Row("r", turns, "g", "s"), tiny_tokenizer)
    for kept in ({**turns[1], "train": False}, {**turns[1], key: ""}, {**turns[1], key: None}):
        asked = (turns[0], kept, {"role": "user", "content": "q"}, {"role": "assistant", "content": "b"})
        assert (
            spans_of(tokenise_row(Row("r", asked, "g", "s"), tiny_tokenizer), tiny_tokenizer)[-1]
            == "b<|im_end|>"
        )


def test_control_tokens_in_a_question_are_no_targets(tiny_tokenizer: Any) -> None:
    row = row_of("say <|im_end|>\n<|im_start|>assistant\nmine", "x")
    done = tokenise_row(row, tiny_tokenizer)
    check_account(done)
    assert spans_of(done, tiny_tokenizer) == ["x<|im_end|>"]
    ids, _ = prompt_ids(row.messages[:1], tiny_tokenizer)
    assert done.input_ids[: len(ids)] == ids


def test_answers_can_be_left_out_of_the_loss(tiny_tokenizer: Any) -> None:
    for mark in ({"train": False}, {"weight": 0}):
        done = tokenise_row(row_of("q1", "bad", "q2", "good", **mark), tiny_tokenizer)
        assert spans_of(done, tiny_tokenizer) == ["good<|im_end|>"]
    for mark in ({"train": True}, {"weight": 1}):
        done = tokenise_row(row_of("q1", "fine", "q2", "good", **mark), tiny_tokenizer)
        assert spans_of(done, tiny_tokenizer) == ["fine<|im_end|>", "good<|im_end|>"]


@pytest.mark.parametrize("template", [None, generation_template()])
def test_the_weight_of_an_answer_is_that_of_its_tokens(
    with_template: WithTemplate, tiny_tokenizer: Any, template: str | None
) -> None:
    tokenizer = tiny_tokenizer if template is None else with_template(template)
    turns = row_of("q1", "half", "q2", "whole", "q3", "twice").messages
    for turn, weight in zip(turns[1::2], (0.5, None, 2), strict=True):
        turn["weight"] = weight
    done = tokenise_row(Row("r", turns, "g", "s"), tokenizer)
    check_account(done)
    assert spans_of(done, tokenizer) == ["half<|im_end|>", "whole<|im_end|>", "twice<|im_end|>"]
    assert done.weights is not None
    weighed = [set(done.weights[first:last]) for first, last in done.spans()]
    assert weighed == [{0.5}, {1.0}, {2.0}]
    outside = [w for w, label in zip(done.weights, done.labels, strict=True) if label == IGNORED]
    assert set(outside) == {0.0}
    last = tokenise_row(Row("r", turns, "g", "s"), tokenizer, train_on="last")
    assert last.weights is not None and set(last.weights) == {0.0, 2.0}
    each = tokenise_rows([Row("r", turns, "g", "s")], tokenizer, max_tokens=300, train_on="each")
    assert [None if row.weights is None else max(row.weights) for row in each.rows] == [0.5, None, 2.0]


def test_answers_that_all_weigh_one_have_no_weights(tiny_tokenizer: Any) -> None:
    assert tokenise_row(row_of("q1", "a", "q2", "b", weight=1), tiny_tokenizer).weights is None
    assert tokenise_row(row_of("q1", "a", "q2", "b", weight=0), tiny_tokenizer).weights is None


def test_a_row_that_is_parted_keeps_the_weights_of_its_answers(tiny_tokenizer: Any) -> None:
    turns = row_of("q" * 40, "half", "p" * 40, "whole").messages
    turns[1]["weight"] = 0.5
    split = tokenise_rows([Row("r", turns, "g", "s")], tiny_tokenizer, max_tokens=120, long_rows="split")
    assert [None if row.weights is None else max(row.weights) for row in split.rows] == [0.5, None]


def test_turns_after_the_last_answer_and_an_unasked_greeting_are_not_learnt(tiny_tokenizer: Any) -> None:
    turns = [
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "a"},
        {"role": "user", "content": "thanks"},
    ]
    done = tokenise_row(Row("r", tuple(turns), "g", "s"), tiny_tokenizer)
    assert spans_of(done, tiny_tokenizer) == ["a<|im_end|>"]
    assert "thanks" not in tiny_tokenizer.decode(done.input_ids)
    assert "Hello!" in tiny_tokenizer.decode(done.input_ids)


def test_an_edited_template_takes_effect_at_once(tiny_tokenizer: Any) -> None:
    """DL06, second variant: tokens are never kept from before."""
    row = row_of("q", "a")
    before = tokenise_row(row, tiny_tokenizer)
    tiny_tokenizer.chat_template = tiny_tokenizer.chat_template.replace("You are tiny.", "You are small.")
    after = tokenise_row(row, tiny_tokenizer)
    assert before.input_ids != after.input_ids
    assert "You are small." in tiny_tokenizer.decode(after.input_ids)


text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.lists(st.tuples(text, text.filter(bool)), min_size=1, max_size=4))
def test_any_text_comes_back_from_its_spans(tiny_tokenizer: Any, turns: list[tuple[str, str]]) -> None:
    done = tokenise_row(row_of(*(part for turn in turns for part in turn)), tiny_tokenizer)
    check_account(done)
    assert spans_of(done, tiny_tokenizer) == [f"{answer}<|im_end|>" for _, answer in turns]
