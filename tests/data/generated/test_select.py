"""Which answers become rows."""

from __future__ import annotations

from typing import Any

import pytest

from finetune.data.generated.select import AnsweredRow, Judged, pass_rates, select_rows
from finetune.data.rows import Row
from finetune.data.spec_generated import KeepSection


def answered(passed: list[str], failed: list[str], name: str = "p", **tags: str) -> AnsweredRow:
    """A prompt with answers that passed, then ones that failed; 'format…' fails in form."""
    row = Row(
        name,
        ({"role": "user", "content": name}, {"role": "assistant", "content": "the reference"}),
        f"group of {name}",
        "test",
        tags,
    )
    judged = [Judged(text, True) for text in passed]
    judged += [
        Judged(text, False, "format: no JSON" if text.startswith("format") else "wrong") for text in failed
    ]
    return AnsweredRow(row, tuple(judged))


def pairs_of(one: AnsweredRow, **keep: Any) -> list[tuple[str, str]]:
    found = select_rows([one], KeepSection(**keep), write="pairs", seed=1).records
    return [(record["chosen"][0]["content"], record["rejected"][0]["content"]) for record in found]


def test_passed_is_chosen_and_failed_is_rejected_and_the_prompt_keeps_its_group_and_tags() -> None:
    selection = select_rows([answered(["a"], ["x"], intent="on")], KeepSection(), write="pairs", seed=1)
    assert selection.records == [
        {
            "intent": "on",
            "prompt_row": "p",
            "group": "group of p",
            "prompt": [{"role": "user", "content": "p"}],
            "chosen": [{"role": "assistant", "content": "a"}],
            "rejected": [{"role": "assistant", "content": "x"}],
        }
    ]
    counts = {"prompts": 1, "answers": 2, "passed": 1, "kept": 1, "with_rows": 1, "rows": 1}
    assert selection.prompts == {"medium": counts}


def test_every_answer_is_used_once_before_any_is_used_again() -> None:
    one = answered(["a", "b", "a"], ["x", "y", "z"])
    assert pairs_of(one, rows_per_prompt=2) == [("a", "x"), ("b", "y")]
    assert len(set(pairs_of(one, rows_per_prompt=99))) == 6  # 2 distinct answers that passed, 3 that failed


def test_a_prompt_whose_answers_all_pass_or_all_fail_gives_no_pair_but_the_hardest_may_stay() -> None:
    assert pairs_of(answered(["a", "b"], [])) == []
    assert pairs_of(answered([], ["x", "y"])) == []
    assert pairs_of(answered([], ["x", "y"]), reference_as_chosen=True) == [("the reference", "x")]
    assert pairs_of(answered([], ["the reference", "y"]), reference_as_chosen=True) == [
        ("the reference", "y")
    ]


def test_failures_of_form_can_be_left_out() -> None:
    one = answered(["a"], ["format!", "x"])
    assert pairs_of(one, rows_per_prompt=9) == [("a", "format!"), ("a", "x")]
    assert pairs_of(one, rows_per_prompt=9, format_failures="drop") == [("a", "x")]


def test_rows_of_chat_are_the_distinct_answers_that_passed() -> None:
    found = select_rows(
        [answered(["a", "a", "b"], ["x"])], KeepSection(rows_per_prompt=3), write="chat", seed=1
    )
    assert [record["messages"][-1]["content"] for record in found.records] == ["a", "b"]
    assert found.records[0]["messages"][0] == {"role": "user", "content": "p"}


@pytest.mark.parametrize(
    ("passed", "failed", "difficulty"),
    [(0, 4, "never"), (1, 3, "hard"), (2, 2, "medium"), (3, 1, "easy"), (4, 0, "always"), (1, 2, "hard")],
)
def test_difficulty_is_the_share_that_passes(passed: int, failed: int, difficulty: str) -> None:
    assert answered(["a"] * passed, ["x"] * failed).difficulty == difficulty


def test_a_share_of_the_easy_prompts_is_kept_and_every_hard_one() -> None:
    easy = [answered(["a"] * 3, ["x"], f"easy {n}") for n in range(400)]
    hard = [answered(["a"], ["x"] * 3, f"hard {n}") for n in range(50)]
    keep = KeepSection(difficulty={"easy": 0.25})
    found = select_rows([*easy, *hard], keep, write="pairs", seed=7)
    assert found.prompts["hard"]["kept"] == 50
    assert 70 <= found.prompts["easy"]["kept"] <= 130
    # A prompt's own draw: the others, their order, and a larger share leave it where it is.
    kept = {record["prompt_row"] for record in found.records}
    half = select_rows(easy[::-1][:200], KeepSection(difficulty={"easy": 0.5}), write="pairs", seed=7).records
    assert {record["prompt_row"] for record in half} >= {
        name for name in kept if name in {e.row.id for e in easy[200:]}
    }
    assert kept != {r["prompt_row"] for r in select_rows([*easy, *hard], keep, write="pairs", seed=8).records}


def test_pass_rates_by_tag_name_the_worst_first() -> None:
    rows = [answered(["a"], ["x"], "1", intent="on"), answered([], ["x", "y"], "2", intent="off")]
    assert pass_rates(rows, ["intent"]) == {
        "intent": {
            "off": {"prompts": 1, "answers": 2, "passed": 0, "pass_rate": 0.0},
            "on": {"prompts": 1, "answers": 2, "passed": 1, "pass_rate": 0.5},
        }
    }
    assert list(pass_rates(rows, ["intent"])["intent"]) == ["off", "on"]


def chats_of(one: AnsweredRow, **keep: Any) -> list[str]:
    found = select_rows([one], KeepSection(**keep), write="chat", seed=1)
    return [record["messages"][-1]["content"] for record in found.records]


def test_without_the_filter_every_answer_may_be_learnt_and_difficulty_is_still_told() -> None:
    one = answered(["good"], ["bad", "", " "])
    assert chats_of(one, rows_per_prompt=9) == ["good"]
    assert chats_of(one, rows_per_prompt=9, filter=False) == ["good", "bad"]
    selection = select_rows([one], KeepSection(filter=False), write="chat", seed=1)
    assert list(selection.prompts) == ["hard"]


def test_the_shortest_answers_that_pass_come_first() -> None:
    one = answered(["a long way to it", "short", "a longer way still"], ["x"])
    assert chats_of(one) == ["a long way to it"]
    assert chats_of(one, prefer="shortest", rows_per_prompt=2) == ["short", "a long way to it"]


@pytest.mark.parametrize(
    ("section", "message"),
    [({"sampling": {"answers": 1}}, "two answers"), ({"keep": {"filter": False}}, "is what passed")],
)
def test_pairs_need_two_answers_and_a_filter(section: dict[str, Any], message: str) -> None:
    from pydantic import TypeAdapter, ValidationError

    from finetune.data.spec_source import GeneratedSource

    source = {
        "kind": "generated",
        "name": "pairs",
        "prompts": "home_intents",
        "model": {"run": "runs/teacher"},
        "verifier": {"kind": "hassil"},
        **section,
    }
    reader = TypeAdapter(GeneratedSource)
    with pytest.raises(ValidationError, match=message):
        reader.validate_python(source)
    assert reader.validate_python({**source, "write": "chat"}).write == "chat"
