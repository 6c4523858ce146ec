"""Train rows that hold what foreign evaluations ask leave the build; everything else of it stays as it was."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest

from finetune.data import decontaminate as module
from finetune.data.build import DatasetBuild, build_dataset
from finetune.data.card import card_of
from finetune.data.check import check_build
from finetune.data.decontaminate import decontaminate
from finetune.data.questions import Questions, messages_question
from finetune.errors import UserError
from finetune.paths import read_jsonl

Build = Callable[..., DatasetBuild]
RNG = random.Random(4)
TEXTS = [" ".join("".join(RNG.choices("abcdefghij", k=5)) for _ in range(20)) for _ in range(40)]


def rows(n: int) -> list[dict[str, Any]]:
    return [{"prompt": text, "completion": f"answer {number}"} for number, text in enumerate(TEXTS[:n])]


def asked(*texts: str, name: str = "bench") -> Questions:
    return Questions(name, f"digest of {texts}", [f"q{n}" for n in range(len(texts))], texts)


def test_a_build_without_hits_stays_as_it_is(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    made = build(rows(20))
    same, report = decontaminate(made, [asked(*TEXTS[30:])])
    assert same is made
    assert report == {
        "evaluations": {"bench": {"digest": asked(*TEXTS[30:]).digest, "questions": 10, "rows": 0}},
        "rows": [],
    }
    assert check_build(made).passed
    monkeypatch.setattr(module, "_search", lambda *given: pytest.fail("searched again"))
    assert decontaminate(made, [asked(*TEXTS[30:])]) == (made, report)
    assert decontaminate(made, []) == (made, {"evaluations": {}, "rows": []})


def test_rows_that_hold_a_question_are_left_out_and_listed(build: Build) -> None:
    made = build(rows(20), split={"shares": {"train": 0.8, "test": 0.2}})
    train = made.rows("train")
    held = [row.messages[0]["content"] for row in train[:3]]
    clean, report = decontaminate(
        made, [asked(*held[:2], *TEXTS[30:]), asked(held[1], held[2], name="other")]
    )
    assert clean.folder != made.folder
    assert {row.id for row in clean.iter_rows("train")} == {row.id for row in train[3:]}
    assert {hit["row"]: (hit["evaluation"], hit["question"]) for hit in report["rows"]} == {
        train[0].id: ("bench", "q0"),
        train[1].id: ("bench", "q1"),
        train[2].id: ("other", "q1"),
    }
    assert report["evaluations"]["other"]["rows"] == 2
    ledger = clean.manifest["ledger"]
    assert ledger["dropped"] == {"quotes_bench": 2, "quotes_other": 1}
    assert ledger["kept"] == made.manifest["ledger"]["kept"] - 3
    entries = read_jsonl(clean.folder / "ledger.jsonl")
    assert {entry["because_of"] for entry in entries if entry["reason"] == "quotes_bench"} == {"q0", "q1"}
    assert clean.rows("test") == made.rows("test")
    assert check_build(clean).passed
    assert check_build(made).passed
    card = (clean.folder / "README.md").read_text()
    assert card == card_of(clean.manifest) != (made.folder / "README.md").read_text()
    assert "| quotes_bench | 2 |" in card
    again, _ = decontaminate(made, [asked(*held[:2], *TEXTS[30:]), asked(held[1], held[2], name="other")])
    assert again.manifest == clean.manifest


def test_order_of_rows_is_kept_and_repeats_are_one_row(build: Build) -> None:
    sources = [
        {"kind": "jsonl", "files": ["rows.jsonl"], "weight": 1},
        {"kind": "jsonl", "files": ["few.jsonl"], "weight": 1},
    ]
    made = build(rows(20))
    folder = made.folder.parent.parent
    (folder / "few.jsonl").write_text(
        "".join(f'{{"prompt": "{text}", "completion": "few"}}\n' for text in TEXTS[20:25])
    )
    spec = {
        "name": "mix",
        "source": sources,
        "split": {"shares": {"train": 1.0}},
        "select": {"max_repeats": 2},
    }
    (folder / "mix.yaml").write_text(json.dumps(spec))
    mixed = build_dataset(folder / "mix.yaml", folder / "builds")
    assert mixed.manifest["repeated"] == 5
    clean, report = decontaminate(mixed, [asked(TEXTS[20], TEXTS[21])])
    assert len(report["rows"]) == 2
    assert clean.manifest["repeated"] == 3
    left = [
        row.id for row in mixed.iter_rows("train") if row.id not in {hit["row"] for hit in report["rows"]}
    ]
    assert [row.id for row in clean.iter_rows("train")] == left
    assert check_build(clean).passed


def test_nothing_left_is_a_user_error(build: Build) -> None:
    made = build(rows(3))
    with pytest.raises(UserError, match="every train row holds a question"):
        decontaminate(made, [asked(*TEXTS[:3])])
    assert not [path for path in made.folder.parent.glob(".*") if path.is_dir()]


def test_what_a_conversation_asks() -> None:
    turns = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    assert (
        messages_question(turns)
        == messages_question([*turns, {"role": "assistant", "content": "d"}])
        == "a\nb\nc"
    )
