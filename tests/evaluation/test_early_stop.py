"""Items in blocks, a look after each, a verdict from bets alone: fewer answers, and no more false verdicts."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from finetune.errors import ExitCode, UserError
from finetune.evaluation import answering
from finetune.evaluation.compare import compare_folders, compare_records
from finetune.evaluation.early_stop import EarlyStop, blocks_of, place_of, seen_records
from finetune.evaluation.gate import gate
from finetune.evaluation.generate import Completion, generate
from finetune.evaluation.items import Item
from finetune.evaluation.records import Record, read_records, read_summary
from finetune.evaluation.run import evaluate_arm, prepare_arm
from finetune.evaluation.screen import comparison_lines
from finetune.evaluation.suite import StopEarlySection, Suite, load_suite
from finetune.stats.sequential import EProcess

SECTION = StopEarlySection(block_items=10, seed=3)


def _stopping(suite: Suite, **changes: Any) -> Suite:
    return suite.model_copy(
        update={"scorers": ["exact_match"], "stop_early": SECTION, "role": "task"} | changes
    )


def _items(n: int, *, per_cluster: int = 1) -> list[Item]:
    return [
        Item(
            f"item-{index}",
            ({"role": "user", "content": f"q{index}"},),
            f'{{"n":{index}}}',
            f"c{index // per_cluster}",
        )
        for index in range(n)
    ]


def _records(arm: str, items: list[Item], right: list[bool]) -> list[Record]:
    return [
        {
            "item": item.id, "repeat": 0, "arm": arm, "cluster": item.cluster, "tags": {}, "source": "", "prompt": "p",
            "reference": item.reference, "output": item.reference if good else "no", "prompt_tokens": 3,
            "output_tokens": 2, "finish_reason": "stop", "latency_seconds": 0.1, "scores": {"exact_match": float(good)},
        }
        for item, good in zip(items, right, strict=True)
    ]  # fmt: skip


def test_blocks_hold_whole_clusters_in_an_order_of_the_seed_alone(suite: Suite, tiny_tokenizer: Any) -> None:
    items = _items(60, per_cluster=3)
    job = prepare_arm(tiny_tokenizer, _stopping(suite), items, arm="tuned", key="k")
    blocks = blocks_of(SECTION, items, job.asks)
    names = [[items[ask.place].id for ask in block] for block in blocks]
    assert sorted(name for block in names for name in block) == sorted(item.id for item in items)
    assert [len(block) for block in blocks] == [12] * 5
    for block in blocks:
        assert len({items[ask.place].cluster for ask in block}) == 4
    assert names != [[item.id for item in items[start : start + 12]] for start in range(0, 60, 12)]
    turned = items[::-1]
    again = blocks_of(SECTION, turned, prepare_arm(tiny_tokenizer, suite, turned, arm="tuned", key="k").asks)
    assert [{turned[ask.place].id for ask in block} for block in again] == [set(block) for block in names]
    other = StopEarlySection(block_items=10, seed=4)
    assert [{items[ask.place].id for ask in block} for block in blocks_of(other, items, job.asks)] != [
        set(block) for block in names
    ]


def _first(records: list[Record], n_clusters: int) -> list[Record]:
    ranked = sorted({record["cluster"] for record in records}, key=lambda name: place_of(SECTION, name))
    return [record for record in records if record["cluster"] in ranked[:n_clusters]]


def test_pairs_end_where_the_first_arm_stopped_and_gaps_before_that_are_refused(suite: Suite) -> None:
    items, stopping = _items(60), _stopping(suite)
    whole, other = _records("few_shot", items, [False] * 60), _records("tuned", items, [True] * 60)
    for arms in (
        (whole, _first(other, 20)),
        (_first(whole, 20), other),
        (_first(whole, 30), _first(other, 20)),
    ):
        left, right = seen_records(stopping, *arms)
        assert {one["item"] for one in left} == {one["item"] for one in right}
        assert len(left) == len(right) == 20
    holes = _first(other, 20)[:10] + _first(other, 20)[11:]
    with pytest.raises(UserError, match="1 only in the baseline"):
        compare_records(stopping, whole, holes)
    assert seen_records(_stopping(suite, stop_early=None), whole, holes) == (whole, holes)


def test_a_stopped_comparison_is_judged_by_bets_and_says_so(suite: Suite) -> None:
    items = _items(60)
    before = _records("few_shot", items, [False] * 60)
    after = _first(_records("tuned", items, [True] * 60), 10)
    stopped = {"answered": 10, "of": 60, "largest_cluster": 1}
    result = compare_records(_stopping(suite), before, after, stopped=stopped)
    one = result["comparisons"][0]
    assert (result["verdict"], result["exit_code"]) == ("improved", ExitCode.DONE)
    assert one["test"] == "e-process, looked at after every 10 items"
    assert one["sequential"] == {
        "e_value": pytest.approx(EProcess(fixed=10).e_value), "needed": pytest.approx(20.0), "answered": 10, "of": 60,
        "stopped": True, "clusters": 10, "block_items": 10,
    }  # fmt: skip
    assert one["p_value"] == pytest.approx(1 / one["sequential"]["e_value"])
    assert 0.0 < one["low"] < one["high"] == 1.0
    assert any(
        line.startswith("  stopped after 10 of 60 items; e-value") for line in comparison_lines(result)
    )
    assert gate([result]).rows[0].outcome == "pass"
    json.dumps(result, allow_nan=False)


def test_bets_decide_even_where_all_was_answered_and_a_fixed_test_would_say_otherwise(suite: Suite) -> None:
    """7 fixed, none broken of 60: mid-p 0.008, but the bets have not won 20 to 1 yet."""
    items = _items(60)
    before = _records("few_shot", items, [False] * 60)
    after = _records("tuned", items, [index < 6 for index in range(60)])
    assert compare_records(_stopping(suite, stop_early=None), before, after)["verdict"] == "improved"
    result = compare_records(_stopping(suite), before, after)
    assert result["verdict"] != "improved"
    one = result["comparisons"][0]
    assert (one["sequential"]["stopped"], one["sequential"]["answered"]) == (False, 60)
    assert one["low"] <= 0.0
    assert any("went through all: 60 of 60 items" in line for line in comparison_lines(result))
    assert "a difference needs 20" in one["limits"]


def test_other_metrics_of_a_stopped_arm_carry_a_note(suite: Suite) -> None:
    items = _items(60)
    before, after = _records("few_shot", items, [False] * 60), _records("tuned", items, [True] * 60)
    for record in (*before, *after):
        record["scores"]["valid_json"] = record["scores"]["exact_match"]
    two = _stopping(suite, scorers=["exact_match", "valid_json"])
    stopped = {"answered": 10, "of": 60, "largest_cluster": 1}
    result = compare_records(two, before, _first(after, 10), stopped=stopped)
    notes = {one["metric"]: one["notes"] for one in result["comparisons"]}
    assert notes["exact_match"] == []
    assert "'exact_match' decided when to stop" in notes["valid_json"][-1]


def _answered(suite: Suite, baseline: list[Record], tuned: list[Record], *, clusters_a_look: int = 10) -> int:
    """How many clusters are answered until the arm stops."""
    stop = EarlyStop(suite, baseline, [Item(one["item"], (), "", one["cluster"]) for one in baseline])
    order = sorted({one["cluster"] for one in baseline}, key=lambda name: place_of(SECTION, name))
    for start in range(0, len(order), clusters_a_look):
        block = set(order[start : start + clusters_a_look])
        if stop.enough([one for one in tuned if one["cluster"] in block]):
            return start + len(block)
    return len(order)


def _outcome(suite: Suite, before: list[bool], after: list[bool], *, per_cluster: int = 1) -> tuple[str, int]:
    """(verdict, items answered) of an arm that stops early."""
    items = _items(len(before), per_cluster=per_cluster)
    baseline, tuned = _records("few_shot", items, before), _records("tuned", items, after)
    seen = _first(tuned, _answered(suite, baseline, tuned))
    stopped = {"answered": len(seen), "of": len(items), "largest_cluster": per_cluster}
    verdict = compare_records(suite, baseline, seen, stopped=stopped, slices=False)["verdict"]
    return verdict, len(seen)


def test_equal_arms_are_rarely_told_apart_however_often_one_looks(suite: Suite) -> None:
    """150 suites of 120 items, a quarter of them discordant, a look after every 20: the promise is 5 %."""
    draw = random.Random(5)
    stopping, stopped, items = _stopping(suite), 0, _items(120)
    for _ in range(150):
        before = [draw.random() < 0.5 for _ in items]
        after = [right if draw.random() < 0.5 else draw.random() < 0.5 for right in before]
        arms = _records("few_shot", items, before), _records("tuned", items, after)
        stopped += _answered(stopping, *arms, clusters_a_look=20) < 120
    assert stopped / 150 <= 0.05


def test_clear_gains_and_losses_end_early_and_a_guard_ends_when_a_loss_is_excluded(suite: Suite) -> None:
    task = _stopping(suite)
    assert _outcome(task, [False] * 200, [True] * 200) == ("improved", 10)
    assert _outcome(task, [True] * 200, [False] * 200, per_cluster=2) == ("regressed", 20)
    same = [index % 3 > 0 for index in range(200)]
    assert _outcome(task, same, same) == ("inconclusive", 200)  # a loss of 2 points is not excluded
    assert _outcome(_stopping(suite, margin=0.1), same, same) == ("no-evidence", 200)
    guard = _stopping(suite, role="regression", margin=0.1)
    assert _outcome(guard, same, same)[1] < 100


def test_only_right_or_wrong_metrics_of_one_answer_may_stop_early(suite: Suite) -> None:
    items = _items(20)
    records = _records("few_shot", items, [True] * 20)
    records[4] |= {"reference": '{"n":4,"m":1}', "output": '{"n":4,"m":2}'}
    graded = _stopping(suite, scorers=["slot_f1"], primary_metric="slot_f1")
    with pytest.raises(UserError, match="is to stop early, but 'slot_f1' gave"):
        EarlyStop(graded, records, items)
    with pytest.raises(UserError, match=r"lacks 2 items of suite tiny \(item-18, item-19\)"):
        EarlyStop(_stopping(suite), records[:18], items)
    suite.path.write_text(
        suite.path.read_text().replace("{max_new_tokens: 12}", "{temperature: 1, repeats: 2}")
        + "stop_early: {block_items: 5}\n"
    )
    with pytest.raises(UserError, match="means of several answers are neither"):
        load_suite(suite.path)


class _Counted:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[int] = []
        self.die_after: int | None = None
        monkeypatch.setattr(answering, "generate", self)

    def __call__(self, model: Any, prompts: Any, rule: Any, **options: Any) -> Iterator[Completion]:
        self.asked.append(len(prompts))
        for answer in generate(model, prompts, rule, **options):
            if self.die_after is not None:
                self.die_after -= 1
                if self.die_after < 0:
                    raise KeyboardInterrupt
            yield answer


@pytest.fixture
def arms(
    lively_model: Any, tiny_tokenizer: Any, suite: Suite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Any:
    """A suite whose references are the tuned arm's own answers: the tuned arm is always right, the baseline never."""
    items = _items(40, per_cluster=2)
    free = _stopping(suite, stop_early=None, scorers=["normalised_match"], primary_metric="normalised_match")

    def run(suite: Suite, arm: str, folder: str, asked: list[Item], **options: Any) -> Any:
        return evaluate_arm(
            lively_model, tiny_tokenizer, suite, asked, arm=arm, batch_size=4, out_folder=tmp_path / folder,
            key=arm, **options,
        )  # fmt: skip

    run(free, "tuned", "oracle", items)
    own = {record["item"]: record["output"] for record in read_records(tmp_path / "oracle", "tuned")}
    asked = [Item(item.id, item.messages, own[item.id] or " ", item.cluster) for item in items]
    stopping = free.model_copy(update={"stop_early": SECTION})
    run(stopping, "zero_shot", "base", asked)
    return run, stopping, free, asked, _Counted(monkeypatch), read_records(tmp_path / "base", "zero_shot")


def test_an_arm_stops_when_enough_is_seen_and_is_complete_then(arms: Any, tmp_path: Path) -> None:
    run, stopping, free, items, counted, baseline = arms
    summary = run(stopping, "tuned", "tuned", items, baseline=baseline)
    assert counted.asked == [10, 10]
    assert summary.stopped == {"answered": 20, "of": 40, "largest_cluster": 2}
    assert read_summary(tmp_path / "tuned", "tuned") == summary
    assert run(stopping, "tuned", "tuned", items, baseline=baseline) == summary
    assert counted.asked == [10, 10]
    result = compare_folders(stopping, tmp_path / "base", "zero_shot", tmp_path / "tuned")
    one = result["comparisons"][0]
    assert result["verdict"] == "improved"
    assert (one["n"], one["sequential"]["of"], one["sequential"]["clusters"]) == (20, 40, 10)
    assert result["cost"]["ratios"]["output_tokens"]["n"] == 20
    full = run(free, "tuned", "tuned", items)
    assert counted.asked == [10, 10, 20]
    assert (full.n, full.stopped) == (40, None)


def test_an_arm_that_was_killed_in_a_block_stops_where_it_would_have(arms: Any, tmp_path: Path) -> None:
    run, stopping, _, items, counted, baseline = arms
    whole = run(stopping, "tuned", "whole", items, baseline=baseline)
    counted.die_after = 16
    with pytest.raises(KeyboardInterrupt):
        run(stopping, "tuned", "tuned", items, baseline=baseline)
    counted.die_after = None
    continued = run(stopping, "tuned", "tuned", items, baseline=baseline)
    assert counted.asked == [10, 10, 10, 10, 4]
    assert continued.stopped == whole.stopped
    records = [read_records(tmp_path / folder, "tuned") for folder in ("whole", "tuned")]
    for record in (*records[0], *records[1]):
        del record["latency_seconds"]
    assert records[0] == records[1]
