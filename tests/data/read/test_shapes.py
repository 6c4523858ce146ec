"""Every shape in every format gives the same canonical row."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from finetune.data.rows import Row

CALL = [{"type": "function", "function": {"name": "f", "arguments": '{"city": "Oslo"}'}}]
TOOLS = [{"type": "function", "function": {"name": "f"}}]


def user(text: Any, **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": text, **more}


def assistant(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


SYSTEM = {"role": "system", "content": "s"}
CHAT = {"messages": (user("007"), assistant("2024-01-05"))}
# Name: the record of a file, and the fields of the row.
SHAPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "messages": ({"messages": [user("007"), assistant("2024-01-05")]}, CHAT),
    "messages_with_tools": (
        {
            "messages": [user("q"), assistant("a", reasoning_content="hm", tool_calls=CALL)],
            "tools": TOOLS,
            "system": "s",
        },
        {
            "messages": (SYSTEM, user("q"), assistant("a", reasoning_content="hm", tool_calls=CALL)),
            "tools": tuple(TOOLS),
        },
    ),
    "sharegpt": (
        {"conversations": [{"from": "human", "value": "007"}, {"from": "gpt", "value": "2024-01-05"}]},
        CHAT,
    ),
    "sharegpt_system": (
        {
            "conversation": [
                {"from": "system", "value": "s"},
                {"from": "user", "value": "q"},
                {"from": "assistant", "value": "null"},
            ]
        },
        {"messages": (SYSTEM, user("q"), assistant("null"))},
    ),
    "sharegpt_calls": (
        {
            "conversations": [
                {"from": "human", "value": "q"},
                {"from": "function_call", "value": '{"name": "f", "arguments": {"a": 1}}'},
                {"from": "observation", "value": "42"},
                {"from": "gpt", "value": "NA"},
            ],
            "tools": json.dumps(TOOLS),
        },
        {
            "messages": (
                user("q"),
                {
                    "role": "assistant",
                    "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}],
                },
                {"role": "tool", "content": "42"},
                assistant("NA"),
            ),
            "tools": tuple(TOOLS),
        },
    ),
    "alpaca": ({"instruction": "007", "input": "", "output": "2024-01-05"}, CHAT),
    "alpaca_full": (
        {
            "instruction": "i",
            "input": "in\n",
            "output": " o ",
            "system": "s",
            "history": [["q1", "a1"]],
            "text": "the whole once more",
        },
        {"messages": (SYSTEM, user("q1"), assistant("a1"), user("i\n\nin\n"), assistant(" o "))},
    ),
    "prompt_completion": ({"prompt": "007", "completion": "2024-01-05"}, CHAT),
    "text": ({"text": " 1e5\n\nNA "}, {"kind": "text", "text": " 1e5\n\nNA "}),
    "tokens": (
        {"input_ids": [5, 6, 7, 0], "labels": [-100, 6, 7, -100], "attention_mask": [1, 1, 1, 0]},
        {"kind": "tokens", "input_ids": (5, 6, 7), "labels": (-100, 6, 7)},
    ),
    "tokens_all": (
        {"input_ids": [5, 6], "text": "x"},
        {"kind": "tokens", "input_ids": (5, 6), "labels": (5, 6)},
    ),
    "preference_texts": (
        {"prompt": "q", "chosen": "42", "rejected": "43"},
        {
            "kind": "preference",
            "messages": (user("q"),),
            "chosen": (assistant("42"),),
            "rejected": (assistant("43"),),
        },
    ),
    "preference_implicit_texts": (
        {"chosen": "The sky is blueish.", "rejected": "The sky is bluest."},
        {
            "kind": "preference",
            "messages": (user("The sky is"),),
            "chosen": (assistant(" blueish."),),
            "rejected": (assistant(" bluest."),),
        },
    ),
    "preference_transcripts": (
        {
            "chosen": "\n\nHuman: hi\n\nAssistant: hello\n\nHuman: q\n\nAssistant: yes",
            "rejected": "\n\nHuman: hi\n\nAssistant: hello\n\nHuman: q\n\nAssistant: yet",
        },
        {
            "kind": "preference",
            "messages": (user("hi"), assistant("hello"), user("q")),
            "chosen": (assistant("yes"),),
            "rejected": (assistant("yet"),),
        },
    ),
    "kto": (
        {"prompt": "q", "completion": "true", "label": True},
        {"kind": "kto", "messages": (user("q"), assistant("true")), "label": True},
    ),
    "stepwise": (
        {"prompt": "q", "completions": ["1 + 1 = 2", "so 3"], "labels": [True, False]},
        {
            "kind": "stepwise",
            "messages": (user("q"),),
            "steps": ({"text": "1 + 1 = 2", "correct": True}, {"text": "so 3", "correct": False}),
        },
    ),
}
EMPTY = {
    "messages": (),
    "tools": (),
    "kind": "chat",
    "chosen": (),
    "rejected": (),
    "label": None,
    "text": "",
    "input_ids": (),
    "labels": (),
    "steps": (),
}
# Lists of messages in a place that may also hold text: in CSV the spec must say that the column is JSON.
CONVERSATIONS: dict[str, tuple[dict[str, Any], dict[str, Any], list[str]]] = {
    "prompt_completion_lists": (
        {"prompt": [SYSTEM, user("q")], "completion": [assistant("a")]},
        {"messages": (SYSTEM, user("q"), assistant("a"))},
        ["prompt", "completion"],
    ),
    "preference_lists": (
        {"chosen": [user("q"), assistant("good")], "rejected": [user("q"), assistant("bad")]},
        {
            "kind": "preference",
            "messages": (user("q"),),
            "chosen": (assistant("good"),),
            "rejected": (assistant("bad"),),
        },
        ["chosen", "rejected"],
    ),
    "preference_prompt_repeated": (
        {
            "prompt": "q",
            "chosen": [SYSTEM, user("q"), assistant("good")],
            "rejected": [SYSTEM, user("q"), assistant("bad")],
        },
        {
            "kind": "preference",
            "messages": (SYSTEM, user("q")),
            "chosen": (assistant("good"),),
            "rejected": (assistant("bad"),),
        },
        ["chosen", "rejected"],
    ),
    "kto_lists": (
        {"prompt": [user("q")], "completion": [assistant("a")], "label": False},
        {"kind": "kto", "messages": (user("q"), assistant("a")), "label": False},
        ["prompt", "completion"],
    ),
}


def fields_of(row: Row) -> dict[str, Any]:
    return {name: getattr(row, name) for name in EMPTY}


@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_every_shape_in_every_format(
    read: Callable[..., Any], written: Callable[..., str], form: str, shape: str
) -> None:
    record, expected = SHAPES[shape]
    found = read(None, written(form, [record, record, record, record]))
    assert found.rejects == []
    assert [fields_of(row) for row in found.rows] == [{**EMPTY, **expected}] * 4


@pytest.mark.parametrize("shape", sorted(CONVERSATIONS))
def test_lists_of_messages_where_text_may_stand(
    read: Callable[..., Any], written: Callable[..., str], form: str, shape: str
) -> None:
    record, expected, columns = CONVERSATIONS[shape]
    tabular = form.startswith(("csv", "tsv", "xz"))
    found = read(None, written(form, [record] * 4), json_columns=columns if tabular else [])
    assert found.rejects == []
    assert [fields_of(row) for row in found.rows] == [{**EMPTY, **expected}] * 4


@pytest.mark.parametrize("shape", sorted({**SHAPES, **CONVERSATIONS}))
def test_rows_of_every_kind_are_stored_and_found_again(read: Callable[..., Any], shape: str) -> None:
    record = {**SHAPES, **CONVERSATIONS}[shape][0]
    [row] = read([{**record, "topic": "t"}], tags=["topic"]).rows
    again = Row.from_dict(json.loads(json.dumps(row.to_dict())))
    assert again == row
    assert again.content_digest() == row.content_digest()
    assert (again.prompt, again.answer) == (row.prompt, row.answer)
    assert again.tags == {"topic": "t"}


def test_the_id_and_the_digest_follow_what_is_learnt(read: Callable[..., Any]) -> None:
    pair = {"prompt": "q", "chosen": "a", "rejected": "b"}
    swapped = {"prompt": "q", "chosen": "b", "rejected": "a"}
    steps = {"prompt": "q", "completions": ["a"], "labels": [True]}
    wrong = {"prompt": "q", "completions": ["a"], "labels": [False]}
    liked = {"prompt": "q", "completion": "a", "label": True}
    disliked = {"prompt": "q", "completion": "a", "label": False}
    plain = {"prompt": "q", "completion": "a"}
    rows = read([pair, swapped, steps, wrong, liked, disliked, plain, {"text": "q"}, {"input_ids": [1]}]).rows
    assert len({row.id for row in rows}) == len({row.content_digest() for row in rows}) == 9
    again = read([pair, plain]).rows
    assert [row.id for row in again] == [rows[0].id, rows[6].id]


def test_what_asks_the_same_is_one_group(read: Callable[..., Any]) -> None:
    rows = read(
        [
            {"prompt": "What  now?", "chosen": "a", "rejected": "b"},
            {"prompt": "what now?", "completion": "c"},
            {"text": "A text."},
            {"text": " a  TEXT."},
            {"text": "Another."},
            {"input_ids": [1, 2]},
            {"input_ids": [1, 2], "labels": [-100, 2]},
            {"input_ids": [12]},
        ]
    ).rows
    groups = [row.group for row in rows]
    assert groups[0] == groups[1]
    assert groups[2] == groups[3] != groups[4]
    assert groups[5] == groups[6] != groups[7]
    assert [row.prompt for row in rows[:2]] == [(user("What  now?"),), (user("what now?"),)]
    assert len({str(row.prompt) for row in rows[2:]}) == 5


@pytest.mark.parametrize(
    ("spelling", "meaning"),
    [
        *[
            (word, True)
            for word in (
                *(True, 1, 1.0, "1", "true", "True", "TRUE", "yes", "Y", "good", " t ", "+1", "1.0", "on"),
                *("👍", "thumbs_up", "Thumbs Up", "thumbs-up", "LIKE", "Correct", "accepted"),
            )
        ],
        *[
            (word, False)
            for word in (
                *(
                    False,
                    0,
                    0.0,
                    "0",
                    "false",
                    "False",
                    "no",
                    "N",
                    "bad",
                    "undesirable",
                    "-1",
                    -1,
                    -1.0,
                    "off",
                ),
                *("👎", "thumbs_down", "Thumbs-Down", "dislike", "incorrect", "rejected"),
            )
        ],
    ],
)
def test_a_boolean_in_any_spelling(read: Callable[..., Any], spelling: Any, meaning: bool) -> None:
    [row] = read([{"prompt": "q", "completion": "a", "label": spelling}]).rows
    assert row.label is meaning


BAD: list[tuple[dict[str, Any], str]] = [
    ({"prompt": "q", "completion": "a", "label": "sports"}, "'label' is 'sports'.*source.shape"),
    ({"prompt": "q", "completion": "a", "label": 2}, "'label' is 2"),
    ({"prompt": "q", "completion": "a", "label": None}, "'label' is null"),
    ({"prompt": "q", "chosen": "a", "rejected": "a"}, "are the same"),
    ({"prompt": "q", "chosen": "", "rejected": "a"}, "'chosen' is empty"),
    ({"prompt": "q", "chosen": "a"}, "'chosen' and no 'rejected'"),
    ({"rejected": "a"}, "'rejected' and no 'chosen'"),
    ({"prompt": "q", "chosen": "a", "rejected": None}, "'rejected' is null"),
    ({"chosen": "Yes", "rejected": "No"}, "do not begin alike"),
    ({"chosen": "blue", "rejected": "black"}, "do not begin alike"),
    ({"chosen": "a b", "rejected": [assistant("c")]}, "'chosen' is text and 'rejected' a list"),
    ({"chosen": [assistant("a")], "rejected": [assistant("b")]}, "no turn in common"),
    ({"chosen": [user("q"), assistant("a")], "rejected": [user("q")]}, "'rejected' has no answer of its own"),
    (
        {"chosen": [user("q"), user("r"), assistant("a")], "rejected": [user("q"), assistant("a")]},
        "goes on with a turn of user",
    ),
    (
        {"prompt": "q", "chosen": [user("p"), assistant("a")], "rejected": [user("p"), assistant("b")]},
        "not those of 'prompt'",
    ),
    ({"prompt": "q", "completions": ["a"], "labels": []}, "1 steps in 'completions' and 0 in 'labels'"),
    ({"prompt": "q", "completions": [], "labels": []}, "there is no step"),
    ({"prompt": "q", "completions": [1], "labels": [1]}, r"completions\[0\] is a number"),
    ({"prompt": "q", "completions": ["a"], "labels": ["?"]}, r"labels\[0\]' is '\?'"),
    ({"text": " \n"}, "'text' is empty"),
    ({"text": 42}, "'text' is a number"),
    ({"input_ids": []}, "'input_ids' is empty"),
    ({"input_ids": [1, "2"]}, r"input_ids\[1\] is '2', not a whole number"),
    ({"input_ids": [1.0]}, r"input_ids\[0\] is 1.0"),
    ({"input_ids": [True]}, r"input_ids\[0\] is True"),
    ({"input_ids": [-1]}, "token id is 0 or more"),
    ({"input_ids": [1, 2], "labels": [2, -100]}, r"labels\[0\] is 2.*not shifted"),
    ({"input_ids": [1, 2], "labels": [-100, -100]}, "every label is -100"),
    ({"input_ids": [1, 2], "labels": [1]}, "2 tokens, 'labels' 1"),
    ({"input_ids": [1, 2, 3], "attention_mask": [1, 0, 1]}, "hides tokens between others"),
    ({"input_ids": [1], "attention_mask": [0]}, "or all of them"),
    ({"instruction": "", "input": "", "output": "o"}, "nothing is asked"),
    ({"instruction": "i", "output": ""}, "'output' is empty"),
    ({"instruction": "i", "input": 3, "output": "o"}, "'input' is a number"),
    ({"instruction": "i", "output": "o", "history": [["q"]]}, r"history\[0\]"),
    ({"conversations": [{"from": "gpt5", "value": "x"}]}, "the role is 'gpt5'"),
    ({"conversations": [{"from": "function_call", "value": "no json"}]}, "is no JSON"),
    ({"conversations": [{"from": "function_call", "value": "{}"}]}, "no object with 'name'"),
    ({"messages": [SYSTEM, user("q"), assistant("a")], "system": "t"}, "begins with another system turn"),
    ({"messages": [user("q"), assistant("a")], "system": 7}, "'system' is a number"),
    (
        {"messages": [user("q"), assistant("a", tool_calls="f()")]},
        r"messages\[1\]: 'tool_calls' is text, not",
    ),
    ({"messages": [user("q"), assistant("a", tool_calls=[3])]}, r"messages\[1\]: 'tool_calls' is not a list"),
    ({"messages": [user("q"), assistant("a", function_call={"n": 1})]}, "no object with 'name'"),
    ({"messages": [user("q"), assistant("a")], "functions": {"name": "f"}}, "'functions' is not a list"),
    (
        {"messages": [user("q"), assistant("a")], "images": ["a.png"]},
        "the row holds 'images'.*source.columns",
    ),
    ({"messages": [user("q", images=["a.png"]), assistant("a")]}, r"messages\[0\] holds 'images'"),
    ({"conversations": [{"from": "gpt", "value": "a"}], "image": "a.png"}, "the row holds 'image'"),
    ({"prompt": "q", "completion": "a", "audio": {"path": "a.wav"}}, "the row holds 'audio'"),
    ({"text": "t", "videos": ["a.mp4"]}, "the row holds 'videos'"),
    ({"messages": [user([{"type": "image"}]), assistant("a")]}, "a content part is 'image', not text"),
    ({"messages": [user("q"), assistant("a", train="no")]}, "'train' is 'no'"),
    ({"messages": [user("q"), assistant("a", weight=-0.5)]}, "'weight' is -0.5; a turn weighs from 0"),
    ({"messages": [user("q"), assistant("a", weight=101)]}, "'weight' is 101; .* to 100"),
    ({"messages": [user("q"), assistant("a", weight="0.5")]}, "'weight' is '0.5'"),
    ({"messages": [{"role": ["user"], "content": "q"}, assistant("a")]}, r"the role is \['user'\]"),
    ({"messages": [{"role": "gpt", "content": "q"}, assistant("a")]}, "source.roles"),
    ({"question": "q", "answer": "a"}, r"its keys: answer, question\); source.columns"),
    ({}, "its keys: none"),
]


@pytest.mark.parametrize(("record", "reason"), BAD)
def test_what_is_no_row_says_why(read: Callable[..., Any], record: dict[str, Any], reason: str) -> None:
    good = {"text": "good"}
    found = read([good, record, good])
    assert len(found.rows) == 2
    [entry] = found.rejects
    assert (entry.line, entry.source, json.loads(entry.raw)) == (2, "rows.jsonl", record)
    assert re.search(reason, entry.reason), entry.reason


@pytest.mark.parametrize("mark", [{"weight": 0.5}, {"weight": 0}, {"weight": None}, {"train": None}])
def test_marks_of_a_turn_are_kept_as_given(read: Callable[..., Any], mark: dict[str, Any]) -> None:
    turns = [user("q"), assistant("a", **mark)]
    [row] = read([{"messages": turns}]).rows
    assert row.messages == tuple(turns)


def test_who_speaks_in_any_case_and_by_the_usual_names(read: Callable[..., Any]) -> None:
    speakers = [("System", "Human", "GPT"), ("SYSTEM", "User", "Assistant"), ("system", " human ", "ChatGPT")]
    speakers += [("system", "prompter", "Bard"), ("system", "human", "bing"), ("developer", "user", "AI")]
    for who in speakers:
        turns = [{"from": name, "value": name} for name in who]
        [row] = read([{"conversations": turns}]).rows
        assert [turn["role"] for turn in row.messages][1:] == ["user", "assistant"]
        assert [turn["content"] for turn in row.messages] == list(who)
    turns = [{"role": role, "content": "x"} for role in ("USER", "Assistant", "Tool", "assistant")]
    [row] = read([{"messages": turns}]).rows
    assert [turn["role"] for turn in row.messages] == ["user", "assistant", "tool", "assistant"]
    assert read([{"messages": [user("q"), {"role": "GPT", "content": "a"}]}]).reasons  # not of this shape
    calls = [{"from": "Human", "value": "q"}, {"from": "Function_Call", "value": '{"name": "f"}'}]
    [row] = read([{"conversations": calls}]).rows
    assert row.messages[1]["tool_calls"] == [{"type": "function", "function": {"name": "f"}}]


def test_calls_in_their_earlier_spelling_or_as_json_text_are_those_that_templates_read(
    read: Callable[..., Any],
) -> None:
    function = {"name": "f", "arguments": '{"city": "Oslo"}'}
    said = {"role": "tool", "content": "5", "name": "f"}
    now = [user("q"), {"role": "assistant", "tool_calls": CALL}, said, assistant("five")]
    turns: dict[str, list[dict[str, Any]]] = {
        "function_call": [{"role": "assistant", "content": None, "function_call": function}, {**said, "role": "function"}],
        "json text": [{"role": "assistant", "content": None, "tool_calls": json.dumps(CALL)}, said],
    }  # fmt: skip
    for spelling in turns.values():
        [row] = read(
            [{"messages": [user("q"), *spelling, assistant("five")], "functions": [{"name": "f"}]}]
        ).rows
        assert (row.messages, row.tools) == (tuple(now), tuple(TOOLS))


def test_images_that_are_no_images_or_are_left_out_by_name_refuse_nothing(read: Callable[..., Any]) -> None:
    chat = {"messages": [user("q"), assistant("a")]}
    plain = read([chat]).rows[0].id
    assert [row.id for row in read([{**chat, "images": []}, {**chat, "image": None}]).rows] == [plain] * 2
    named = {"messages": "messages"}
    assert [row.id for row in read([{**chat, "images": ["a.png"]}], columns=named).rows] == [plain]


def test_a_stated_shape_makes_rows_of_another_shape_rejects(read: Callable[..., Any]) -> None:
    rows = [
        {"prompt": "q", "completion": "a", "label": 1},
        {"prompt": "q", "completion": "a"},
        {"messages": [user("q"), assistant("a")], "label": "no"},
    ]
    found = read(rows, shape="kto")
    assert [row.label for row in found.rows] == [True, False]
    assert found.reasons == [
        "the row has no 'label', which the shape kto needs (its keys: completion, prompt)"
    ]
    found = read(rows, shape="prompt_completion")
    assert [row.kind for row in found.rows] == ["chat", "chat"]
    assert found.ignored_keys == {"label": 1}


def test_the_verdict_on_a_row_does_not_depend_on_the_others(read: Callable[..., Any]) -> None:
    records = [record for record, _ in SHAPES.values()] + [record for record, _ in BAD]
    together = read(records)
    for number, record in enumerate(records, start=1):
        alone = read([record])
        assert [row.id for row in alone.rows] == [
            row.id for row in together.rows if row.source == f"rows.jsonl:{number}"
        ]
        assert alone.reasons == [entry.reason for entry in together.rejects if entry.line == number]
