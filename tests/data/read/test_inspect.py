"""What rows are is told from all of them, with the reasons, and the spec that comes out reads them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from finetune.data.build import load_spec
from finetune.data.read import Reject, iter_rows, source_files
from finetune.data.read.inspect import Inspection, inspect_files
from finetune.data.read.spec_text import dataset_name, spec_text
from finetune.data.rows import Row
from finetune.data.spec_source import FilesSource
from finetune.errors import UserError

Inspect = Callable[..., Inspection]


@pytest.fixture
def inspect(tmp_path: Path) -> Inspect:
    """inspect(name, content=None, **source): write the file if content is given, and inspect it."""

    def run(name: str, content: bytes | list[dict[str, Any]] | None = None, **source: Any) -> Inspection:
        if isinstance(content, list):
            content = b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in content)
        if content is not None:
            (tmp_path / name).write_bytes(content)
        section = FilesSource(**{"kind": "files", "files": [name], **source})
        return inspect_files(source_files(section, tmp_path), section)

    return run


def rows_by_spec(found: Inspection, folder: Path) -> list[Row | Reject]:
    """The rows that a build of the printed spec would read."""
    path = folder / "made.yaml"
    path.write_text(spec_text(found, "made"), encoding="utf-8")
    [source] = load_spec(path).value.sources
    assert isinstance(source, FilesSource)
    return [one for file in source_files(source, folder) for one in iter_rows(file, source)]


def said(*turns: tuple[str, str], role: str = "role", content: str = "content") -> list[dict[str, str]]:
    return [{role: who, content: text} for who, text in turns]


PAIR = {"prompt": "p", "completion": "c"}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "messages": ({"messages": said(("user", "q"), ("assistant", "a")), "id": 1}, {"shape": "messages"}),
    "sharegpt": (
        {"conversations": said(("human", "q"), ("gpt", "a"), role="from", content="value")},
        {"shape": "sharegpt"},
    ),
    "alpaca": ({"instruction": "i", "input": "", "output": "o", "text": "all"}, {"shape": "alpaca"}),
    "prompt_completion": (PAIR, {"shape": "prompt_completion"}),
    "a class label is no verdict": ({**PAIR, "label": "sports"}, {"shape": "prompt_completion"}),
    "kto": ({**PAIR, "label": "yes"}, {"shape": "kto"}),
    "preference": ({"prompt": "p", "chosen": "a", "rejected": "b"}, {"shape": "preference"}),
    "preference without prompt": ({"chosen": "a b", "rejected": "a c"}, {"shape": "preference"}),
    "stepwise": ({"prompt": "p", "completions": ["a"], "labels": [True]}, {"shape": "stepwise"}),
    "text": ({"text": "words", "url": "u"}, {"shape": "text"}),
    "tokens": ({"input_ids": [1, 2], "text": "words"}, {"shape": "tokens"}),
    "question and answer": (
        {"Question": "q", "Answer": "a", "id": 3},
        {"shape": "prompt_completion", "columns": {"prompt": "Question", "completion": "Answer"}},
    ),
    "question, answer and context": (
        {"context": "c", "question": "q", "answer": "a"},
        {
            "shape": "prompt_completion",
            "columns": {"prompt": "{context}\n\n{question}", "completion": "answer"},
        },
    ),
    "instruction and response": (
        {"instruction": "q", "response": "a", "system": "s"},
        {
            "shape": "prompt_completion",
            "columns": {"prompt": "instruction", "completion": "response", "system": "system"},
        },
    ),
    "a pair of other names": (
        {"question": "q", "response_chosen": "a", "response_rejected": "b"},
        {
            "shape": "preference",
            "columns": {"prompt": "question", "chosen": "response_chosen", "rejected": "response_rejected"},
        },
    ),
    "turns of other names": (
        {"dialog": said(("Customer", "q"), ("Agent", "a"), role="speaker", content="text")},
        {
            "shape": "sharegpt",
            "columns": {"conversations": "dialog"},
            "role_key": "speaker",
            "content_key": "text",
            "roles": {"Agent": "assistant", "Customer": "user"},
        },
    ),
    "odd speakers": (
        {"conversations": said(("Customer", "q"), ("support", "a"), role="from", content="value")},
        {"shape": "sharegpt", "roles": {"Customer": "user", "support": "assistant"}},
    ),
    "speakers of another shape": (
        {"messages": said(("human", "q"), ("gpt", "a"))},
        {"shape": "messages", "roles": {"gpt": "assistant", "human": "user"}},
    ),
    "text of another name": ({"content": "words", "n": 4}, {"shape": "text", "columns": {"text": "content"}}),
    "a text and its class": (
        {"text": "Where is my card?", "category": "card_arrival", "url": "u"},
        {"shape": "prompt_completion", "columns": {"prompt": "text", "completion": "category"}},
    ),
    "a number is no answer": ({"text": "words", "label": 3}, {"shape": "text"}),
    "a long text is no class": ({"text": "words", "label": "w" * 101}, {"shape": "text"}),
    "the only column": ({"sentence_de": "Worte"}, {"shape": "text", "columns": {"text": "sentence_de"}}),
}


@pytest.mark.parametrize("case", sorted(CASES))
def test_the_shape_is_told_and_the_spec_reads_the_rows(inspect: Inspect, tmp_path: Path, case: str) -> None:
    record, expected = CASES[case]
    found = inspect("rows.jsonl", [record] * 5)
    assert found.chosen.guess.section() == expected
    assert (found.read, found.chosen.rows, found.chosen.rejected, found.reject_rate) == (5, 5, 0, 0.0)
    assert found.chosen.guess.why
    rows = rows_by_spec(found, tmp_path)
    assert [row.id for row in rows if isinstance(row, Row)] == [found.chosen.samples[0].id] * 5


def test_the_spec_reads_every_format_again(
    inspect: Inspect, written: Callable[..., str], form: str, tmp_path: Path
) -> None:
    records = [{"question": f'q"{n}; é', "answer": f"a,{n}\nb", "topic": "x"} for n in range(4)]
    found = inspect(written(form, records))
    assert found.chosen.rows == len(rows_by_spec(found, tmp_path)) == 4
    assert all(isinstance(row, Row) for row in rows_by_spec(found, tmp_path))


def test_conversations_in_cells_of_csv_are_json(
    inspect: Inspect, written: Callable[..., str], tmp_path: Path
) -> None:
    chosen, rejected = said(("user", "q"), ("assistant", "a")), said(("user", "q"), ("assistant", "b"))
    found = inspect(written("csv", [{"chosen": chosen, "rejected": rejected}] * 3))
    assert found.chosen.guess.section() == {
        "shape": "preference",
        "json_columns": ["chosen", "rejected"],
    }
    assert [row.kind for row in rows_by_spec(found, tmp_path) if isinstance(row, Row)] == ["preference"] * 3


def test_all_rows_count_and_the_first_exceptions_are_named(inspect: Inspect, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{**PAIR, "n": n} for n in range(3000)]
    rows[2500] = {"prompt": "p"}
    rows[2700] = {"prompt": "p", "completion": 7}
    rows[2900] = {"text": "other"}
    found = inspect("rows.jsonl", rows)
    assert (found.chosen.rows, found.chosen.rejected) == (2997, 3)
    assert [fault.line for fault in found.chosen.first_rejects] == [2501, 2701, 2901]
    assert "no 'completion'" in found.chosen.first_rejects[0].reason
    assert found.reject_rate == pytest.approx(0.001)
    assert "max_reject_rate" not in spec_text(found, "x")
    assert sum(isinstance(one, Reject) for one in rows_by_spec(found, tmp_path)) == 3


def test_of_two_readings_the_one_with_more_rows_is_chosen_and_both_are_shown(inspect: Inspect) -> None:
    rows = [{"prompt": "p", "completion": "c"}] * 3 + [{"text": "t"}] * 7
    found = inspect("rows.jsonl", rows)
    assert [(tally.guess.shape, tally.rows, tally.rejected) for tally in found.readings] == [
        ("text", 7, 3),
        ("prompt_completion", 3, 7),
    ]
    assert "max_reject_rate: 0.32  # 30.0% of the rows are faulty" in spec_text(found, "x")


def test_a_stated_shape_is_the_only_reading(inspect: Inspect) -> None:
    found = inspect("rows.jsonl", [{**PAIR, "text": "t"}] * 3, shape="text")
    assert [tally.rows for tally in found.readings] == [3]
    assert found.chosen.kinds == {"text": 3}


def test_facts_about_lengths_groups_and_keys(inspect: Inspect) -> None:
    rows = [
        {"prompt": "p" * n, "completion": "c" * 2 * n, "topic": "ab"[n % 2], "user_id": f"u{n % 30}"}
        for n in range(1, 101)
    ]
    found = inspect("rows.jsonl", rows)
    tally = found.chosen
    assert (max(tally.prompt_lengths), max(tally.answer_lengths)) == (100, 200)
    assert tally.turns == {2: 100}
    assert tally.ignored_keys == {"topic": 100, "user_id": 100}
    text = spec_text(found, "x")
    assert "# group_by: user_id  # rows of one value stay on one side; 30 values" in text
    assert "# tags: [topic]" in text
    assert "shares: {train: 0.8, validation: 0.05, test: 0.15}" in text


def test_few_groups_are_not_split(inspect: Inspect) -> None:
    found = inspect("rows.jsonl", [{"prompt": "the same", "completion": f"c{n}"} for n in range(200)])
    assert "shares: {train: 1.0}  # 1 groups are too few to split" in spec_text(found, "x")


def test_quotes_that_are_plain_characters_are_noticed(inspect: Inspect, tmp_path: Path) -> None:
    lines = [f'"Hm" he said {n}\tanswer {n}\n' for n in range(50)]
    found = inspect("rows.tsv", ("prompt\tcompletion\n" + "".join(lines)).encode())
    assert (found.chosen.rows, found.source.quoted) == (50, False)
    assert "quoted: false" in spec_text(found, "x")
    rows = rows_by_spec(found, tmp_path)
    assert isinstance(rows[0], Row)
    assert rows[0].messages[0]["content"] == '"Hm" he said 0'


def test_json_lines_in_an_eight_bit_encoding_are_noticed(inspect: Inspect, tmp_path: Path) -> None:
    rows = [{"prompt": "größe", "completion": f"süß {n}"} for n in range(5)]
    raw = b"".join(json.dumps(row, ensure_ascii=False).encode("cp1252") + b"\n" for row in rows)
    found = inspect("rows.jsonl", raw)
    assert (found.chosen.rows, found.source.encoding) == (5, "cp1252")
    assert "encoding: cp1252" in spec_text(found, "x")
    assert all(isinstance(row, Row) for row in rows_by_spec(found, tmp_path))


def test_what_fits_no_shape_says_which_keys_there_are(inspect: Inspect) -> None:
    with pytest.raises(UserError, match=r"no shape fits the keys of the rows: en, de") as caught:
        inspect("rows.jsonl", [{"en": "a", "de": "b"}] * 3)
    assert "source.columns" in str(caught.value)
    with pytest.raises(UserError, match=r"there are no rows in rows\.jsonl"):
        inspect("rows.jsonl", b"\n\n")
    with pytest.raises(UserError, match="2 of 2 rows cannot be read: not valid JSON"):
        inspect("rows.jsonl", b"x\ny\n")
    with pytest.raises(UserError, match="for example line 1: 'label' is 'x'"):
        inspect("rows.jsonl", [{"messages": 7, "label": "x"}], shape="kto")


def test_only_the_first_rows_when_asked(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(PAIR) + "\n" + "broken\n" * 9)
    section = FilesSource(kind="files", files=["rows.jsonl"])
    found = inspect_files(source_files(section, tmp_path), section, max_rows=1)
    assert (found.read, found.complete, found.chosen.rows) == (1, False, 1)


@pytest.mark.parametrize(
    ("files", "name"),
    [
        (["data/My rows (v2).jsonl.gz"], "My_rows_v2"),
        (["a/b/"], "b"),
        (["owner/set.1"], "set.1"),
        (["*.csv"], "rows"),
        ([".hidden.parquet"], "hidden"),
    ],
)
def test_a_dataset_is_named_after_its_files(files: list[str], name: str) -> None:
    assert dataset_name(files) == name
