"""Which remedy comes first, from what the untuned model reached."""

from __future__ import annotations

from typing import Any

import pytest

from finetune.doctor.remedy import FEWEST_EXAMPLES, Decision, Facts, Standing, decide
from finetune.errors import UserError
from finetune.stats.power import items_needed_paired


def standing(arm: str, share: float, **given: Any) -> Standing:
    gain = None
    if arm != "zero_shot":
        better = given.pop("better", False)
        gain = {
            "difference": 0.1,
            "low": 0.05,
            "high": 0.15,
            "verdict": "improved" if better else "no-evidence",
        }
    rest = {"n": 400, "off_format": 0, "prompt_tokens": 30.0, "gain": gain} | given
    return Standing(arm, share, share - 0.05, share + 0.05, **rest)


def shown(**given: Any) -> list[Standing]:
    """Zero-shot, and examples that bring nothing."""
    return [standing("zero_shot", 0.3, **given), standing("few_shot", 0.28, **given)]


def first(*standings: Standing, **facts: Any) -> Decision:
    return decide(standings, Facts(**facts))


def test_without_an_evaluation_there_is_no_answer() -> None:
    with pytest.raises(UserError, match="without an evaluation"):
        decide([], Facts(goal=0.9, examples=5000))


def test_a_goal_that_a_prompt_reaches_needs_no_tuning() -> None:
    found = first(
        standing("zero_shot", 0.5), standing("few_shot", 0.9, better=True, prompt_tokens=900.0), goal=0.8
    )
    assert found.first == "nothing" and "few_shot" in found.why
    assert (
        first(standing("zero_shot", 0.83), goal=0.8).first == "items"
    )  # the interval reaches below the goal


@pytest.mark.parametrize(
    ("standings", "facts", "expected"),
    [
        ([standing("zero_shot", 0.3)], {"knowledge": "changes"}, "documents"),
        ([standing("zero_shot", 0.3), standing("documents", 0.5, better=True)], {}, "documents"),
        ([standing("zero_shot", 0.3)], {"examples": FEWEST_EXAMPLES}, "prompt"),
        ([*shown(), standing("documents", 0.35)], {}, "tuning"),
        (shown(off_format=200), {}, "format"),
        ([standing("zero_shot", 0.3, off_format=200)], {}, "format"),
        (shown(off_format=100), {}, "tuning"),
        (shown(), {"examples": FEWEST_EXAMPLES - 1}, "examples"),
        (shown(), {"examples": FEWEST_EXAMPLES}, "tuning"),
        (shown(n=20), {"goal": 0.4}, "items"),
        ([standing("zero_shot", 1.0)], {}, "nothing"),
    ],
)
def test_the_cheapest_remedy_that_applies_comes_first(
    standings: list[Standing], facts: dict[str, Any], expected: str
) -> None:
    assert first(*standings, **facts).first == expected


def test_the_items_are_those_that_find_the_gain_to_the_goal() -> None:
    found = first(standing("zero_shot", 0.5), goal=0.6)
    assert found.effect == pytest.approx(0.1)
    assert found.items_needed == items_needed_paired(0.1, 0.15)
    assert first(standing("zero_shot", 0.6)).effect == pytest.approx(0.1)  # a quarter of what is wrong


def test_what_was_not_measured_is_not_known() -> None:
    found = {
        reason.name: reason.applies for reason in first(standing("zero_shot", 0.5, off_format=None)).reasons
    }
    assert found["weak instructions"] is None and found["missing knowledge"] is None
    assert found["wrong form"] is None and found["domain, skill or style"] is True
    text = "\n".join(first(standing("zero_shot", 0.5, off_format=None)).lines())
    assert "not known" in text and "[45.0, 55.0], n = 400" in text


def test_nothing_shown_by_few_items_is_not_nothing_there() -> None:
    """An interval that still holds the gain that is wanted leaves the question open."""
    few = first(
        standing("zero_shot", 0.3), standing("few_shot", 0.32), standing("documents", 0.31), goal=0.42
    )
    found = {reason.name: reason for reason in few.reasons}
    assert found["weak instructions"].applies is None and found["missing knowledge"].applies is None
    assert "400 items do not rule out 10.0 points" in found["weak instructions"].evidence
    many = first(
        standing("zero_shot", 0.3), standing("few_shot", 0.32), goal=0.6
    )  # 28 points, and at most 15 came
    assert many.reasons[0].applies is False


@pytest.mark.parametrize(
    ("off_format", "n", "form", "skill"),
    [
        (280, 400, True, None),
        (1, 1, None, None),
        (10, 400, False, True),
        (0, 400, False, True),
        (150, 400, None, True),
    ],
)
def test_form_is_the_cause_only_where_its_share_of_what_is_wrong_is_shown(
    off_format: int, n: int, form: bool | None, skill: bool | None
) -> None:
    share = 0.3 if n > 1 else 0.0
    found = {
        one.name: one.applies
        for one in first(standing("zero_shot", share, off_format=off_format, n=n)).reasons
    }
    assert (found["wrong form"], found["domain, skill or style"]) == (form, skill)
    right = {one.name: one.applies for one in first(standing("zero_shot", 1.0)).reasons}
    assert right["wrong form"] is False and right["domain, skill or style"] is False


def test_a_long_prompt_is_a_cost_that_tuning_saves() -> None:
    dear = first(standing("zero_shot", 0.2), standing("few_shot", 0.6, better=True, prompt_tokens=900.0))
    assert next(one for one in dear.reasons if one.name == "cost and latency").applies
    assert dear.first == "tuning" and "few_shot" in dear.why
