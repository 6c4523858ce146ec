"""What no key shows: near duplicates and quoted questions on two sides go from train; a shared instruction is no leak."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from finetune.data.build import DatasetBuild, build_dataset
from finetune.data.check import check_build
from finetune.errors import UserError
from finetune.paths import read_jsonl, write_jsonl

Build = Callable[..., DatasetBuild]
HALF = {"train": 0.5, "test": 0.5}
OFF = {"near_duplicates": None, "ngram": None, "any_ngram": None}


def words(rng: random.Random, count: int) -> list[str]:
    return ["".join(rng.choices("abcdefghijklmnop", k=rng.randint(3, 8))) for _ in range(count)]


def row(question: str, answer: str = "yes", **keys: str) -> dict[str, Any]:
    return {"prompt": question, "completion": answer, **keys}


def pairs_of(
    n: int, change: Callable[[list[str], random.Random], list[str]], length: int = 25
) -> list[dict[str, Any]]:
    """n questions and one changed copy of each, in groups of their own."""
    rng = random.Random(5)
    made = []
    for number in range(n):
        question = words(rng, length)
        made.append(row(" ".join(question), f"first {number}"))
        made.append(row(" ".join(change(question, rng)), f"second {number}"))
    return made


def one_word_changed(question: list[str], rng: random.Random) -> list[str]:
    place = rng.randrange(len(question))
    return [*question[:place], "otherwise", *question[place + 1 :]]


def quoted(question: list[str], rng: random.Random) -> list[str]:
    return [*words(rng, 90), *question, *words(rng, 90)]


def dropped(made: DatasetBuild) -> dict[str, int]:
    return dict(made.manifest["ledger"]["dropped"])


def unseen_between(question: list[str], rng: random.Random) -> list[str]:
    unseen = ["\u00ad", "\u200b", "\u200d", "\u2060", "\ufeff", "\u200e"]
    return [word[:2] + rng.choice(unseen) + word[2:] for word in question]


@pytest.mark.parametrize("length", [3, 25])
def test_characters_that_nobody_sees_hide_no_question_from_the_split(build: Build, length: int) -> None:
    made = build(pairs_of(40, unseen_between, length), split={"shares": HALF})
    sides: dict[str, set[str]] = {}
    for name in ("train", "test"):
        for row in made.rows(name):
            sides.setdefault(row.answer.split()[1], set()).add(name)
    assert {len(names) for names in sides.values()} == {1}


def test_questions_with_one_word_changed_are_never_on_two_sides(build: Build) -> None:
    rows = pairs_of(60, one_word_changed)
    made = build(rows, split={"shares": HALF})
    assert dropped(made).keys() == {"near_duplicate_on_other_side"}
    assert 15 <= dropped(made)["near_duplicate_on_other_side"] <= 45  # half of the pairs fall apart
    assert check_build(made).passed
    entries = [entry for entry in read_jsonl(made.folder / "ledger.jsonl") if entry["kind"] == "dropped"]
    test_ids = {kept.id for kept in made.iter_rows("test")}
    assert all(entry["side"] == "train" and entry["because_of"] in test_ids for entry in entries)


@pytest.mark.parametrize(("change", "kind"), [(one_word_changed, "near"), (quoted, "ngram")])
def test_check_finds_what_an_unguarded_build_leaks(build: Build, change: Any, kind: str) -> None:
    made = build(pairs_of(40, change), split={"shares": HALF, "guard": OFF})
    assert dropped(made) == {}
    assert check_build(made).passed  # it says which kinds were looked for
    made.manifest["guard"] = {}
    result = check_build(made)
    assert not result.passed
    leaks = result.leaks[kind]
    assert {leak.kind for leak in leaks} == {kind}
    assert 10 <= len(leaks) <= 30
    assert {(leak.first_side, leak.second_side) for leak in leaks} == {("test", "train")}


def test_rows_that_quote_a_test_question_are_dropped(build: Build) -> None:
    made = build(pairs_of(40, quoted), split={"shares": HALF})
    assert dropped(made).keys() == {"quotes_other_side"}
    assert check_build(made).passed


def test_a_question_quoted_in_an_answer_is_a_leak_too(build: Build) -> None:
    rng = random.Random(6)
    rows = []
    for number in range(30):
        question = " ".join(words(rng, 20))
        rows += [row(question, "no"), row(f"tell me something {number} {number * number}", question)]
    made = build(rows, split={"shares": HALF})
    assert dropped(made).keys() == {"quotes_other_side"}


def test_evaluation_sides_are_kept_apart_as_well(build: Build) -> None:
    shares = {"train": 0.25, "validation": 0.25, "test": 0.25, "regressions": 0.25}
    made = build(pairs_of(60, one_word_changed), split={"shares": shares})
    assert check_build(made).passed
    entries = [entry for entry in read_jsonl(made.folder / "ledger.jsonl") if entry["kind"] == "dropped"]
    assert {entry["side"] for entry in entries} == {"train", "validation", "test"}
    order = ["regressions", "test", "validation", "train"]
    assert all(order.index(entry["other_side"]) < order.index(entry["side"]) for entry in entries)


INSTRUCTION = (
    "You are a helpful assistant of the support desk. Read the ticket below with care and say which one of the "
    "following topics it belongs to: billing, shipping, returns, accounts, or other. Answer with one word only. Ticket:"
)


def test_an_instruction_that_all_questions_share_is_no_leak(build: Build) -> None:
    """Without care all rows would be near duplicates, and every pair would share a run of thirteen words."""
    rng = random.Random(7)
    rows = [row(f"{INSTRUCTION} {' '.join(words(rng, 12))}", f"topic {n}") for n in range(150)]
    made = build(rows, split={"shares": HALF})
    assert dropped(made) == {}
    assert check_build(made).passed


def test_near_duplicates_behind_a_shared_instruction_are_found(build: Build) -> None:
    rows = pairs_of(40, one_word_changed)
    rows = [row(f"{INSTRUCTION} {given['prompt']}", given["completion"]) for given in rows]
    made = build(rows, split={"shares": HALF})
    assert 10 <= dropped(made)["near_duplicate_on_other_side"] <= 30
    assert check_build(made).passed


def test_short_questions_that_share_a_frame_stay(build: Build) -> None:
    rng = random.Random(8)
    names = sorted({" ".join(words(rng, 1)).title() for _ in range(200)})
    rows = [row(f"What is the name of the capital city of {name}?", name) for name in names]
    made = build(rows, split={"shares": HALF})
    assert dropped(made) == {}


def test_train_rows_are_not_dropped_for_questions_that_are_not_asked(build: Build) -> None:
    rows = pairs_of(60, one_word_changed)
    limited = build(rows, split={"shares": HALF}, select={"rows": {"test": 5}})
    assert dropped(limited).get("near_duplicate_on_other_side", 0) <= 5
    assert len(limited.rows("test")) == 5
    assert check_build(limited).passed


def test_train_rows_that_repeat_another_evaluation_are_dropped_and_named(
    build: Build, tmp_path: Path
) -> None:
    rng = random.Random(9)
    asked = [" ".join(words(rng, 20)) for _ in range(5)]
    write_jsonl(
        tmp_path / "bench.jsonl",
        [
            {"id": n, "messages": [{"role": "user", "content": text}], "reference": "r"}
            for n, text in enumerate(asked)
        ],
    )
    rows = [row(" ".join(words(rng, 20))) for _ in range(30)] + [row(text.upper()) for text in asked[:3]]
    made = build(rows, split={"guard": {"files": ["bench.jsonl"]}, "shares": {"train": 1.0}})
    assert dropped(made) == {"quotes_evaluation_file": 3}
    entries = [entry for entry in read_jsonl(made.folder / "ledger.jsonl") if entry["kind"] == "dropped"]
    assert {entry["because_of"] for entry in entries} == {f"bench.jsonl:{n}" for n in (1, 2, 3)}
    write_jsonl(tmp_path / "bench.jsonl", [{"question": asked[0]}])
    again = build(rows, split={"guard": {"files": ["bench.jsonl"]}, "shares": {"train": 1.0}})
    assert dropped(again) == {"quotes_evaluation_file": 1}, "the build's key covers the file"


def test_an_evaluation_without_questions_is_named(build: Build, tmp_path: Path) -> None:
    (tmp_path / "bench.jsonl").write_text('{"label": 1}\n')
    with pytest.raises(UserError, match=r"bench\.jsonl:1: the row asks nothing"):
        build([row("a")], split={"guard": {"files": ["bench.jsonl"]}})


def test_pinned_rows_are_the_regressions_and_leave_train(build: Build, tmp_path: Path) -> None:
    rng = random.Random(10)
    questions = [" ".join(words(rng, 15)) for _ in range(30)]
    rows = [row(question, f"answer {n}") for n, question in enumerate(questions)]
    (tmp_path / "pinned.jsonl").write_bytes(
        b"".join(
            json.dumps(given).encode() + b"\n" for given in (row(questions[0].upper(), "A"), row("own", "B"))
        )
    )
    made = build(
        rows, split={"shares": {"train": 1.0}, "pinned": "pinned.jsonl"}, select={"rows": {"regressions": 1}}
    )
    assert {kept.answer for kept in made.iter_rows("regressions")} == {"A", "B"}
    assert dropped(made) == {"prompt_on_other_side": 1}
    assert made.manifest["ledger"]["read"] == 32
    # The file of a build may be pinned as it is: rows keep their ids, groups and tags.
    first = made.rows("regressions")
    (tmp_path / "pinned.jsonl").write_bytes((made.folder / "regressions.jsonl").read_bytes())
    again = build(rows[5:], split={"shares": {"train": 1.0}, "pinned": "pinned.jsonl"})
    assert again.rows("regressions") == first


def test_a_faulty_pinned_row_fails_the_build(build: Build, tmp_path: Path) -> None:
    (tmp_path / "pinned.jsonl").write_text('{"prompt": "p"}\n')
    with pytest.raises(UserError, match="1 of 1 rows are faulty"):
        build([row("a")], split={"pinned": "pinned.jsonl"})
    with pytest.raises(UserError, match=r"mine\.yaml:1:\d+: no such file"):
        build([row("a")], split={"pinned": "elsewhere.jsonl"})


def test_a_tampered_ledger_is_noticed(build: Build) -> None:
    made = build([row(f"q{n}") for n in range(5)] + [row("q0")])
    ledger = made.folder / "ledger.jsonl"
    assert check_build(made).passed
    ledger.write_bytes(b"")
    changed, sums = check_build(made).damage
    assert changed.where == str(ledger)
    assert "the ledger does not add up: read 6, but 5 rows" in sums.what


def test_changed_bytes_of_a_side_are_noticed(build: Build) -> None:
    made = build([row(f"q{n}") for n in range(5)])
    path = made.folder / "train.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"source":"rows.jsonl:1"', b'"source":"rows.jsonl:9"'))
    (fault,) = check_build(made).damage  # what the rows say is the same; where they came from is not
    assert fault.where == str(path)


def test_sources_with_weights_are_mixed(build: Build, tmp_path: Path) -> None:
    for name, n in (("a", 40), ("b", 10)):
        write_jsonl(tmp_path / f"{name}.jsonl", [row(f"{name} {i} {i * i}", name) for i in range(n)])
    sources = [{"kind": "jsonl", "files": [f"{name}.jsonl"], "weight": 1} for name in "ab"]

    def mixed(**select: Any) -> tuple[int, int]:
        spec = {"name": "mix", "source": sources, "split": {"shares": {"train": 1.0}}, "select": select}
        (tmp_path / "mix.yaml").write_text(json.dumps(spec))
        made = build_dataset(tmp_path / "mix.yaml", tmp_path / "builds")
        assert check_build(made).passed
        answers = [kept.answer for kept in made.iter_rows("train")]
        assert made.manifest["repeated"] == len(answers) - made.manifest["ledger"]["kept"]
        return answers.count("a"), answers.count("b")

    assert mixed() == (10, 10)
    assert mixed(max_repeats=3) == (30, 30)
    sources[0].pop("weight")
    with pytest.raises(UserError, match="give every source a weight, or none"):
        mixed()
    sources[1].pop("weight")
    assert mixed() == (40, 10)


def test_sides_of_a_build_are_read_one_row_at_a_time(build: Build) -> None:
    made = build([row(f"q{n}") for n in range(5)])
    rows = made.iter_rows("train")
    first = next(rows)
    assert [first, *rows] == made.rows("train")
    (made.folder / "train.jsonl").write_text("{}\n")
    with pytest.raises(UserError, match=r"train\.jsonl:1: not a row"):
        made.rows("train")
