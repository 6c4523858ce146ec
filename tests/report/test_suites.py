"""What the page shows of a run on several suites: one row each, slices, costs with intervals, noise, judges, later comparisons."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from finetune.evaluation.reviewed import answer_digest
from finetune.paths import read_json, write_json
from finetune.report import write_report
from finetune.report.answers import read_answers
from finetune.report.comparison import read_comparisons
from finetune.report.forest import read_forests
from finetune.report.read import read_run
from finetune.report.slices import SHOWN, read_slices
from finetune.report.tables import read_costs
from finetune.report.trust import read_trust
from finetune.report.verdict import read_verdict

SLICE = {
    "suite": "home_intents", "metric": "exact_match", "by": "intent", "correction": "holm", "n": 20, "difference": 0.1,
    "low": -0.05, "high": 0.25, "p_value": 0.2, "p_adjusted": 0.6, "fixed": 3, "broken": 1, "different": False,
}  # fmt: skip
RATIO = {"ratio": 0.042, "low": 0.041, "high": 0.043, "confidence": 0.95, "n": 200, "left_out": 4}


def _suite(name: str, role: str, metric: str, against: str, **more: Any) -> dict[str, Any]:
    return {"suite": name, "role": role, "primary_metric": metric, "against": against, "notes": [], **more}


@pytest.fixture
def many(run_folder: Path) -> Path:
    """The invented run, with the suites of its comparison described as the pipeline describes them."""
    path = run_folder / "eval" / "comparison.json"
    held = read_json(path)
    for one in held["comparisons"]:
        if one["suite"] == "forgetting":
            one |= {"verdict": "no-evidence", "noninferiority": "pass", "higher_is_better": False}
        if one["suite"] == "general":
            one |= {"noninferiority": "regressed"}
    held["suites"] = [
        _suite("home_intents", "task", "exact_match", "few_shot", notes=["short <b>note</b>"]),
        _suite("general", "regression", "accuracy", "few_shot"),
        _suite("forgetting", "forgetting", "nll_per_token", "few_shot"),
    ]
    write_json(path, held)
    return run_folder


def _text(folder: Path) -> str:
    html = write_report(folder).read_text(encoding="utf-8")
    body = re.sub(r"<(style|script)>.*?</\1>", " ", html, flags=re.DOTALL)
    return " ".join(re.sub(r"<[^>]+>", " ", body).split())


def test_one_plot_holds_every_suite_by_its_deciding_metric(many: Path) -> None:
    run = read_run(many)
    verdict = read_verdict(run)
    forests = read_forests(verdict.comparisons, verdict.primary)
    assert forests.suites is not None and forests.others is not None
    rows = [row.comparison for group in forests.suites.groups for row in group.rows]
    assert [(one.text("suite"), one.text("metric")) for one in rows] == [
        ("home_intents", "exact_match"), ("general", "accuracy"), ("forgetting", "nll_per_token"),
    ]  # fmt: skip
    assert [group.unit for group in forests.suites.groups] == ["percentage points", "nll per token"]
    others = [row.comparison for group in forests.others.groups for row in group.rows]
    assert len(rows) + len(others) == len(verdict.comparisons) == 7


def test_a_loss_of_the_margin_lies_where_worse_is(many: Path) -> None:
    by_suite = {one.text("suite"): one for one in read_comparisons(read_run(many)) if one.decides_suite}
    assert by_suite["general"].margin_at == -0.02
    assert by_suite["forgetting"].margin_at == 0.05
    assert by_suite["forgetting"].judged.word == "Within margin"
    assert by_suite["general"].judged.word == "Regressed"
    assert "lower is better" in _text(many)


def test_beside_the_verdict_stand_the_suites_that_got_worse_or_cannot_tell(many: Path) -> None:
    because = [text for _, text in read_verdict(read_run(many)).because]
    assert len(because) == 1 and because[0].startswith("general: accuracy fell by 4.0")


def test_a_later_comparison_adds_what_the_run_did_not_have(many: Path, factory: ModuleType) -> None:
    new = factory.compared(suite="support", metric="text_match", difference=0.2, low=0.1, high=0.3)
    repeated = factory.compared(difference=0.9, low=0.8, high=0.95)
    suites = [_suite("support", "task", "text_match", "few_shot")]
    write_json(many / "eval" / "comparison-base.json", {"suites": suites, "comparisons": [repeated, new]})
    past = factory.compared(baseline="tuned", difference=0.01, low=-0.02, high=0.04, verdict="no-evidence")
    suites = [_suite("home_intents", "task", "exact_match", "tuned")]
    write_json(many / "eval" / "comparison-last-run.json", {"suites": suites, "comparisons": [past]})
    found = read_comparisons(read_run(many))
    deciding = [(one.text("suite"), one.baseline) for one in found if one.decides_suite]
    assert ("support", "base, few-shot") in deciding
    assert ("home_intents", "tuned of last-run") in deciding
    own = next(
        one for one in found if one.decides_suite and one.text("suite") == "home_intents" and not one.origin
    )
    assert own.number("difference") != 0.9  # the run's own comparison is the one that counts
    assert "tuned of last-run" in _text(many)
    (many / "eval" / "comparison-torn.json").write_text("{")
    assert "comparison-torn.json is damaged" in _text(many)


def test_slices_come_worst_first_and_are_judged_after_correction(many: Path) -> None:
    path = many / "eval" / "comparison.json"
    held = read_json(path)
    lost = {
        **SLICE,
        "value": "<b>worst</b>",
        "difference": -0.4,
        "low": -0.6,
        "high": -0.2,
        "different": True,
        "p_adjusted": 0.001,
    }
    empty = dict.fromkeys(
        ("difference", "low", "high", "p_value", "p_adjusted", "fixed", "broken", "different")
    )
    held["slices"] = [
        lost,
        *({**SLICE, "value": f"v{n}"} for n in range(SHOWN)),
        {**SLICE, "value": "none", "n": 0, **empty},
    ]
    held["slices"].append({**lost, "suite": "forgetting", "metric": "nll_per_token", "value": "letters"})
    write_json(path, held)
    tables = read_slices(read_run(many))
    assert [table.suite for table in tables] == ["home_intents", "forgetting"]
    assert (len(tables[0].worst), len(tables[0].rest)) == (SHOWN, 2)
    assert tables[0].worst[0].judged.word == "Worse"
    assert tables[0].worst[1].judged.word == "Not shown"
    assert tables[0].rest[-1].judged.word == "No items"
    assert tables[1].worst[0].judged.word == "Better"  # lower is better there
    text = _text(many)
    assert "&lt;b&gt;worst&lt;/b&gt;" in text and "after the Holm correction" in text
    assert "2 more slices of home_intents" in text


def _cost(price: float | None = None) -> dict[str, Any]:
    names = ("prompt_tokens", "output_tokens", "latency_seconds_p50", "latency_seconds_p95", "price")
    side = {"price_per_query": price}
    cost: dict[str, Any] = {"baseline": side, "arm": side, "ratios": dict.fromkeys(names, RATIO)}
    if price is not None:
        cost["break_even"] = {"queries_per_month": 12_345.0, "tuning_cost": 50.0, "months": 12.0}
    return cost


def test_costs_are_the_recorded_ratios_with_their_intervals(many: Path) -> None:
    path = many / "eval" / "comparison.json"
    held = read_json(path)
    held["suites"][0]["cost"] = _cost()
    write_json(path, held)
    table = read_costs(read_run(many), "few_shot")[0]
    ratios = {head.value: cells[-1] for head, cells in table.rows}
    assert ratios["prompt tokens a query"].value == "0.042×"
    assert ratios["prompt tokens a query"].below == "0.041–0.043×, 4 items left out"
    assert "price of a query" not in ratios and table.remark is None
    suites = [{**held["suites"][0], "cost": _cost(0.002)}]
    write_json(many / "eval" / "comparison-base.json", {"suites": suites, "comparisons": []})
    table = read_costs(read_run(many), "few_shot")[0]
    assert table.rows[-1][0].value == "price of a query"
    assert table.remark is not None and "cheaper from 12,345 queries a month" in table.remark
    assert "12,345 queries" in _text(many)


def test_repeats_and_an_early_stop_are_told_of_the_deciding_metric_once(many: Path) -> None:
    path = many / "eval" / "comparison.json"
    held = read_json(path)
    held["primary_metrics"] = {"home_intents": held["comparisons"][0]["metric"]}
    for record in held["comparisons"]:
        record["noise"] = {"repeats": 4.0, "sampling_share": 0.31, "narrower_at_most": 0.17}
        record["sequential"] = {"stopped": True, "answered": 75, "of": 240, "e_value": 43.1, "needed": 20.0}
    write_json(path, held)
    lines = read_trust(read_run(many)).noise
    assert len(lines) == 2
    assert "4.0 answers an item" in lines[0] and "31" in lines[0] and "17" in lines[0]
    assert "stopped early, after 75 of 240 items, e-value 43.1 (20.0 is enough" in lines[1]
    assert "stopped early, after 75 of 240 items" in _text(many)


def test_what_limits_the_trust_is_shown_when_it_is_known(many: Path) -> None:
    assert read_trust(read_run(many)).is_empty
    write_json(
        many / "baseline" / "power.json",
        {"suites": [{"lines": ["power: t, 9 items: cannot tell", "warning: few"]}]},
    )
    noise = {
        "suite": "home_intents",
        "n": 204,
        "answers_changed": 3,
        "scores_flipped": 1,
        "flip_rate": 0.0049,
        "high": 0.027,
    }
    write_json(many / "eval" / "comparison-base.json", {"noise": [noise], "comparisons": []})
    judge = {
        "suite": "home_intents", "judge": "<i>j</i>", "won": 9, "tied": 2, "lost": 1, "n": 12, "missing": 3, "win_rate": 0.83,
        "verdict": "improved", "comparison": {"difference": 0.6, "low": 0.2, "high": 0.9},
        "position_bias": {"n": 12, "rate": 0.1, "low": 0.0, "high": 0.3, "first_preferred": 1, "second_preferred": 0},
        "calibration": {"n": 0, "calibrated": False},
    }  # fmt: skip
    write_json(many / "eval" / "home_intents" / "judge.json", judge)
    path = many / "eval" / "comparison.json"
    held = read_json(path)
    wrong = {"baseline": 40, "arm": 20}
    held["comparisons"][0]["off_format"] = {
        "baseline": 12, "arm": 3, "only_baseline": 10, "only_arm": 1, "both": 2, "wrong_in_format": wrong,
    }  # fmt: skip
    held["comparisons"][5] |= {"judge": {"name": "tiny", "calibration": {"n": 0}}, "missing": {"items": 4}}
    write_json(path, held)
    trust = read_trust(read_run(many))
    assert trust.power == ("t, 9 items: cannot tell.", "warning: few.")
    assert "3 of 204 answers and 1 scores changed" in trust.noise[0]
    assert trust.formats is not None and trust.formats.rows[0][1][1].below == "10 mended, 1 new"
    assert [one.judged.word for one in trust.judges] == ["Does not count yet", "Does not count yet"]
    assert "4 items have no score of it" in trust.judges[1].sentences[-1]
    text = _text(many)
    assert "Judge &lt;i&gt;j&lt;/i&gt; on home_intents" in text
    assert "3 pairs were not judged; they are left out, not lost." in text
    judge["calibration"] = {
        "n": 20, "agreed": 18, "agreement": 0.9, "low": 0.7, "high": 0.97, "kappa": 0.78, "kappa_low": 0.4,
        "kappa_high": 1.0, "calibrated": True,
    }  # fmt: skip
    write_json(many / "eval" / "home_intents" / "judge.json", judge)
    assert read_trust(read_run(many)).judges[0].judged.word == "Improved"


def test_what_was_read_by_hand_is_shown_for_the_answers_that_are_there(many: Path) -> None:
    lines = (many / "eval" / "home_intents" / "tuned.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines[:40]]
    read = [
        {"suite": "home_intents", "item": record["item"], "right": {"baseline": n % 2 == 0, "tuned": True},
         "scorer": {"baseline": n % 2 == 0, "tuned": n > 0},
         "answers": {"baseline": "0" * 16, "tuned": answer_digest(record["output"])}}
        for n, record in enumerate(records)
    ]  # fmt: skip
    stale = {**read[5], "item": records[6]["item"], "right": {"baseline": False, "tuned": False}}
    torn = {"suite": "home_intents", "item": "x", "right": {}}
    rewritten = "".join(json.dumps(line) + "\n" for line in [*read[:6], stale, torn, *read[6:]])
    (many / "eval" / "review.jsonl").write_text(rewritten)
    (line,) = read_trust(read_run(many)).by_hand
    assert line.startswith("home_intents: 40 items were read; reader and scorer agree on 79 of 80 answers")
    assert "0 tuned answers were found wrong" in line and "7.2" in line
    assert "Read by hand" in _text(many)


def test_texts_that_became_less_likely_are_shown_as_texts(many: Path) -> None:
    for root, arm, losses in (("baseline", "few_shot", [3.0, 3.0, 3.0]), ("eval", "tuned", [3.1, 4.0, 2.9])):
        rows = [
            {"item": f"t{n}", "arm": arm, "cluster": f"t{n}", "tags": {}, "prompt": f"text {n}", "reference": f"text {n} <b>",
             "output": json.dumps({"tokens": 4}), "output_tokens": 4, "scores": {"nll_per_token": loss}}
            for n, loss in enumerate(losses)
        ]  # fmt: skip
        folder = many / root / "forgetting"
        folder.mkdir(parents=True)
        (folder / f"{arm}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        write_json(folder / f"{arm}.summary.json", {"n": 3, "metrics": {"nll_per_token": {"mean": 3.0}}})
    run = read_run(many)
    verdict = read_verdict(run)
    reading = next(
        one for one in read_answers(run, verdict.primary, verdict.comparisons) if one.suite == "forgetting"
    )
    assert reading.measures and reading.groups[0].n == 2
    assert [item.identity for item in reading.groups[0].items] == ["t1", "t0"]
    text = _text(many)
    assert "nll per token 4.00" in text and "text 1 &lt;b&gt;" in text
    assert "The texts that lost most come first." in text


def test_notes_name_their_suite(many: Path) -> None:
    assert "home_intents: short &lt;b&gt;note&lt;/b&gt;." in _text(many)
