"""The `curate` section: what is found is told in the manifest, what is dropped is in the ledger, and both add up."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from finetune.data.build import DatasetBuild
from finetune.data.check import check_build
from finetune.data.curate.account import account_for_answers
from finetune.data.curate.flags import flag_rows
from finetune.data.marks import MarkFile
from finetune.errors import UserError
from finetune.paths import read_jsonl

Build = Callable[..., DatasetBuild]


def row(question: str, answer: str, **keys: str) -> dict[str, Any]:
    return {"prompt": question, "completion": answer, **keys}


def plain_rows(n: int) -> list[dict[str, Any]]:
    rng = random.Random(3)
    words = [
        "amber",
        "birch",
        "cedar",
        "dune",
        "ember",
        "fjord",
        "grove",
        "harbor",
        "island",
        "jungle",
        "kelp",
        "lagoon",
        "meadow",
        "north",
        "ocean",
    ]
    return [
        row(" ".join(rng.choices(words, k=9)) + f" {n}", " ".join(rng.choices(words, k=6)) + ".")
        for n in range(n)
    ]


def left_out(made: DatasetBuild) -> dict[str, list[dict[str, Any]]]:
    entries: dict[str, list[dict[str, Any]]] = {}
    for entry in read_jsonl(made.folder / "ledger.jsonl"):
        entries.setdefault(entry["reason"], []).append(entry)
    assert {reason: len(found) for reason, found in entries.items()} == made.manifest["ledger"]["dropped"]
    return entries


@pytest.mark.parametrize("near", [None, {"threshold": 0.8}])
def test_exact_duplicates_are_left_out_reported_or_left_alone(
    build: Build, near: dict[str, Any] | None
) -> None:
    rows = plain_rows(30)
    given = [*rows, *rows[:20], *rows[:20]]
    split = {"shares": {"train": 0.5, "test": 0.5}}
    counts: dict[str, int] = {}
    for action in ("drop", "report", "off"):
        steps = {"exact_duplicates": action} | (
            {"near_duplicates": near} if near and action == "drop" else {}
        )
        made = build(given, curate=steps, split=split)
        ledger = made.manifest["ledger"]
        assert set(ledger["dropped"]) <= {"duplicate"}
        assert ledger["kept"] + ledger["dropped"].get("duplicate", 0) == len(given)
        texts = [(side, row.id) for side in ("train", "test") for row in made.rows(side)]  # type: ignore[arg-type]
        repeated = len(texts) - len(set(texts))
        tested = [name for side, name in texts if side == "test"]
        assert len(tested) == len(set(tested)), "what is measured is asked once"
        assert check_build(made).passed
        told = made.manifest["curation"].get("exact_duplicates")
        counts[action] = repeated
        if action == "off":
            assert told is None
            continue
        assert (told["action"], told["rows"]) == (action, 40)
        assert all(entry["row"] != entry["like"] for entry in told["first"]) and len(told["first"]) == 5
    assert counts["drop"] == 0 < counts["report"] == counts["off"] < 40


def test_near_duplicates_are_left_out_and_name_the_row_that_stays(build: Build) -> None:
    rows = plain_rows(30)
    close = [row(given["prompt"] + " indeed", given["completion"]) for given in rows[:8]]
    made = build([*rows, *close, rows[9]], curate={"near_duplicates": {"threshold": 0.7}})
    entries = left_out(made)
    assert {reason: len(found) for reason, found in entries.items()} == {"near_duplicate": 8, "duplicate": 1}
    kept = {held.id for held in made.iter_rows("train")}
    assert {entry["because_of"] for found in entries.values() for entry in found} <= kept
    found = made.manifest["curation"]["near_duplicates"]
    assert (found["action"], found["rows"], len(found["first"])) == ("drop", 8, 5)


def test_a_step_that_only_reports_drops_nothing(build: Build) -> None:
    rows = plain_rows(10)
    close = [row(given["prompt"] + " indeed", given["completion"]) for given in rows]
    made = build([*rows, *close], curate={"near_duplicates": {"threshold": 0.7, "action": "report"}})
    assert len(made.rows("train")) == 20
    assert made.manifest["curation"]["near_duplicates"]["rows"] == 10


def test_contradictions_are_reported_or_dropped(build: Build) -> None:
    rows = [
        *plain_rows(10),
        row("how many legs", "four"),
        row("How many  legs", "six"),
        row("and eyes", "two"),
    ]
    rows += [row("and eyes", "TWO ")]  # the same answer, folded
    reported = build(rows)
    found = reported.manifest["curation"]["contradictions"]
    assert (found["questions"], found["rows"]) == (1, 2)
    assert {one["answer"] for one in found["first"][0]} == {"four", "six"}
    assert "1 questions have different answers, in 2 rows" in reported.manifest["warnings"]
    dropped = build(rows, curate={"contradictions": "drop"})
    assert len(left_out(dropped)["contradiction"]) == 2
    assert "contradictions" not in build(rows, curate={"contradictions": "off"}).manifest["curation"]


def test_refusals_and_empty_answers_are_flagged_or_dropped(build: Build) -> None:
    rows = [*plain_rows(5), row("x", "I'm sorry, but I can't help with that."), row("y", "…")]
    held = build(rows).manifest
    assert held["curation"]["refusals"]["rows"] == held["curation"]["empty_answers"]["rows"] == 1
    assert {"1 answers are refusals", "1 answers are empty answers"} <= set(held["warnings"])
    made = build(rows, curate={"refusals": "drop", "empty_answers": "drop"})
    assert {reason: len(found) for reason, found in left_out(made).items()} == {
        "refusal": 1,
        "empty_answer": 1,
    }


def test_a_call_of_a_tool_is_no_empty_answer_and_has_no_form_of_a_text(build: Build) -> None:
    def called(city: str) -> dict[str, Any]:
        call = {"type": "function", "function": {"name": "weather", "arguments": {"city": city}}}
        turns = [{"role": "user", "content": "Will it rain?"}, {"role": "assistant", "tool_calls": [call]}]
        return {"messages": turns, "tools": [call]}

    made = build([*plain_rows(10), called("Oslo"), called("Bergen")], curate={"empty_answers": "drop"})
    assert made.manifest["ledger"]["dropped"] == {}
    assert made.manifest["warnings"] == ["1 questions have different answers, in 2 rows"]
    assert made.manifest["curation"]["consistency"]["measured_rows"] == 10
    rows = made.rows("train")
    flags = flag_rows(rows)
    assert [flags[place] for place, row in enumerate(rows) if row.tools] == [["contradiction"]] * 2
    account = account_for_answers(rows)
    assert (len(account.rows), account.empty, account.warnings) == (10, [], [])


def test_calls_of_tools_tell_rows_apart(build: Build) -> None:
    """Rows that differ in what they call are no near duplicates, however alike their words are."""

    def called(city: str) -> dict[str, Any]:
        arguments = {"city": city, "days": [{"day": f"{city} {n}", "hours": [n, n + 1]} for n in range(9)]}
        call = {"function": {"name": "weather", "arguments": arguments}}
        turns = [
            {"role": "user", "content": "Will it rain there?"},
            {"role": "assistant", "tool_calls": [call]},
        ]
        return {"messages": turns, "id": city}

    made = build([called("Oslo"), called("Bergen")], curate={"near_duplicates": {"threshold": 0.8}})
    assert made.manifest["ledger"]["dropped"] == {}


def test_personal_data_is_masked_before_anything_is_written(build: Build) -> None:
    rows = [*plain_rows(5), row("my mail is jane.roe@mailbox.net", "noted jane.roe@mailbox.net")]
    made = build(rows, curate={"personal_data": "mask"})
    assert made.manifest["curation"]["personal_data"] == {
        "action": "mask",
        "rows": 1,
        "findings": {"EMAIL": 2},
    }
    assert not [path for path in made.folder.iterdir() if "jane" in path.read_text()]
    (masked,) = [held for held in made.iter_rows("train") if "[EMAIL]" in held.answer]
    assert masked.messages[0]["content"] == "my mail is [EMAIL]"
    reported = build(rows, curate={"personal_data": "report"})
    assert "1 rows hold personal data: EMAIL 2" in reported.manifest["warnings"]
    dropped = build(rows, curate={"personal_data": "drop"})
    assert left_out(dropped)["personal_data"][0]["kinds"] == ["EMAIL"]


def test_answers_in_other_languages_are_dropped(build: Build) -> None:
    german = row("Frage", "Das ist ein langer deutscher Satz über das Wetter am kommenden Wochenende.")
    english = row("question", "This is a rather long English sentence about the weather at the weekend.")
    made = build([german, english, row("short", "42")], curate={"languages": ["en"]})
    (entry,) = left_out(made)["other_language"]
    assert entry["language"] == "de"
    assert {held.answer for held in made.iter_rows("train")} == {english["completion"], "42"}


VERIFIERS = """
def short(row):
    answer = row["messages"][-1]["content"]
    return {"keep": len(answer) < 20, "reason": f"{len(answer)} characters"}

def broken(row):
    raise ValueError("no such key")
"""


def test_verifiers_leave_rows_out_with_their_reason(build: Build, tmp_path: Path) -> None:
    (tmp_path / "judge.py").write_text(VERIFIERS)
    rows = [row(f"q{n}", "a" * (10 + 10 * (n % 2)) + str(n)) for n in range(20)]
    judge = {"name": "short", "function": "judge.py:short"}
    made = build(rows, curate={"verifiers": [judge]})
    entries = left_out(made)["rejected_by_short"]
    assert len(entries) == 10
    assert {entry["why"] for entry in entries} == {"21 characters", "22 characters"}
    (tmp_path / "judge.py").write_text(VERIFIERS.replace("< 20", "< 22"))
    again = build(rows, curate={"verifiers": [judge]})
    assert len(left_out(again)["rejected_by_short"]) == 5, "the build's key covers the code of the function"


def test_a_command_judges_rows(build: Build, tmp_path: Path) -> None:
    (tmp_path / "judge.py").write_text(
        "import json, sys\n"
        "for line in sys.stdin:\n"
        "    print('true' if 'keep' in json.loads(line)['messages'][0]['content'] else 'false', flush=True)\n"
    )
    rows = [row("keep me", "a"), row("not me", "b")]
    command = [sys.executable, "judge.py"]
    made = build(rows, curate={"verifiers": [{"name": "words", "command": command}]})
    assert [held.answer for held in made.iter_rows("train")] == ["a"]
    assert len(left_out(made)["rejected_by_words"]) == 1


def test_a_broken_verifier_fails_the_build(build: Build, tmp_path: Path) -> None:
    (tmp_path / "judge.py").write_text(VERIFIERS)
    with pytest.raises(UserError, match="the verifier 'odd' failed on 20 of 20 rows") as caught:
        build(
            [row(f"q{n}", "a") for n in range(30)],
            curate={"verifiers": [{"name": "odd", "function": "judge.py:broken"}]},
        )
    assert "no such key" in str(caught.value)
    with pytest.raises(UserError, match="one of function, command and judge"):
        build([row("q", "a")], curate={"verifiers": [{"name": "none"}]})


def test_a_minority_of_another_format_is_warned_of(build: Build) -> None:
    rows = [row(f"q{n}", f'{{"answer": {n}}}') for n in range(90)]
    rows += [row(f"p{n}", f"The answer to this is the number {n}, I believe.") for n in range(10)]
    made = build(rows)
    (warning,) = [line for line in made.manifest["warnings"] if "in format" in line]
    assert warning == "10% of the answers differ from the rest in format: JSON 90%, prose 10%"
    mixes = made.manifest["curation"]["consistency"]["mixes"]
    assert {mix["aspect"] for mix in mixes} == {"format", "courtesy", "length", "opening"}
    told = build(rows, curate={"consistency": "languages"}).manifest["curation"]["consistency"]["mixes"]
    assert "language" in {mix["aspect"] for mix in told}
    assert "consistency" not in build(rows, curate={"consistency": "off"}).manifest["curation"]
    tagged = [given | {"task": given["prompt"][0]} for given in rows]
    apart = build(tagged, source={"tags": ["task"]}, curate={"consistent_within": "task"})
    assert not [line for line in apart.manifest["warnings"] if "in format" in line]


def test_tags_without_evaluation_rows_are_named(build: Build) -> None:
    rows = [row(f"q{n}", f"a{n}", topic="common", user=f"u{n}") for n in range(40)]
    rows += [row("r", "b", topic="rare", user="u1")]
    made = build(
        rows, source={"tags": ["topic"], "group_by": "user"}, split={"shares": {"train": 0.5, "test": 0.5}}
    )
    (topic,) = made.manifest["curation"]["coverage"]
    side = next(
        side
        for side in ("train", "test")
        if any(held.tags["topic"] == "rare" for held in made.iter_rows(side))
    )
    assert topic["values"]["rare"] == {side: 1}
    assert topic["unmeasured"] == (["rare"] if side == "train" else [])


def test_many_rows_lost_between_sides_are_warned_of(build: Build) -> None:
    rows = [row(f"q{n}", "a", template=f"t{n % 3}") for n in range(60)]
    split = {"shares": {"train": 0.5, "test": 0.5}, "unique_by": "template"}
    with pytest.raises(UserError, match="no train rows"):
        build(rows, source={"tags": ["template"]}, split=split)
    rows += plain_rows(40)
    made = build(rows, source={"tags": ["template"]}, split=split)
    (warning,) = [line for line in made.manifest["warnings"] if "another side" in line]
    assert "template_on_other_side" in warning and "group_by" in warning
    assert check_build(made).passed
    united = build(
        rows, source={"tags": ["template"]}, split={"shares": split["shares"], "unite_by": "template"}
    )
    assert not [line for line in united.manifest["warnings"] if "another side" in line]
    assert united.manifest["ledger"]["kept"] == 100
    assert check_build(united).passed


def test_semantic_duplicates_are_found_by_any_embedding(build: Build, tmp_path: Path) -> None:
    (tmp_path / "embed.py").write_text(
        "import numpy\n"
        "def by_first_word(texts):\n"
        "    return numpy.array([[1.0, 0.0] if text.startswith('same') else [len(text), 1.0] for text in texts])\n"
    )
    rows = [row("same one", "a"), row("same but different", "b"), row("q", "c")]
    section = {"semantic_duplicates": {"embedding": "embed.py:by_first_word", "threshold": 0.9999}}
    made = build(rows, curate=section)
    assert len(left_out(made)["semantic_duplicate"]) == 1


def test_samples_do_not_depend_on_where_rows_stood(build: Build) -> None:
    rows = plain_rows(60)
    first = build(rows, curate={"sample_rows": 20})
    shuffled = build(random.Random(1).sample(rows, 60), curate={"sample_rows": 20})
    assert first.manifest["curation"] == shuffled.manifest["curation"]
    assert first.manifest["curation"]["consistency"]["measured_rows"] == 20


def test_marks_of_a_reader_are_applied_by_the_next_build(build: Build, tmp_path: Path) -> None:
    rows = plain_rows(6)
    first = build(rows, marks="marks.jsonl")
    assert first.manifest["warnings"] == ["marks names marks.jsonl, which is not there: no mark was applied"]
    read = {held.answer: held for held in first.iter_rows("train")}
    wrong, poor, fine = (read[rows[n]["completion"]] for n in range(3))
    marks = MarkFile(tmp_path / "marks.jsonl")
    marks.add(wrong, "drop", "not true")
    marks.add(poor, "fix", answer="a better answer")
    marks.add(fine, "keep")
    made = build(rows, marks="marks.jsonl")
    assert made.manifest["warnings"] == []
    assert [entry["note"] for entry in left_out(made)["marked_drop"]] == ["not true"]
    answers = {held.answer for held in made.iter_rows("train")}
    assert "a better answer" in answers and poor.answer not in answers
    assert len(answers) == 5
    marks.add(wrong, "keep")
    assert len(build(rows, marks="marks.jsonl").rows("train")) == 6
