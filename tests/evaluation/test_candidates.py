"""Merges beside their parents: two sides of every suite, many looks counted, one choice, and the claims about it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from finetune.errors import UserError
from finetune.evaluation.candidates import choose, compare_beside, side_of, suites_to_win
from finetune.evaluation.merge_claims import judge_claims, standing_claims
from finetune.evaluation.saved_arms import SavedArm
from finetune.evaluation.suite import Suite, load_suite
from finetune.recipe.merge_search_section import ChooseSection, ClaimSection

TASK = """\
suite: 1
name: task
items: {jsonl: items.jsonl}
scorers: [exact_match]
primary_metric: exact_match
margin: 0.1
"""
TEXTS = """\
suite: 1
name: texts
role: forgetting
task: text
items: {jsonl: texts.jsonl}
scorers: [nll_per_token]
primary_metric: nll_per_token
cluster: null
margin: 0.1
"""


@pytest.fixture
def suites(tmp_path: Path) -> list[Suite]:
    items = [
        {
            "id": f"i{n}",
            "messages": [{"role": "user", "content": str(n)}],
            "reference": "x",
            "cluster": f"c{n // 4}",
        }
        for n in range(40)
    ]
    (tmp_path / "items.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    texts = [{"id": f"t{n}", "reference": f"text {n}"} for n in range(9)]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))
    for name, text in (("task", TASK), ("texts", TEXTS)):
        (tmp_path / f"{name}.yaml").write_text(text)
    return [load_suite(tmp_path / "task.yaml"), load_suite(tmp_path / "texts.yaml")]


def saved(folder: Path, model: str, suite: str, metric: str, scores: Sequence[float]) -> SavedArm:
    """Answers of a model as records, without a summary."""
    place = folder / "answers" / model / suite
    place.mkdir(parents=True)
    lines = [
        {"item": f"i{n}", "arm": "tuned", "cluster": f"i{n}", "tags": {}, "output": "", "output_tokens": 9}
        | {"scores": {metric: score}}
        for n, score in enumerate(scores)
    ]
    (place / "tuned.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return SavedArm(place, "tuned")


def test_no_item_and_no_cluster_is_on_both_sides_and_nothing_is_left_out(suites: list[Suite]) -> None:
    for suite, n in zip(suites, (40, 9), strict=True):
        left, right = (side_of(suite, side, None).items for side in ("choose", "confirm"))
        assert not {one.cluster for one in left} & {one.cluster for one in right}
        assert len({one.id for one in left} | {one.id for one in right}) == n
        assert min(len(left), len(right)) >= n // 2 - 4
        assert left == side_of(suite, "choose", None).items
    assert len(side_of(suites[0], "confirm", 3).items) == 3


def test_a_suite_of_one_cluster_has_no_second_side(suites: list[Suite], tmp_path: Path) -> None:
    one = '{"id": "a", "messages": [{"role": "user", "content": "q"}], "reference": "x"}\n'
    (tmp_path / "items.jsonl").write_text(one)
    with pytest.raises(UserError, match="one cluster of items"):
        side_of(suites[0], "confirm", None)


def test_the_suites_that_decide_are_tasks_or_those_named_and_must_have_a_common_unit(
    suites: list[Suite],
) -> None:
    assert [one.name for one in suites_to_win(suites, ChooseSection())] == ["task"]
    assert [one.name for one in suites_to_win(suites, ChooseSection(best=["texts"]))] == ["texts"]
    with pytest.raises(UserError, match="differ in unit"):
        suites_to_win(suites, ChooseSection(best=["task", "texts"]))
    with pytest.raises(UserError, match="'tesk' is no suite"):
        suites_to_win(suites, ChooseSection(lose_at_most={"tesk": 0.1}))


MEANS = {
    "one": {"task": 0.8, "texts": 3.4},
    "two": {"task": 0.5, "texts": 3.1},
    "a": {"task": 0.7, "texts": 3.2},
    "b": {"task": 0.6, "texts": 3.0},
    "c": {"task": 0.74, "texts": 3.3},
}


@pytest.mark.parametrize(
    ("best", "allowed", "winner", "kept_out"),
    [
        ([], {}, "c", []),
        (["texts"], {}, "b", []),
        (["texts"], {"task": 0.11}, "a", ["b"]),
        (["task"], {"texts": 0.1}, "a", ["c"]),  # in nats, where less is better
        (
            ["task"],
            {"texts": 0.0, "task": 0.0},
            "c",
            ["a", "b", "c"],
        ),  # none is allowed: the best all the same
    ],
)
def test_the_best_is_chosen_among_those_that_lose_no_more_than_they_may(
    suites: list[Suite], best: list[str], allowed: dict[str, float], winner: str, kept_out: list[str]
) -> None:
    section = ChooseSection(best=best, lose_at_most=allowed)
    choice = choose(suites, MEANS, ["a", "b", "c"], ["one", "two"], section)
    assert (choice.winner, sorted(choice.kept_out)) == (winner, kept_out)
    assert choice.best_parent == {"task": "one", "texts": "two"}
    assert choice.none_was_allowed == (len(kept_out) == 3)


def test_a_difference_shown_by_itself_is_not_shown_among_many(suites: list[Suite], tmp_path: Path) -> None:
    def right(count: int) -> list[float]:
        return [1.0] * count + [0.0] * (40 - count)

    answers = {
        name: {"task": saved(tmp_path, name, "task", "exact_match", right(count))}
        for name, count in (("one", 20), ("far", 40), ("near", 25), ("same", 20))
    }
    task = [replace_cluster(suites[0])]
    alone = compare_beside(task, answers, ["near"], ["one"])[0]
    assert alone.finding == "better" and alone.p_adjusted == alone.p_value
    many = {one.model: one for one in compare_beside(task, answers, ["near", "far", "same"], ["one"])}
    assert many["near"].p_value == alone.p_value and many["near"].p_adjusted == pytest.approx(
        2 * alone.p_value
    )
    assert [many[name].finding for name in ("far", "near", "same")] == [
        "better",
        "not told apart",
        "not told apart",
    ]
    worse = compare_beside(task, answers, ["one"], ["far"])[0]
    assert (worse.finding, worse.difference, worse.n) == ("worse", -0.5, 40)


def replace_cluster(suite: Suite) -> Suite:
    return suite.model_copy(update={"cluster": None})


def test_a_lower_likelihood_loss_is_a_gain(suites: list[Suite], tmp_path: Path) -> None:
    losses = [3.0 + n / 50 for n in range(20)]
    answers = {
        "tuned": {"texts": saved(tmp_path, "tuned", "texts", "nll_per_token", losses)},
        "merge": {
            "texts": saved(
                tmp_path,
                "merge",
                "texts",
                "nll_per_token",
                [loss - 0.2 - n / 999 for n, loss in enumerate(losses)],
            )
        },
    }
    found = compare_beside(suites[1:], answers, ["merge"], ["tuned"])[0]
    assert found.finding == "better" and found.difference < -0.2 and found.gain > 0.2 and found.open_ended
    claims = [
        ClaimSection(suite="texts", against="tuned", require="improvement"),
        ClaimSection(suite="texts", against="tuned"),
    ]
    verdict = judge_claims(suites, claims, answers, "merge")
    assert [row["outcome"] for row in verdict["claims"]] == ["pass", "pass"] and verdict["exit_code"] == 0
    turned = judge_claims(
        suites,
        [replace_claim(claims[0])],
        {**answers, "merge": answers["tuned"], "tuned": answers["merge"]},
        "merge",
    )
    assert turned["outcome"] == "regressed" and turned["exit_code"] == 10


def replace_claim(claim: ClaimSection) -> ClaimSection:
    return claim.model_copy(update={"require": "no-regression"})


def test_every_claim_has_its_margin_and_the_worst_decides(suites: list[Suite], tmp_path: Path) -> None:
    answers = {
        "one": {"task": saved(tmp_path, "one", "task", "exact_match", [1.0] * 30 + [0.0] * 10)},
        "merge": {"task": saved(tmp_path, "merge", "task", "exact_match", [1.0] * 28 + [0.0] * 12)},
    }
    wide, narrow = (ClaimSection(suite="task", against="one", margin=margin) for margin in (0.5, 0.01))
    gain = ClaimSection(suite="task", against="one", require="improvement")
    verdict = judge_claims(suites, [gain, wide, narrow], answers, "merge")
    assert [row["margin"] for row in verdict["claims"]] == [0.1, 0.5, 0.01]
    outcomes = [row["outcome"] for row in verdict["claims"]]
    assert outcomes[1] == "pass" and outcomes[0] != "pass" and outcomes[2] != "pass"
    assert verdict["exit_code"] != 0 and all(row["against"] == "one" for row in verdict["claims"])


def test_without_claims_the_winner_must_match_the_best_parent_of_every_suite(suites: list[Suite]) -> None:
    claims = standing_claims(suites, [], {"task": "one", "texts": "two"})
    assert [(one.suite, one.against, one.require) for one in claims] == [
        ("task", "one", "no-regression"),
        ("texts", "two", "no-regression"),
    ]
    with pytest.raises(UserError, match="'other' is no suite"):
        standing_claims(suites, [ClaimSection(suite="other", against="one")], {})
