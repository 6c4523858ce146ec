"""A user's own rows: kept byte for byte, or quarantined with file, line, byte, reason and the raw row."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from finetune.data.build import REJECTS, DatasetBuild, build_dataset
from finetune.errors import UserError
from finetune.paths import read_jsonl

Build = Callable[..., DatasetBuild]
LENIENT = {"max_reject_rate": 1.0}


def chat(question: str, answer: str = "yes", **extra: Any) -> dict[str, Any]:
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": turns, **extra}


def answers(made: DatasetBuild) -> set[str]:
    return {row.answer for row in made.rows("train")}


@pytest.mark.parametrize("at", [0, 2999, 5999])
def test_an_extra_key_in_one_row_changes_nothing_wherever_it_stands(build: Build, at: int) -> None:
    """DL01: the verdict does not depend on the position of the row or on the size of the file."""
    rows = [{"prompt": f"p{n}", "completion": f"c{n}" + "x" * 50} for n in range(6000)]
    rows[at]["note"] = "x"
    made = build(rows)
    assert made.manifest["ledger"] == {"read": 6000, "kept": 6000, "dropped": {}, "quarantined": 0}
    assert made.manifest["source"]["ignored_keys"] == {"note": 1}


def test_files_with_different_keys_are_one_set(tmp_path: Path) -> None:
    """DL01: two files, the extra key in one of them; declared as a tag it is kept where it is."""
    (tmp_path / "a.jsonl").write_text('{"prompt": "p1", "completion": "c1"}\n')
    (tmp_path / "b.jsonl").write_text('{"prompt": "p2", "completion": "c2", "note": "x"}\n')
    spec = tmp_path / "s.yaml"
    spec.write_text(
        "name: two\nsplit: {shares: {train: 1.0}}\n"
        "source: {kind: jsonl, files: [a.jsonl, b.jsonl], tags: [note]}\n"
    )
    rows = build_dataset(spec, tmp_path / "builds").rows("train")
    assert {row.answer: row.tags for row in rows} == {"c1": {}, "c2": {"note": "x"}}


@pytest.mark.parametrize(
    "words",
    [["2024-01-05", "2024-02-01 10:00:00"], ["42", "007", "1e5", "NA", "null", "None", "true", "NaN"]],
)
def test_text_that_looks_like_something_else_stays_text(build: Build, words: list[str]) -> None:
    """DL03 and its kind: no reader infers a type of training text."""
    made = build([{"prompt": f"p{word}", "completion": word} for word in words])
    assert answers(made) == set(words)


def test_text_is_byte_identical(build: Build) -> None:
    answer = '  tab\tCRLF\r\nNUL\x00 \u2028 e\u0301 é 👩‍👩‍👧 \\n "q" <|im_end|> \ufeff '
    assert answers(build([chat("q", answer)])) == {answer}


def test_tool_call_arguments_are_kept_as_given(build: Build, with_template: Callable[..., Any]) -> None:
    """DL04: row 1 never had 'count', so it is neither stored nor rendered; a user message gets no tool_calls."""
    calls: list[Any] = [{"city": "Oslo"}, {"count": 3}, '{"raw": "text"}', {}]
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"q{n}"},
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": arguments}}],
                },
            ],
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {"n": n}}}],
        }
        for n, arguments in enumerate(calls)
    ]
    tokenizer = with_template(
        "{{ tools | tojson }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
        "{% if m.tool_calls is defined %}{{ m.tool_calls | tojson }}{% endif %}<|im_end|>\n{% endfor %}"
    )

    def render(messages: Any, tools: Any) -> str:
        return str(tokenizer.apply_chat_template(messages, tools=tools, tokenize=False))

    raw = {render(row["messages"], row["tools"]) for row in rows}
    read = build(rows).rows("train")
    assert {render(list(row.messages), list(row.tools)) for row in read} == raw
    assert all("tool_calls" not in row.messages[0] for row in read)


def test_long_integers_and_deep_values_in_arguments_are_kept_exactly(build: Build) -> None:
    deep: Any = {"id": 123456789012345678901234567890, "least": -(2**63) - 1, "e": 1e22}
    for _ in range(60):
        deep = {"in": [deep]}
    turns = [
        {"role": "user", "content": "q"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"function": {"name": "f", "arguments": deep}}],
        },
    ]
    (row,) = build([{"messages": turns}]).rows("train")
    assert row.messages[1]["tool_calls"] == turns[1]["tool_calls"]


def test_content_parts_are_joined_and_other_parts_refused(build: Build) -> None:
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    picture = [{"type": "image", "url": "x"}]
    made = build(
        [
            {"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": "42"}]},
            {"messages": [{"role": "user", "content": picture}, {"role": "assistant", "content": "no"}]},
        ],
        source=LENIENT,
    )
    (row,) = made.rows("train")
    assert [turn["content"] for turn in row.messages] == ["one two", "42"]
    assert "'image'" in read_jsonl(made.folder / REJECTS)[0]["reason"]


def test_prompt_and_completion_may_be_conversations(build: Build) -> None:
    made = build(
        [
            {
                "prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}],
                "completion": [{"role": "assistant", "content": "a"}],
            }
        ]
    )
    (row,) = made.rows("train")
    assert [turn["role"] for turn in row.messages] == ["system", "user", "assistant"]


def test_a_system_message_is_put_only_where_there_is_none(build: Build) -> None:
    own = {"role": "system", "content": "mine"}
    rows = [chat("a", "one"), {"messages": [own, *chat("b", "two")["messages"]]}]
    made = build(rows, source={"system": "yours"})
    assert {row.answer: row.messages[0]["content"] for row in made.rows("train")} == {
        "one": "yours",
        "two": "mine",
    }


BAD_ROWS: list[tuple[bytes, str]] = [
    (b'{"messages": [', "not valid JSON"),
    (b'{"messages": [{"role": "user", "content": "q"}]}', "no assistant turn"),
    (b'{"messages": "text"}', "'messages' is text"),
    (b'{"messages": null}', "'messages' is null"),
    (b'{"messages": []}', "'messages' is empty"),
    (b'{"messages": [7]}', r"messages\[0\] is a number"),
    (b'{"messages": [{"content": "x"}]}', "the role is None"),
    (b'{"messages": [{"role": "gpt", "content": "x"}]}', "the role is 'gpt'"),
    (b'{"messages": [{"role": "assistant", "content": null}]}', "'content' is null or missing"),
    (b'{"messages": [{"role": "assistant"}]}', "'content' is null or missing"),
    (b'{"messages": [{"role": "assistant", "content": 7}]}', "'content' is a number"),
    (b'{"messages": [{"role": "assistant", "content": ""}]}', "the answer is empty"),
    (b'{"messages": [{"role": "assistant", "content": "x", "weight": "half"}]}', "'weight' is 'half'"),
    (b'{"prompt": "p", "completion": null}', "'completion' is null"),
    (b'{"prompt": 3, "completion": "c"}', "'prompt' is a number"),
    (b'{"prompt": "p", "completion": ""}', "'completion' is empty"),
    (b'{"prompt": "p"}', "neither 'messages' nor 'prompt' and 'completion'"),
    (
        b'{"messages": [{"role": "assistant", "content": "x"}], "tools": "t"}',
        "'tools' is text, not a list of objects",
    ),
    (b'{"messages": [{"role": "assistant", "content": "\\udc00"}]}', "surrogate"),
    (b'{"messages": [{"role": "assistant", "content": "a\x00b"}]}', "not valid JSON"),
    (b'{"messages": [], "messages": [{"role": "assistant", "content": "x"}]}', "'messages' is written twice"),
    (b'{"text": "x", "deep": ' + b"[" * 5000 + b"]" * 5000 + b"}", "not valid JSON"),
    (b'{"text": "x", "long": ' + b"9" * 5000 + b"}", "not valid JSON"),
]


@pytest.mark.parametrize(("bad", "reason"), BAD_ROWS)
def test_one_bad_line_never_loses_the_others(build: Build, bad: bytes, reason: str) -> None:
    import re

    good = [json.dumps(chat(f"q{n}", f"a{n}")).encode() for n in range(4)]
    made = build(b"\n".join([*good[:2], bad, *good[2:]]), source=LENIENT)
    assert answers(made) == {"a0", "a1", "a2", "a3"}
    (entry,) = read_jsonl(made.folder / REJECTS)
    assert (entry["source"], entry["line"]) == ("rows.jsonl", 3)
    assert entry["byte"] == len(good[0]) + len(good[1]) + 2
    assert entry["raw"].encode() == bad
    assert re.search(reason, entry["reason"])
    assert made.manifest["ledger"] == {"read": 5, "kept": 4, "dropped": {}, "quarantined": 1}


def test_an_unended_last_line_is_a_row_and_a_cut_one_is_not(build: Build) -> None:
    whole = json.dumps(chat("q", "a")).encode()
    assert answers(build(whole)) == {"a"}
    made = build(whole + b"\n" + whole[:-5], source=LENIENT)
    assert made.manifest["ledger"]["quarantined"] == 1


def test_a_gzip_with_bom_and_crlf_reads_like_the_plain_file(build: Build) -> None:
    lines = [json.dumps(chat(f"q{n}", f"a{n}")).encode() for n in range(3)]
    plain = build(b"\n".join(lines)).manifest["splits"]
    packed = build(gzip.compress(b"\xef\xbb\xbf" + b"\r\n".join(lines))).manifest["splits"]
    assert plain == packed


def test_too_many_faulty_rows_fail_the_build_and_name_them(build: Build, tmp_path: Path) -> None:
    rows = [json.dumps(chat(f"q{n}")).encode() for n in range(97)] + [b"{", b"}", b"x"]
    with pytest.raises(UserError) as caught:
        build(b"\n".join(rows))
    assert "3 of 100 rows are faulty" in str(caught.value)
    assert "rows.jsonl:98" in str(caught.value)
    assert "max_reject_rate" in str(caught.value)
    assert list((tmp_path / "builds").glob("[!.]*")) == []


def test_one_percent_of_faulty_rows_passes_by_default(build: Build) -> None:
    rows = [json.dumps(chat(f"q{n}")).encode() for n in range(99)] + [b"{"]
    assert build(b"\n".join(rows)).manifest["ledger"]["quarantined"] == 1


@pytest.mark.parametrize("content", [b"", b"\n \n", b"\xef\xbb\xbf\n", gzip.compress(b"", mtime=0)])
def test_an_empty_file_is_a_user_error(build: Build, content: bytes) -> None:
    with pytest.raises(UserError, match="the dataset is empty"):
        build(content)


def test_a_file_of_faulty_rows_only_is_a_user_error_at_any_rate(build: Build) -> None:
    with pytest.raises(UserError, match="2 of 2 rows are faulty"):
        build(b"x\ny\n", source=LENIENT)


def test_a_json_document_over_many_lines_is_named(build: Build) -> None:
    with pytest.raises(UserError, match="one JSON document"):
        build(json.dumps([chat("q")], indent=2).encode())


def test_a_missing_file_is_named_with_its_place_in_the_spec(
    write_spec: Callable[..., Path], tmp_path: Path
) -> None:
    spec = write_spec([], source={"files": ["elsewhere.jsonl"]})
    with pytest.raises(UserError, match=r"mine\.yaml:1:\d+: no such file: .*elsewhere\.jsonl"):
        build_dataset(spec, tmp_path / "builds")


def test_group_by_a_key_that_a_row_lacks_quarantines_that_row(build: Build) -> None:
    rows = [chat("a", "one", user="u1"), chat("b", "two"), chat("c", "three", user=7)]
    made = build(rows, source={"group_by": "user", **LENIENT})
    assert {row.answer: row.group for row in made.rows("train")} == {"one": "user=u1", "three": "user=7"}
    assert made.manifest["ledger"]["quarantined"] == 1


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    junk=st.lists(st.binary(max_size=60).map(lambda raw: raw.replace(b"\n", b" ").replace(b"\r", b" "))),
    data=st.data(),
)
def test_junk_between_good_rows_never_raises_and_loses_none(
    build: Build, junk: list[bytes], data: Any
) -> None:
    good = [json.dumps(chat(f"q{n}", f"a{n}")).encode() for n in range(5)]
    lines = data.draw(st.permutations(good + junk))
    if lines[0].startswith(
        (b"\x1f\x8b", b"\xff\xfe", b"\xfe\xff", b"PK", b"PAR1", b"\x28\xb5", b"\xfd7zXZ", b"BZh", b"ARROW")
    ):
        lines = [good[0], *lines]
    made = build(b"\n".join(lines), source=LENIENT)
    assert {f"a{n}" for n in range(5)} <= answers(made)
    ledger = made.manifest["ledger"]
    assert ledger["read"] == ledger["kept"] + sum(ledger["dropped"].values()) + ledger["quarantined"]
