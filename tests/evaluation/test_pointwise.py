"""A judge's scores as a metric: kept in the records, missing ones left out and counted, and no verdict before it is calibrated."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from finetune.errors import ExitCode, UserError
from finetune.evaluation import judge_model
from finetune.evaluation.compare import compare_records
from finetune.evaluation.gate import gate
from finetune.evaluation.judge_model import LocalJudge, Question, ServedJudge, ask_judge, find_judge
from finetune.evaluation.noise import flip_rate
from finetune.evaluation.pointwise import calibrate_pointwise, judge_records
from finetune.evaluation.reviewed import answer_digest
from finetune.evaluation.scorers.judged import make_judge
from finetune.evaluation.scoring import score_records, summarise
from finetune.evaluation.screen import comparison_lines
from finetune.evaluation.server import ServerAwayError, ServerModel
from finetune.evaluation.suite import Suite, load_suite

SUITE = """\
suite: 1
name: polite
items: {jsonl: items.jsonl}
scorers:
  - text_match
  - {scorer: judge, metric: politeness, parameters: {rubric: Is it polite?, server: "http://unused/v1", model: j}}
primary_metric: politeness
slices: {by: [kind]}
"""


class ScriptedJudge:
    name = "j"
    identity = "pointwise-judge-01"

    def __init__(self, reply: Callable[[str], str | None]) -> None:
        self.reply = reply

    def replies(self, questions: Sequence[Question], attempt: int) -> Iterator[tuple[int, str | None]]:
        for place, question in enumerate(questions):
            yield place, self.reply(question.asked.split("<answer>\n")[1].split("\n</answer>")[0])


def polite(answer: str) -> str:
    return "hm" if "odd" in answer else json.dumps({"pass": "please" in answer})


@pytest.fixture
def suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Suite:
    monkeypatch.setenv("FINETUNE_RUNS", str(tmp_path / "runs"))
    monkeypatch.setattr("finetune.evaluation.pointwise.find_judge", lambda **_: ScriptedJudge(polite))
    item = {"id": "a", "messages": [{"role": "user", "content": "q"}], "reference": "r"}
    (tmp_path / "items.jsonl").write_text(json.dumps(item) + "\n")
    (tmp_path / "polite.yaml").write_text(SUITE)
    return load_suite(tmp_path / "polite.yaml")


def _records(arm: str, outputs: list[str]) -> list[dict[str, Any]]:
    return [
        {
            "item": f"i{n}", "arm": arm, "cluster": f"c{n}", "tags": {"kind": f"k{n % 2}"}, "prompt": "p",
            "question": "q", "reference": "r", "output": output, "prompt_tokens": 1, "output_tokens": 1,
            "finish_reason": "stop", "latency_seconds": 0.1, "scores": {},
        }
        for n, output in enumerate(outputs)
    ]  # fmt: skip


def _scored(suite: Suite) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    before = _records("zero_shot", ["no"] * 40 + ["odd"] * 4)
    after = _records("tuned", ["yes, please"] * 38 + ["odd"] * 2 + ["please"] * 4)
    return score_records(suite, before), score_records(suite, after)


def test_records_get_the_score_and_a_missing_one_is_null(suite: Suite) -> None:
    before, after = _scored(suite)
    assert [record["scores"]["politeness"] for record in (before[0], before[43], after[0])] == [
        0.0,
        None,
        1.0,
    ]
    assert before[0]["scores"]["text_match"] == 0.0
    held = summarise(before, suite.metrics, may_lack=suite.judges())["politeness"]
    assert (held["n"], held["missing"], held["mean"]) == (40, 4, 0.0)


def test_items_without_a_score_are_left_out_and_counted_never_lost(suite: Suite) -> None:
    result = compare_records(suite, *_scored(suite))
    one = next(one for one in result["comparisons"] if one["metric"] == "politeness")
    assert one["missing"] == {"baseline": 4, "arm": 2, "items": 6}
    assert (one["n"], one["fixed"], one["broken"]) == (38, 38, 0)
    assert sum(part["n"] for part in result["slices"]) == 38
    assert next(one for one in result["comparisons"] if one["metric"] == "text_match")["n"] == 44
    json.dumps(result, allow_nan=False)


def test_the_verdict_of_an_uncalibrated_judge_is_withheld_from_every_gate(suite: Suite) -> None:
    before, after = _scored(suite)
    result = compare_records(suite, before, after)
    assert (result["verdict"], result["exit_code"]) == ("inconclusive", ExitCode.INCONCLUSIVE)
    assert gate([result], require="no-regression").exit_code == ExitCode.INCONCLUSIVE
    one = next(one for one in result["comparisons"] if one["metric"] == "politeness")
    assert "not calibrated (0 of its answers were read by hand)" in one["notes"][-1]
    reviewed = {
        (r["item"], answer_digest(r["output"])): "please" in r["output"] for r in [*before, *after][5:70]
    }
    trusted = compare_records(suite, before, after, reviewed=reviewed)
    assert trusted["verdict"] == "improved"
    calibration = next(one for one in trusted["comparisons"] if one["metric"] == "politeness")["judge"][
        "calibration"
    ]
    assert calibration["kappa"] == 1.0 and calibration["calibrated"]
    wrong = {answer: not right for answer, right in reviewed.items()}
    assert compare_records(suite, before, after, reviewed=wrong)["verdict"] == "inconclusive"


def test_the_screen_says_whether_the_judge_counts(suite: Suite) -> None:
    before, after = _scored(suite)
    text = "\n".join(comparison_lines(compare_records(suite, before, after)))
    assert "politeness, judged by j, nothing of it was read by hand; its verdict does not count yet" in text
    assert "politeness, 6 items without a score of the judge are left out, not lost" in text
    reviewed = {
        (r["item"], answer_digest(r["output"])): "please" in r["output"] for r in [*before, *after][5:70]
    }
    text = "\n".join(comparison_lines(compare_records(suite, before, after, reviewed=reviewed)))
    assert "kappa 1.00 [" in text and "its verdict counts" in text


def test_the_noise_floor_is_taken_over_what_was_scored_both_times(suite: Suite) -> None:
    first, _ = _scored(suite)
    again = score_records(suite, _records("zero_shot", ["please"] * 4 + ["no"] * 38 + ["odd", "no"]))
    floor = flip_rate(first, again, "politeness", may_lack=True)
    assert (floor["n"], floor["scores_flipped"], floor["flip_rate"]) == (
        44,
        4,
        0.1,
    )  # of 40 scored both times


def test_only_what_was_read_of_this_very_answer_calibrates(suite: Suite) -> None:
    before, after = _scored(suite)
    rules = suite.judges()["politeness"]
    stale = {(record["item"], answer_digest("another answer")): True for record in before}
    assert calibrate_pointwise(rules, "politeness", [*before, *after], stale)["n"] == 0


def test_a_judge_that_scores_nothing_is_an_error(suite: Suite) -> None:
    with pytest.raises(UserError, match="scored none of 3 answers"):
        judge_records(suite, _records("tuned", ["odd"] * 3))


def test_a_judge_asks_nobody_while_the_suite_is_read(suite: Suite) -> None:
    assert set(suite.score_functions()) == {"text_match"}
    assert suite.metrics == ["text_match", "politeness"]


@pytest.mark.parametrize(
    ("reply", "score"),
    [
        ('{"score": 4}', 4.0),
        ('{"score": 4.0, "reason": "fine"}', 4.0),
        ('{"score": 6}', None),
        ('{"score": 0}', None),
        ('{"score": 3.5}', None),
        ('{"score": true}', None),
        ('{"score": "4"}', None),
        ("4", None),
        ('Score: {"score": 4}', None),
    ],
)
def test_a_score_is_a_whole_number_on_the_scale_or_missing(reply: str, score: float | None) -> None:
    rules = make_judge(rubric="r", scale=[1, 5], local="builtin:x")
    assert rules.score_of(reply) == score
    assert (rules.passes(3), rules.passes(4)) == (False, True)
    assert "from 1 (worst) to 5 (best)" in rules.told


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"rubric": ""}, "say what makes an answer good"),
        ({"rubric": "r"}, "name the judge"),
        ({"rubric": "r", "server": "u"}, "name the judge"),
        ({"rubric": "r", "server": "u", "model": "m", "local": "l"}, "name the judge"),
        ({"rubric": "r", "local": "l", "scale": [5, 1]}, "lowest and highest"),
        ({"rubric": "r", "local": "l", "scale": "1-5"}, "lowest and highest"),
        ({"rubric": "r", "local": "l", "tries": 0}, "at least 1"),
    ],
)
def test_a_judge_that_cannot_be_is_refused_with_its_suite(
    suite: Suite, parameters: dict[str, Any], message: str
) -> None:
    text = SUITE.replace(
        '{rubric: Is it polite?, server: "http://unused/v1", model: j}', json.dumps(parameters)
    )
    suite.path.write_text(text)
    with pytest.raises(UserError, match=message):
        load_suite(suite.path)


class _Server(ServerModel):
    """Replies from a script; an exception in it is raised."""

    def __init__(self, script: list[Any]) -> None:
        super().__init__("http://unused", "j")
        object.__setattr__(self, "script", script)

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        step = self.script.pop(0)  # type: ignore[attr-defined]
        if isinstance(step, Exception):
            raise step
        return {"choices": [{"message": {"content": step}}]} if isinstance(step, str) else step


def _ask(script: list[Any], n: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[float | None]:
    monkeypatch.setenv("FINETUNE_RUNS", str(tmp_path))
    rules = make_judge(rubric="r", local="builtin:x")
    questions = [Question("told", f"asked {place}") for place in range(n)]
    return ask_judge(ServedJudge(_Server(script), concurrency=1), questions, rules.score_of)


def test_a_timeout_is_asked_again_and_then_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    away = ServerAwayError("late")
    script = ['{"pass": true}', away, '{"pass": false}', away, away]
    assert _ask(script, 3, monkeypatch, tmp_path) == [1.0, None, 0.0]
    script = ['{"pass": true}', {"choices": []}, '{"pass": true}']
    assert _ask(script, 2, monkeypatch, tmp_path / "b") == [1.0, 1.0]


def test_a_server_that_is_gone_or_refuses_ends_the_judging(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(ServerAwayError):
        _ask([ServerAwayError("gone")] * 5 + ['{"pass": true}'] * 95, 100, monkeypatch, tmp_path)
    with pytest.raises(UserError, match="no such model"):
        _ask([UserError("no such model")] * 3, 3, monkeypatch, tmp_path)


def test_a_local_model_judges_through_its_own_template(
    tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FINETUNE_RUNS", str(tmp_path))
    judge = find_judge(server=None, model=None, key=None, local=str(tiny_model_folder))
    assert isinstance(judge, LocalJudge)
    rules = make_judge(rubric="r", local=str(tiny_model_folder), tries=1)
    questions = [Question("t", "a"), Question("t", "a longer one")]
    assert ask_judge(judge, questions, rules.score_of, tries=1) == [
        None,
        None,
    ]  # its random words are no verdict
    assert judge.identity == LocalJudge(str(tiny_model_folder)).identity
    assert judge.identity != LocalJudge(str(tiny_model_folder), dtype="fp32").identity

    seen: list[str] = []

    def generate(model: Any, prompts: Any, rule: Any, *, batch_size: int) -> Iterator[Any]:
        from finetune.evaluation.generate import Completion

        for place, prompt in enumerate(prompts):
            seen.append(rule.tokenizer.decode(prompt))
            yield Completion(place, '{"pass": true}', 4, "stop", 0.1)

    monkeypatch.setattr("finetune.evaluation.generate.generate", generate)
    assert ask_judge(judge, questions, rules.score_of, tries=1) == [1.0, 1.0]
    assert "a longer one" in seen[1] and "assistant" in seen[1]


def test_who_judges_must_be_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for given in (
        {"server": None, "local": None},
        {"server": "u", "local": "l"},
        {"server": "u", "local": None},
    ):
        with pytest.raises(UserError):
            find_judge(model=None, key=None, **given)
    assert judge_model.TRIES > 1
