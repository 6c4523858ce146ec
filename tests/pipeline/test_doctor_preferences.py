"""Faults planted in a project of preferences: `finetune doctor` names each, with rows and remedy, and leaves sound ones alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from finetune.doctor.finding import Finding
from finetune.pipeline.doctor import examine_recipe
from finetune.training import reference

WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
Rows = list[dict[str, Any]]
# Of so small a project: 36 rows and 12 items, with nothing to refuse.
ALWAYS = {"number of rows", "power of digits", "tested versions", "refusals"}
CHOICES = """\
suite: 1
name: digits
task: choice
items: {jsonl: items.jsonl}
scorers: [choice_accuracy]
primary_metric: choice_accuracy
"""


def pairs() -> Rows:
    found = []
    for number in range(60):
        tens, ones = WORDS[number // 10], WORDS[number % 10]
        bad = f"It is {ones} {WORDS[(number + 1) % 10]} {tens}"
        found.append({"prompt": f"{number:02d}", "chosen": f"It is {tens} {ones}", "rejected": bad})
    return found


def judged(rows: Rows) -> Rows:
    return [
        {"prompt": row["prompt"], "completion": row[side], "label": side == "chosen"}
        for row in rows
        for side in ("chosen", "rejected")
    ]


def prepare(project: Any, method: str, rows: Rows) -> None:
    (project.folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = project.recipe.read_text().replace("learning_rate: 1e-2", "learning_rate: 1e-4")
    text = text.replace("train:\n", f"train:\n  method: {method}\n")
    if method == "reward":
        (project.folder / "suite.yaml").write_text(CHOICES)
        items = [
            {
                "id": f"item-{number}",
                "messages": [{"role": "user", "content": f"which, {row['prompt']}?"}],
                "reference": row["chosen"],
                "check": {"choices": [row["chosen"], row["rejected"]]},
            }
            for number, row in enumerate(pairs())
        ]
        (project.folder / "items.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
        text += "  baselines: [zero_shot]\n  against: zero_shot\n"
    project.recipe.write_text(text)


def examine(project: Any, *overrides: str) -> tuple[list[Finding], int]:
    """What is wrong beyond what always is, and the exit code. Memory beyond its forecast is that of the test process."""
    found = examine_recipe(str(project.recipe), overrides, say=lambda line: None)
    wrong = [
        one
        for one in found.findings
        if one.status in ("fault", "warning")
        and one.check not in ALWAYS
        and "than forecast" not in one.detail
    ]
    return wrong, found.exit_code


@pytest.fixture
def _no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("finetune.pipeline.doctor.try_training", lambda material, say: iter(()))


def identical(project: Any, rows: Rows) -> None:
    """The template trims answers, so that they differ in the file and not in their tokens."""
    path = project.folder / "tiny-model" / "chat_template.jinja"
    path.write_text(path.read_text().replace("message['content']", "message['content'] | trim"))
    for row in rows[::4]:
        row["rejected"] = row["chosen"] + " "


def same(project: Any, rows: Rows) -> None:
    for row in rows[::4]:
        row["rejected"] = row["chosen"]


def empty(project: Any, rows: Rows) -> None:
    for row in rows[::4]:
        row["rejected"] = ""


def unseen(project: Any, rows: Rows) -> None:
    for row in rows[::4]:
        row["rejected"] = "\u200b"


def long(project: Any, rows: Rows) -> None:
    project.recipe.write_text(project.recipe.read_text().replace("pack_tokens: 256", "pack_tokens: 64"))


Plant = Callable[[Any, Rows], None]
PLANTS: dict[str, tuple[str, Plant, tuple[str, str], str]] = {
    "identical": ("dpo", identical, ("rows", "fault"), "twice the same|same chosen and rejected"),
    "identical in the file": ("reward", same, ("dataset", "fault"), "are the same"),
    "an empty side": ("dpo", empty, ("dataset", "fault"), "'rejected' is empty"),
    "a side that is not seen": ("dpo", unseen, ("pairs left out", "warning"), "without text"),
    "longer than a pack": ("dpo", long, ("packs", "fault"), "does not fit a pack of 64"),
}


@pytest.mark.usefixtures("_no_training")
@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_fault_is_named_and_nothing_else(project: Any, name: str) -> None:
    method, plant, expected, part = PLANTS[name]
    rows = pairs()
    prepare(project, method, rows)
    plant(project, rows)
    (project.folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    wrong, code = examine(project)
    assert {(one.check, one.status) for one in wrong} == {expected}
    assert any(any(word in one.detail for word in part.split("|")) for one in wrong)
    assert wrong[0].remedy and wrong[0].where
    assert code == (2 if expected[1] == "fault" else 0)


@pytest.mark.usefixtures("_no_training")
@pytest.mark.parametrize(
    ("plant", "check", "part"),
    [
        (lambda rows: [row for row in rows if row["label"]], "wanted and unwanted", "train.method: sft"),
        (lambda rows: [row for row in rows if not row["label"]], "wanted and unwanted", "that are wanted"),
        (
            lambda rows: [row for number, row in enumerate(rows) if row["label"] or number % 8 == 1],
            "wanted and unwanted",
            "undesirable_weight: ",
        ),
        (
            lambda rows: [*rows, *(row | {"label": not row["label"]} for row in rows[:20])],
            "swapped pairs",
            "",
        ),
    ],
    ids=["all wanted", "all unwanted", "uneven", "both labels"],
)
def test_judged_answers_of_one_kind_or_of_both(
    project: Any, plant: Callable[[Rows], Rows], check: str, part: str
) -> None:
    prepare(project, "kto", plant(judged(pairs())))
    (wrong,), code = examine(project)
    assert (wrong.check, wrong.status, code) == (check, "warning", 0)
    assert part in wrong.remedy
    if "undesirable_weight: " in wrong.remedy:  # what it says to set mends it
        weight = wrong.remedy.partition("undesirable_weight: ")[2].partition(",")[0]
        assert examine(project, f"train.preference.undesirable_weight={weight}") == ([], 0)


@pytest.mark.usefixtures("_no_training")
@pytest.mark.parametrize("method", ["dpo", "reward"])
def test_swapped_pairs_are_named_on_both_sides(project: Any, method: str) -> None:
    rows = pairs()
    rows += [row | {"chosen": row["rejected"], "rejected": row["chosen"]} for row in rows[:20]]
    prepare(project, method, rows)
    (found,), code = examine(project)
    assert (found.check, found.status, code) == ("swapped pairs", "warning", 0)
    assert "opposite" in found.detail and found.remedy
    shown = found.detail.partition("e.g. ")[2].split("; ")
    assert len(shown) == 3 and all(" against row-" in one for one in shown)
    assert found.where.startswith(f"row {shown[0].split()[0]} (rows.jsonl:")


@pytest.mark.usefixtures("_no_training")
def test_a_pack_holds_kto_s_mismatched_answers_too(project: Any) -> None:
    """A row that fits alone and not with the answer of another prompt is told before anything is trained."""
    rows = judged(pairs())
    prepare(project, "kto", rows)
    longest = max(len(row["completion"]) for row in rows)
    wrong, code = examine(project, f"train.pack_tokens={longest + 40}")
    assert code == 2 and {one.check for one in wrong} == {"packs"}
    wanted = max(one.changes["train.pack_tokens"] for one in wrong)
    assert examine(project, f"train.pack_tokens={wanted}") == ([], 0)


@pytest.mark.parametrize("method", ["dpo", "kto", "reward"])
def test_a_sound_recipe_has_no_fault(project: Any, method: str) -> None:
    prepare(project, method, judged(pairs()) if method == "kto" else pairs())
    wrong, code = examine(project)
    assert ([str(one) for one in wrong], code) == ([], 0)


@pytest.mark.parametrize("method", ["dpo", "kto"])
def test_a_wrong_reference_is_told_once_with_what_to_do(
    project: Any, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    score: Callable[..., torch.Tensor] = reference._score
    monkeypatch.setattr(reference, "_score", lambda *given: score(*given) - 3.0)
    prepare(project, method, pairs())
    wrong, code = examine(project)
    assert code == 2 and {one.where for one in wrong} == {"train.preference.reference"}
    assert "3 nats off the reference" in wrong[0].detail and "references" in wrong[0].remedy
