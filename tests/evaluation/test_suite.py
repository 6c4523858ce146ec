"""Suites are closed, hashed, and loadable without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from finetune.errors import UserError
from finetune.evaluation.scorers.checks import meets
from finetune.evaluation.suite import Suite, load_suite
from finetune.evaluation.suite_data import load_suite_data, read_items
from finetune.paths import find_declarative, shipped_names


def _changed(suite: Suite, old: str, new: str) -> Path:
    text = suite.path.read_text()
    assert old in text
    suite.path.write_text(text.replace(old, new))
    return suite.path


@pytest.mark.parametrize("name", shipped_names("eval"))
def test_every_shipped_suite_loads(name: str) -> None:
    suite = load_suite(name)
    assert suite.name == name
    assert len(suite.digest) == 64


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("decoding:", "decodin:", "did you mean 'decoding'"),
        ("max_new_tokens", "max_tokens", "unknown key 'decoding.max_tokens'"),
        ("primary_metric: exact_match", "primary_metric: exact", "no scorer gives 'exact'"),
        ("slot_f1]", "slot_f2]", "did you mean 'slot_f1'"),
        ("slot_f1]", "exact_match]", "two metrics of one name"),
        ("slot_f1]", "{scorer: slot_f1, parameters: {x: 1}}]", "takes no parameters"),
        ("{jsonl: items.jsonl}", "{jsonl: gone.jsonl}", "no items file"),
        ("{jsonl: items.jsonl}", "{split: test}", "one of spec (with split), jsonl, hub"),
        ("margin: 0.02", "margin: 2", "margin"),
        ("margin: 0.02", "confidence: 0.9999999999999999", "at most 0.9999"),
        ("[exact_match,", "[exact_mtch,", "no scorer 'exact_mtch'"),
    ],
)
def test_faults_are_named(suite: Suite, old: str, new: str, message: str) -> None:
    path = _changed(suite, old, new)
    with pytest.raises(UserError) as caught:
        load_suite(path)
    assert message in str(caught.value)
    assert path.name in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("max_new_tokens: 12", "max_new_tokens: 13"),
        ("Answer with JSON.", "Answer."),
        ("slot_f1]", "{scorer: slot_f1, metric: f1}]"),
        ("k: 2", "k: 3"),
        ("margin: 0.02", "margin: 0.03"),
    ],
)
def test_the_digest_changes_with_the_meaning(suite: Suite, old: str, new: str) -> None:
    assert load_suite(_changed(suite, old, new)).digest != suite.digest


def test_the_digest_ignores_comments_and_description(suite: Suite) -> None:
    before = suite.digest
    suite.path.write_text("# remark\ndescription: new words\n" + suite.path.read_text())
    assert load_suite(suite.path).digest == before


def test_the_digest_changes_with_the_items_file(suite: Suite) -> None:
    before = suite.digest
    assert suite.items_file is not None
    suite.items_file.write_text(suite.items_file.read_text().replace('"q"', '"r"'))
    assert suite.digest != before


def test_the_digest_changes_with_the_scorers_code(
    suite: Suite, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from finetune.evaluation.scorers import json_object

    before = suite.digest
    edited = tmp_path / "json_object.py"
    edited.write_text(Path(str(json_object.__file__)).read_text() + "\n# changed\n")
    monkeypatch.setattr(json_object, "__file__", str(edited))
    assert suite.digest != before


def test_loading_a_suite_leaves_torch_out() -> None:
    code = (
        "import sys; from finetune.evaluation.suite import load_suite; load_suite('home_intents').digest; "
        "sys.exit('torch' in sys.modules or 'scipy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_items_from_a_file_keep_their_order_and_tags(suite: Suite) -> None:
    assert suite.items_file is not None
    lines = [
        {
            "id": f"i{n}",
            "messages": [{"role": "user", "content": f"q{n}"}],
            "reference": "{}",
            "tags": {"kind": "a"},
        }
        for n in range(4)
    ]
    suite.items_file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    items = load_suite_data(suite, max_items=3).items
    assert [item.id for item in items] == ["i0", "i1", "i2"]
    assert items[0].tags == {"kind": "a"}
    assert items[0].cluster == "i0"


ASKED = {"id": "a", "prompt": "q", "reference": "x"}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"id": "a", "messages": [{"role": "user", "content": "q"}]}, "no 'reference'"),
        ({"id": "a", "messages": [], "reference": "x"}, "must be a list of"),
        ({"id": "a", "messages": [{"role": "user", "content": 3}], "reference": "x"}, "must be a list of"),
        ({"id": "a", "messages": [{"role": "user", "content": "q"}], "reference": 3}, "is not text"),
        (
            {"id": "a", "messages": [{"role": "user", "content": "q"}], "reference": "x", "refrence": 1},
            "unknown key",
        ),
        (
            {"id": "a", "messages": [{"role": "assistant", "content": "q"}], "reference": "x"},
            "must end before the answer",
        ),
        ([1], "not a JSON object"),
        (ASKED | {"id": None}, "'id' is None, not a name"),
        (ASKED | {"id": " "}, "'id' is ' ', not a name"),
        (ASKED | {"id": [1]}, "not a name"),
        (ASKED | {"cluster": None}, "'cluster' is None"),
        (ASKED | {"tags": ["a"]}, "'tags' must be a mapping"),
        (ASKED | {"tags": {"a": {"b": 1}}}, "'tags' must be a mapping"),
        (ASKED | {"tools": "weather"}, "'tools' must be a list"),
        (ASKED | {"tools": None}, "'tools' must be a list"),
        (ASKED | {"check": ["words"]}, "'check' must be a mapping"),
        (ASKED | {"check": {"words": float("nan")}}, "NaN and Infinity are not JSON"),
        (ASKED | {"prompt": "q\ud800"}, "half of a surrogate pair .*ud800"),
        (ASKED | {"id": "\udfff"}, "half of a surrogate pair"),
        ({"id": "a", "messages": [{"role": "usr", "content": "q"}], "reference": "x"}, "did you mean 'user'"),
        ({"id": "a", "messages": [{"role": "system", "content": "q"}], "reference": "x"}, "asks nothing"),
    ],
)
def test_faulty_items_are_named_by_number(tmp_path: Path, line: object, message: str) -> None:
    good = {"id": "b", "messages": [{"role": "user", "content": "q"}], "reference": "x"}
    path = tmp_path / "items.jsonl"
    path.write_text(json.dumps(good) + "\n" + json.dumps(line) + "\n")
    with pytest.raises(UserError, match=message) as caught:
        read_items(path)
    assert "item number 2" in str(caught.value)


def test_a_line_nested_too_deeply_is_a_fault_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "items.jsonl"
    path.write_text('{"id": "a", "check": ' + "[" * 50_000 + "]" * 50_000 + "}\n")
    with pytest.raises(UserError, match="not valid JSON"):
        read_items(path)


def test_many_faulty_lines_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "items.jsonl"
    path.write_text('{"id": "a"}\n' * 60)
    with pytest.raises(UserError) as caught:
        read_items(path)
    assert len(caught.value.faults) == 51
    assert caught.value.faults[-1].what == "10 more records make no item"


def test_numbers_as_tags_are_read_as_text(tmp_path: Path) -> None:
    path = tmp_path / "items.jsonl"
    path.write_text(json.dumps(ASKED | {"tags": {"level": 1}, "cluster": 3}) + "\n")
    item = read_items(path)[0]
    assert (item.tags, item.cluster) == ({"level": "1"}, "3")


def test_repeated_ids_and_empty_files_are_refused(suite: Suite) -> None:
    assert suite.items_file is not None
    suite.items_file.write_text(suite.items_file.read_text() * 2)
    with pytest.raises(UserError, match="more than once"):
        load_suite_data(suite)
    suite.items_file.write_text("")
    with pytest.raises(UserError, match="the suite has no items"):
        load_suite_data(suite)


def test_the_general_suite_accepts_its_own_references() -> None:
    items = load_suite_data(load_suite("general")).items
    assert len(items) >= 150
    assert all(meets(item.reference, item.check or {}) == 1.0 for item in items)
    assert len({item.content_hash for item in items}) == len(items)
    kinds = Counter(item.tags["kind"] for item in items)
    assert set(kinds) == {"facts", "arithmetic", "instructions", "translation", "summary", "refusal"}
    assert min(kinds.values()) >= 15


def test_the_general_suite_is_not_met_by_saying_nothing() -> None:
    """An empty answer, one word, and a JSON object of a task must fail nearly everything."""
    items = load_suite_data(load_suite("general")).items
    for answer in ("", "yes", '{"intent":"HassTurnOn","name":"lamp"}'):
        assert sum(meets(answer, item.check or {}) for item in items) <= 0.05 * len(items)


def test_the_forgetting_suite_is_text_of_many_kinds() -> None:
    items = load_suite_data(load_suite("forgetting")).items
    assert len(items) >= 50
    assert len({item.tags["kind"] for item in items}) >= 8
    assert len({item.reference for item in items}) == len(items)


def test_a_text_brings_no_messages(tmp_path: Path) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_text('{"id":"a","reference":"x"}\n')
    assert read_items(path, texts=True)[0].reference == "x"
    with pytest.raises(UserError, match="no 'messages'"):
        read_items(path)
    path.write_text('{"id":"a","reference":"x","messages":[]}\n')
    with pytest.raises(UserError, match="a text has no 'messages'"):
        read_items(path, texts=True)


def test_items_share_what_the_suite_says(suite: Suite) -> None:
    assert suite.items_file is not None
    lines = [
        {"id": f"i{n}", "messages": [{"role": "user", "content": f"q{n}"}], "reference": "{}", "cluster": f"c{n // 2}",
         "tags": {"kind": "odd" if n % 2 else "even"}}
        for n in range(4)
    ]  # fmt: skip
    suite.items_file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for key, expected in (
        ("group", ["c0", "c0", "c1", "c1"]),
        ("kind", ["even", "odd", "even", "odd"]),
        (None, ["i0", "i1", "i2", "i3"]),
    ):
        changed = suite.model_copy(update={"cluster": key})
        assert [item.cluster for item in load_suite_data(changed).items] == expected
    with pytest.raises(UserError, match="no tag 'colour' to cluster by"):
        load_suite_data(suite.model_copy(update={"cluster": "colour"}))


def test_a_suite_named_like_its_dataset_finds_the_dataset() -> None:
    suite = load_suite("home_intents")
    assert suite.items.spec == "home_intents"
    spec = find_declarative("data", suite.items.spec, relative_to=suite.path.parent)
    assert (spec.parent.name, spec.name) == ("data", "home_intents.yaml")
