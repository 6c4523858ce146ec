"""Several sampled answers to an item: told apart on disk, averaged by item in every number, continued one by one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from finetune.errors import UserError
from finetune.evaluation import answering
from finetune.evaluation.compare import compare_folders, compare_records
from finetune.evaluation.generate import Completion, generate
from finetune.evaluation.items import Item
from finetune.evaluation.noise import flip_rate, with_other_seed
from finetune.evaluation.pairing import pair_records
from finetune.evaluation.pin import pin_items
from finetune.evaluation.records import Record, read_records
from finetune.evaluation.repeats import first_answers, noise_line, per_item
from finetune.evaluation.rescore import rescore_arm
from finetune.evaluation.run import evaluate_arm
from finetune.evaluation.saved_arms import SavedArm
from finetune.evaluation.screen import comparison_lines
from finetune.evaluation.suite import SlicesSection, Suite, load_suite
from finetune.report.review.sample import draw_review


def _sampled(suite: Suite, repeats: int = 3, **changes: Any) -> Suite:
    wanted = {"temperature": 0.8, "top_p": 0.9, "seed": 5, "repeats": repeats} | changes
    return suite.model_copy(update={"decoding": suite.decoding.model_copy(update=wanted)})


@pytest.fixture
def evaluate(lively_model: Any, tiny_tokenizer: Any, items: list[Item], tmp_path: Path) -> Any:
    def call(suite: Suite, folder: str = "out", **changes: Any) -> list[Record]:
        options: dict[str, Any] = {"arm": "zero_shot", "batch_size": 4, "key": "k"} | changes
        chosen = options.pop("items", items)
        evaluate_arm(lively_model, tiny_tokenizer, suite, chosen, out_folder=tmp_path / folder, **options)
        return read_records(tmp_path / folder, options["arm"])

    return call


def _outputs(records: list[Record]) -> dict[tuple[str, int], str]:
    return {(record["item"], record["repeat"]): record["output"] for record in records}


def test_every_answer_has_its_record_and_the_repeats_differ(
    evaluate: Any, suite: Suite, items: list[Item], tmp_path: Path
) -> None:
    records = evaluate(_sampled(suite))
    assert [(record["item"], record["repeat"]) for record in records] == [
        (item.id, repeat) for item in items for repeat in range(3)
    ]
    assert len({record["key"] for record in records}) == 30
    assert len(set(_outputs(records).values())) > 20
    summary = SavedArm(tmp_path / "out", "zero_shot").summary()
    assert summary is not None
    assert (summary.n, summary.repeats, summary.metrics["exact_match"]["n"]) == (30, 3, 10)
    assert summary.metrics["exact_match"]["variance"]["samples"] == pytest.approx(3.0)


def test_batch_size_order_and_neighbours_change_no_sample(
    evaluate: Any, suite: Suite, items: list[Item]
) -> None:
    expected = _outputs(evaluate(_sampled(suite)))
    assert _outputs(evaluate(_sampled(suite), "one", batch_size=1)) == expected
    assert _outputs(evaluate(_sampled(suite), "many", batch_size=32)) == expected
    assert _outputs(evaluate(_sampled(suite), "turned", items=items[::-1])) == expected
    alone = _outputs(evaluate(_sampled(suite), "alone", items=items[4:5]))
    assert alone == {name: text for name, text in expected.items() if name[0] == "item-4"}
    assert _outputs(evaluate(_sampled(suite, seed=6), "seed")) != expected


def test_more_repeats_ask_for_those_alone_and_fewer_for_nothing(
    evaluate: Any, suite: Suite, asked: list[int]
) -> None:
    three = _outputs(evaluate(_sampled(suite)))
    five = _outputs(evaluate(_sampled(suite, 5)))
    assert asked == [30, 20]
    assert {name: five[name] for name in three} == three
    assert _outputs(evaluate(_sampled(suite, 2))) == {
        name: text for name, text in three.items() if name[1] < 2
    }
    assert asked == [30, 20]


def test_a_killed_run_continues_answer_by_answer(
    evaluate: Any, suite: Suite, monkeypatch: pytest.MonkeyPatch, asked: list[int]
) -> None:
    whole = evaluate(_sampled(suite), "whole")

    def dies(model: Any, prompts: Any, rule: Any, **options: Any) -> Iterator[Completion]:
        for number, answer in enumerate(generate(model, prompts, rule, **options)):
            if number == 11:
                raise KeyboardInterrupt
            yield answer

    with monkeypatch.context() as patch:
        patch.setattr(answering, "generate", dies)
        with pytest.raises(KeyboardInterrupt):
            evaluate(_sampled(suite))
    continued = evaluate(_sampled(suite))
    assert asked == [30, 19]
    for record in (*whole, *continued):
        del record["latency_seconds"]
    assert continued == whole


@pytest.mark.parametrize(
    ("decoding", "message"),
    [
        ("repeats: 3", "set temperature above 0, or repeats to 1"),
        ("top_p: 0.5", "greedy decoding does not sample"),
        ("temperature: -1", "temperature"),
        ("temperature: 1, top_p: 0", "top_p"),
        ("temperature: 1, repeats: 0", "repeats"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(suite: Suite, decoding: str, message: str) -> None:
    suite.path.write_text(
        suite.path.read_text().replace("{max_new_tokens: 12}", f"{{max_new_tokens: 12, {decoding}}}")
    )
    with pytest.raises(UserError, match=message):
        load_suite(suite.path)


def test_likelihoods_are_not_sampled(suite: Suite) -> None:
    text = suite.path.read_text().replace("{max_new_tokens: 12}", "{temperature: 1}")
    suite.path.write_text(text.replace("name: tiny", "name: tiny\ntask: choice"))
    with pytest.raises(UserError, match="nothing is sampled with task: choice"):
        load_suite(suite.path)


def _records(arm: str, scores: list[list[float]]) -> list[Record]:
    return [
        {
            "item": f"item-{index}", "repeat": repeat, "arm": arm, "cluster": f"c{index}", "output_tokens": 3 + repeat,
            "prompt": "p", "reference": "r", "output": f"{score}", "tags": {"half": str(index % 2)}, "prompt_tokens": 5,
            "latency_seconds": 1.0 + repeat, "finish_reason": "stop", "scores": {"exact_match": score},
        }
        for index, group in enumerate(scores)
        for repeat, score in enumerate(group)
    ]  # fmt: skip


BEFORE = [[0.0, 1.0, 0.0], [1.0, 1.0, 1.0], [0.0, 0.0, 0.0], [0.0, 1.0, 1.0]] * 10
AFTER = [[1.0, 1.0, 0.0], [1.0, 1.0, 1.0], [1.0, 1.0, 1.0], [1.0, 1.0, 1.0]] * 10


def _exact(suite: Suite, **changes: Any) -> Suite:
    return suite.model_copy(update={"scorers": ["exact_match"], **changes})


def test_scores_are_averaged_by_item_before_anything_is_compared(suite: Suite) -> None:
    sliced = _exact(suite, slices=SlicesSection(by=["half"]))
    result = compare_records(sliced, _records("few_shot", BEFORE), _records("tuned", AFTER)[::-1])
    one = result["comparisons"][0]
    assert (one["n"], one["mean_a"], one["mean_b"]) == (40, pytest.approx(0.5), pytest.approx(11 / 12))
    assert one["fixed"] is None  # means of several answers are graded
    assert [part["n"] for part in result["slices"]] == [20, 20]
    noise = one["noise"]
    assert noise["repeats"] == 3
    assert 0.0 < noise["sampling_share"] < 1.0
    assert noise["standard_error_floor"] < noise["standard_error"]
    lines = comparison_lines(result)
    assert f"  {noise_line(noise)}" in lines
    assert f"narrow the interval by {noise['narrower_at_most']:.0%} at most" in noise_line(noise)


def test_single_answers_have_no_sampling_noise(suite: Suite) -> None:
    records = [_records(arm, [[float(index % 2)] for index in range(40)]) for arm in ("few_shot", "tuned")]
    result = compare_records(_exact(suite), *records)
    assert "noise" not in result["comparisons"][0]
    assert not any("sampling makes" in line for line in comparison_lines(result))


def test_an_answer_repeated_is_refused_and_names_the_repeat(suite: Suite) -> None:
    records = _records("few_shot", BEFORE)
    with pytest.raises(UserError, match=r"'item-0 \(repeat 1\)'"):
        pair_records([*records, records[1]], records)


def test_one_record_an_item_averages_or_shows_the_first() -> None:
    records = _records("tuned", [[0.0, 1.0]])
    (averaged,) = per_item(records)
    assert (averaged["scores"], averaged["output_tokens"], averaged["latency_seconds"]) == (
        {"exact_match": 0.5}, 3.5, 1.5,
    )  # fmt: skip
    assert (averaged["output"], averaged["repeats"]) == ("0.0", 2)
    assert first_answers(records[::-1]) == [records[0]]
    single = _records("tuned", [[1.0]])
    assert per_item(single)[0] is single[0]
    records[1]["scores"] = {}
    assert per_item(records)[0]["scores"] == {"exact_match": None}


def test_only_items_right_every_time_are_pinned(suite: Suite, items: list[Item], tmp_path: Path) -> None:
    records = _records("tuned", [[1.0, 1.0], [1.0, 0.0], [1.0, 1.0]])
    assert pin_items(_exact(suite), items, records, folder=tmp_path / "pins").added == 2


def test_a_review_shows_first_answers_with_their_own_scores() -> None:
    arms = _records("few_shot", BEFORE), _records("tuned", AFTER)
    drawn = draw_review("s", lambda one: one["scores"]["exact_match"] == 1.0, *arms, n=40, seed=1)
    assert len({item.item for item in drawn}) == 40
    for item in drawn:
        assert {arm: answer == "1.0" for arm, answer in item.answers.items()} == item.right
    assert {item.stratum for item in drawn} == {"fixed", "both_right"}


def test_saved_repeats_are_scored_again_and_compared(evaluate: Any, suite: Suite, tmp_path: Path) -> None:
    sampled = _sampled(suite)
    evaluate(sampled, "base")
    evaluate(sampled, "tuned", arm="tuned")
    summary = rescore_arm(sampled, SavedArm(tmp_path / "tuned", "tuned"))
    assert (summary.n, summary.repeats) == (30, 3)
    result = compare_folders(sampled, tmp_path / "base", "zero_shot", tmp_path / "tuned")
    assert result["comparisons"][0]["n"] == 10
    assert result["comparisons"][0]["noise"]["repeats"] == pytest.approx(3.0)
    assert result["cost"]["arm"]["output_tokens_per_item"] == summary.output_tokens / 30


def test_the_noise_floor_of_sampling_has_another_seed(evaluate: Any, suite: Suite) -> None:
    assert with_other_seed(suite) is suite
    sampled = _sampled(suite)
    first, again = evaluate(sampled), evaluate(with_other_seed(sampled), "again")
    found = flip_rate(first, again, "exact_match")
    assert (found["n"], found["scores_flipped"]) == (10, 0)
    assert found["answers_changed"] == 10
    assert flip_rate(first, first, "exact_match")["answers_changed"] == 0
