"""Which answers are shown, and how."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from finetune.paths import read_json, read_jsonl, write_json
from finetune.report.answers import Reading, choose, classify, read_answers, shared_ends
from finetune.report.read import Arm, read_run
from finetune.report.verdict import read_verdict


def _arm(name: str, scores: dict[str, Any]) -> Arm:
    items = {item: {"item": item, "scores": {"m": score}} for item, score in scores.items()}
    return Arm("suite", name, {}, items)


def _readings(folder: Path) -> tuple[Reading, ...]:
    run = read_run(folder)
    verdict = read_verdict(run)
    return read_answers(run, verdict.primary, verdict.comparisons)


def _cells(broken: int, fixed: int, both_wrong: int, both_right: int) -> dict[str, list[str]]:
    sizes = {"broken": broken, "fixed": fixed, "both_wrong": both_wrong, "both_right": both_right}
    return {key: [f"{key}-{index}" for index in range(n)] for key, n in sizes.items()}


def test_items_fall_into_four_cells() -> None:
    before = {"a": 1.0, "b": 0.0, "c": 1.0, "d": 0.0, "only-before": 1.0}
    after = {"a": 0.0, "b": 1.0, "c": 1.0, "d": 0.0, "only-after": 1.0}
    cells, n_unscored = classify(_arm("few_shot", before), _arm("tuned", after), "m")
    assert cells == {"broken": ["a"], "fixed": ["b"], "both_right": ["c"], "both_wrong": ["d"]}
    assert n_unscored == 0


@pytest.mark.parametrize("score", [None, float("nan"), "1.0"])
def test_an_item_without_a_score_is_counted_apart(score: object) -> None:
    cells, n_unscored = classify(_arm("few_shot", {"a": score}), _arm("tuned", {"a": 1.0}), "m")
    assert n_unscored == 1
    assert not any(cells.values())


def test_on_a_graded_metric_a_fall_is_broken_and_a_rise_is_fixed() -> None:
    before, after = {"a": 0.8, "b": 0.2, "c": 0.5}, {"a": 0.6, "b": 0.4, "c": 0.5}
    cells, _ = classify(_arm("few_shot", before), _arm("tuned", after), "m")
    assert (cells["broken"], cells["fixed"], cells["both_wrong"]) == (["a"], ["b"], ["c"])


@pytest.mark.parametrize(
    ("sizes", "shown"),
    [
        ((3, 128, 65, 23), (3, 13, 12, 12)),
        ((55, 10, 10, 10), (55, 0, 0, 0)),
        ((0, 2, 0, 100), (0, 2, 0, 38)),
        ((1, 2, 3, 4), (1, 2, 3, 4)),
        ((0, 0, 0, 0), (0, 0, 0, 0)),
    ],
)
def test_all_broken_are_shown_and_the_rest_fills_forty(
    sizes: tuple[int, ...], shown: tuple[int, ...]
) -> None:
    chosen = choose(_cells(*sizes), seed=17)
    assert tuple(len(chosen[key]) for key in ("broken", "fixed", "both_wrong", "both_right")) == shown


def test_the_draw_is_seeded_and_keeps_the_suites_order() -> None:
    cells = _cells(0, 200, 0, 0)
    assert choose(cells, seed=1) == choose(cells, seed=1)
    assert choose(cells, seed=1) != choose(cells, seed=2)
    order = [int(name.split("-")[1]) for name in choose(cells, seed=1)["fixed"]]
    assert order == sorted(order)


def test_what_all_prompts_share_is_cut_at_line_ends() -> None:
    prompts = [
        f"<|system|>\nBe brief.\n<|user|>\nturn {way} the fan<|end|>\n<|assistant|>\n"
        for way in ("on", "off")
    ]
    start, end = shared_ends(prompts)
    assert start == "<|system|>\nBe brief.\n<|user|>\n"
    assert end == "<|end|>\n<|assistant|>\n"
    assert shared_ends(prompts[:1]) == ("", "")
    assert shared_ends([]) == ("", "")


def test_answers_of_a_run(run_folder: Path) -> None:
    (reading,) = _readings(run_folder)
    assert reading.n_shown == 40 and reading.n_items == 204
    assert [group.outcome.key for group in reading.groups] == ["broken", "fixed", "both_wrong", "both_right"]
    assert len(reading.groups[0].items) == reading.groups[0].n == 3
    item = reading.groups[0].items[0]
    assert [answer.arm for answer in item.answers] == ["base, zero-shot", "base, few-shot", "tuned"]
    assert [answer.is_right for answer in item.answers] == [False, True, False]
    assert str(item.prompt) == "turn on the lights in the kitchen"
    assert not reading.remarks


def test_counts_that_contradict_the_comparison_are_told(run_folder: Path) -> None:
    path = run_folder / "eval" / "comparison.json"
    comparison = read_json(path)
    comparison["comparisons"][0]["broken"] = 7
    write_json(path, comparison)
    (reading,) = _readings(run_folder)
    assert "broken 3 here, 7 in the comparison" in reading.remarks[-1]


def test_another_suite_shows_its_broken_items_only(factory: ModuleType, run_folder: Path) -> None:
    for root, arm in (("baseline", "few_shot"), ("eval", "tuned")):
        rows = read_jsonl(run_folder / root / factory.SUITE / f"{arm}.jsonl")
        for row in rows:
            row["scores"] = {"accuracy": row["scores"]["exact_match"]}
        factory.rewrite_lines(run_folder / root / "general" / f"{arm}.jsonl", rows)
    first, second = _readings(run_folder)
    assert (first.suite, second.suite) == (factory.SUITE, "general")
    assert [group.outcome.key for group in second.groups] == ["broken"]
    assert second.n_shown == 3


def test_missing_arms_are_named(run_folder: Path, factory: ModuleType) -> None:
    (run_folder / "eval" / factory.SUITE / "tuned.jsonl").unlink()
    (reading,) = _readings(run_folder)
    assert reading.missing == "The tuned model has no stored answers on this suite."
    assert reading.groups == ()


def test_items_that_one_arm_lacks_are_counted(run_folder: Path, factory: ModuleType) -> None:
    path = run_folder / "eval" / factory.SUITE / "tuned.jsonl"
    rows = [row for row in path.read_text().splitlines() if row][:-5]
    path.write_text("\n".join(rows) + "\n")
    (reading,) = _readings(run_folder)
    assert "5 items have an answer only in the arm 'base, few-shot'." in reading.remarks
