"""Items are made of any columns, by templates, and a column that is missing or null is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from finetune.errors import UserError
from finetune.evaluation.item_source import ItemsSection
from finetune.evaluation.item_template import ColumnError, item_from_record
from finetune.evaluation.suite import load_suite
from finetune.evaluation.suite_data import load_suite_data, read_items

ARC = {
    "id": "Mercury_7",
    "question": "Which is a gas?",
    "choices": {"text": ["iron", "neon"], "label": ["A", "B"]},
    "answerKey": "B",
    "grade": 4,
    "note": None,
}


def _item(record: dict[str, Any] = ARC, *, texts: bool = False, **section: Any) -> Any:
    given = {"jsonl": "x.jsonl", "prompt": "question", "reference": "answerKey"} | section
    return item_from_record(record, ItemsSection(**given), number=3, source="arc", texts=texts)


def test_templates_and_columns_make_an_item() -> None:
    item = _item(
        prompt="{{ question }}\n{% for c in choices.text %}{{ choices.label[loop.index0] }}) {{ c }}\n{% endfor %}",
        reference="{{ choices.text[choices.label.index(answerKey)] }}",
        system="Grade {{ grade }}.",
        id="id",
        group="{{ grade }}th grade",
        tags={"grade": "grade"},
        check={"choices": "choices.text", "words": "grade"},
    )
    assert item.messages == (
        {"role": "system", "content": "Grade 4."},
        {"role": "user", "content": "Which is a gas?\nA) iron\nB) neon\n"},
    )
    assert (item.id, item.reference, item.cluster) == ("Mercury_7", "neon", "4th grade")
    assert (item.tags, item.check) == ({"grade": "4"}, {"choices": ["iron", "neon"], "words": 4})


def test_without_an_id_an_item_is_named_by_its_number() -> None:
    assert (_item().id, _item().cluster) == ("3", "3")


@pytest.mark.parametrize("text", ["42", "007", "null", "2024-01-05", " NA\r\n", "<b>&amp;</b>", "{{ x }}"])
def test_text_stays_as_it_is(text: str) -> None:
    assert _item({"question": text, "answerKey": text}).reference == text
    assert (
        _item({"question": text, "answerKey": text}, prompt="{{ question }}").messages[0]["content"] == text
    )


def test_a_text_is_its_reference_alone() -> None:
    item = _item(texts=True, reference="question", prompt=None)
    assert (item.messages, item.reference) == ((), "Which is a gas?")


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"reference": "answer_key"}, "items.reference: no column 'answer_key'; did you mean 'answerKey'"),
        ({"reference": "note"}, "the column 'note' is null"),
        ({"reference": "choices"}, "the column 'choices' is dict, not text"),
        ({"prompt": "{{ questoin }}"}, "items.prompt: 'questoin' is undefined; columns: id, question"),
        ({"prompt": "{{ choices.txt }}"}, "items.prompt: 'dict object' has no attribute 'txt'"),
        ({"prompt": "{{ note }}"}, "a field of the template is null"),
        ({"reference": "{{ choices.text[choices.label.index('Z')] }}"}, "items.reference: "),
        ({"check": {"choices": "choises.text"}}, "items.check.choices: 'choises' is undefined"),
        ({"tags": {"kind": "kind"}}, "items.tags.kind: no column 'kind'"),
        ({"prompt": None}, "items.prompt is not given"),
        ({"prompt": "{{ question.__class__.__mro__ }}"}, "items.prompt: "),
    ],
)
def test_a_record_without_the_field_is_told(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ColumnError) as caught:
        _item(**section)
    assert message in str(caught.value)


SUITE = """\
suite: 1
name: arc
task: choice
items:
  jsonl: arc.jsonl
  prompt: "{{ question }}"
  reference: "{{ choices.text[choices.label.index(answerKey)] }}"
  id: id
  check: {choices: choices.text}
few_shot: {k: 1, jsonl: shown.jsonl}
scorers: [choice_accuracy]
primary_metric: choice_accuracy
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    lines = [ARC, {**ARC, "id": "two", "answerKey": "A"}]
    (tmp_path / "arc.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "shown.jsonl").write_text(json.dumps({**ARC, "id": "x", "question": "Other?"}) + "\n")
    (tmp_path / "arc.yaml").write_text(SUITE)
    return tmp_path


def test_a_suite_reads_foreign_columns_and_examples(folder: Path) -> None:
    data = load_suite_data(load_suite(folder / "arc.yaml"))
    assert [(item.id, item.reference) for item in data.items] == [("Mercury_7", "neon"), ("two", "iron")]
    (row,) = data.few_shot_rows
    assert [turn["content"] for turn in row.messages] == ["Other?", "neon"]


def test_the_digest_holds_templates_and_examples(folder: Path) -> None:
    before = load_suite(folder / "arc.yaml").digest
    (folder / "shown.jsonl").write_text((folder / "shown.jsonl").read_text().replace("Other", "Another"))
    middle = load_suite(folder / "arc.yaml").digest
    (folder / "arc.yaml").write_text(SUITE.replace('"{{ question }}"', '"Q: {{ question }}"'))
    assert len({before, middle, load_suite(folder / "arc.yaml").digest}) == 3


def test_two_items_of_one_name_are_refused(folder: Path) -> None:
    (folder / "arc.jsonl").write_text((json.dumps(ARC) + "\n") * 2)
    with pytest.raises(UserError, match="'Mercury_7'"):
        load_suite_data(load_suite(folder / "arc.yaml"))


def test_the_first_faulty_records_are_named(folder: Path) -> None:
    (folder / "arc.jsonl").write_text('{"id": "a"}\n' * 7)
    with pytest.raises(UserError) as caught:
        load_suite_data(load_suite(folder / "arc.yaml"))
    assert len(caught.value.faults) == 6
    assert "arc.jsonl: record number 1: items.prompt: 'question' is undefined" in str(caught.value)
    assert "2 more records" in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"{{ question }}"', '"{{ question"', "arc.yaml: items.prompt: the template cannot be read"),
        (
            "choices: choices.text}",
            "choices: 'choices.text['}",
            "items.check.choices: the template cannot be read",
        ),
        ("  jsonl: arc.jsonl\n", "  hub: owner/name\n", "needs a commit or tag"),
        ("  jsonl: arc.jsonl\n", "  hub: owner/name\n  revision: main\n", "needs a commit or tag"),
        ("  jsonl: arc.jsonl\n", "  spec: home_intents\n", "are items already"),
        ("  jsonl: arc.jsonl\n", "  jsonl: arc.jsonl\n  include_path: x\n", "belong to lm_eval"),
        ("  id: id\n", "  idd: id\n", "did you mean 'id'"),
        ("shown.jsonl", "gone.jsonl", "no items file"),
    ],
)
def test_faults_of_the_section_are_placed(folder: Path, old: str, new: str, message: str) -> None:
    assert old in SUITE
    (folder / "arc.yaml").write_text(SUITE.replace(old, new))
    with pytest.raises(UserError) as caught:
        load_suite(folder / "arc.yaml")
    assert message in str(caught.value)


def test_a_prompt_is_one_user_turn(tmp_path: Path) -> None:
    path = tmp_path / "items.jsonl"
    path.write_text('{"id": "a", "prompt": "2 + 2?", "reference": "4"}\n')
    assert read_items(path)[0].messages == ({"role": "user", "content": "2 + 2?"},)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"id": "a", "reference": "4"}, "no 'messages'"),
        ({"id": "a", "prompt": "x", "messages": [], "reference": "4"}, "either 'messages' or 'prompt'"),
        ({"id": "a", "prompt": 4, "reference": "4"}, "'prompt' is not text"),
        ({"id": "a", "prompt": "", "reference": "4"}, "'prompt' is not text"),
        ({"id": "a", "promt": "x", "reference": "4"}, "unknown key 'promt'"),
    ],
)
def test_faulty_lines_are_named(tmp_path: Path, line: dict[str, Any], message: str) -> None:
    path = tmp_path / "items.jsonl"
    path.write_text(json.dumps(line) + "\n")
    with pytest.raises(UserError, match=message):
        read_items(path)
