"""`finetune eval …`, as a user and a build server call it."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner, Result

from finetune.cli.evaluate import app
from finetune.errors import ExitCode, UserError
from finetune.evaluation.items import items_digest
from finetune.evaluation.records import read_summary, write_arm
from finetune.evaluation.reviewed import answer_digest
from finetune.evaluation.scoring import score_records, summarise_arm
from finetune.evaluation.suite import Suite, load_suite
from finetune.evaluation.suite_data import load_suite_data, read_items
from finetune.paths import read_json, read_jsonl, write_jsonl

SUITE = """\
suite: 1
name: NAME
role: ROLE
items: {jsonl: NAME.jsonl}
scorers: [exact_match, valid_json, intent_accuracy]
primary_metric: exact_match
margin: 0.1
"""
RECIPE = """\
recipe: 1
name: mine
model: {id: base}
data: {spec: mine}
eval: {suites: [SUITES], baselines: [zero_shot], against: zero_shot}
"""


def call(*arguments: str | Path) -> Result:
    """As `finetune` calls it: the command's return value is the exit code."""
    result = CliRunner().invoke(
        app, [str(argument) for argument in arguments], catch_exceptions=False, standalone_mode=False
    )
    result.exit_code = result.exit_code or result.return_value or 0
    return result


def make_suite(folder: Path, name: str = "task", role: str = "task", n: int = 60) -> Suite:
    folder.mkdir(exist_ok=True)
    lines = [
        {
            "id": f"{name}-{index}",
            "messages": [{"role": "user", "content": f"q{index}"}],
            "reference": f'{{"intent":"A","n":{index}}}',
            "tags": {"kind": "odd" if index % 2 else "even"},
        }
        for index in range(n)
    ]
    write_jsonl(folder / f"{name}.jsonl", lines)
    (folder / f"{name}.yaml").write_text(SUITE.replace("NAME", name).replace("ROLE", role))
    return load_suite(folder / f"{name}.yaml")


def save_answers(
    folder: Path, suite: Suite, arm: str, right: Sequence[bool], *, output: str | None = None
) -> None:
    items = load_suite_data(suite).items
    records = [
        {
            "item": item.id, "arm": arm, "cluster": item.cluster, "source": item.source, "tags": item.tags,
            "prompt": "p", "reference": item.reference, "output": output or (item.reference if good else "no"),
            "prompt_tokens": 5, "output_tokens": 3, "finish_reason": "stop", "latency_seconds": 0.1, "scores": {},
        }
        for item, good in zip(items, right, strict=True)
    ]  # fmt: skip
    records = score_records(suite, records)
    summary = summarise_arm(
        suite, records, arm=arm, seconds=1.0, key="k", items_digest=items_digest(items), adapter_sha256=None,
        batch_size=8, template_sha256="t" * 64,
    )  # fmt: skip
    write_arm(folder, summary, records)


@pytest.fixture
def make_run(tmp_path: Path) -> Any:
    def make(name: str, answers: dict[str, tuple[list[bool], list[bool]]], suites: Sequence[Suite]) -> Path:
        run = tmp_path / name
        run.mkdir()
        paths = ", ".join(str(suite.path) for suite in suites)
        (run / "recipe.resolved.yaml").write_text(RECIPE.replace("SUITES", paths))
        for suite in suites:
            before, after = answers[suite.name]
            save_answers(run / "baseline" / suite.name, suite, "zero_shot", before)
            save_answers(run / "eval" / suite.name, suite, "tuned", after)
        return run

    return make


@pytest.fixture
def suite(tmp_path: Path) -> Suite:
    return make_suite(tmp_path / "eval")


@pytest.fixture
def guard(tmp_path: Path) -> Suite:
    return make_suite(tmp_path / "eval", "guard", "regression")


ALL, NONE = [True] * 60, [False] * 60
MOST = [index % 10 != 0 for index in range(60)]  # six wrong


@pytest.mark.parametrize(
    ("before", "after", "code", "word"),
    [
        (NONE, MOST, ExitCode.DONE, "pass"),
        (MOST, NONE, ExitCode.REGRESSED, "regressed"),
        (MOST, MOST, ExitCode.NO_EVIDENCE, "no-evidence"),
        (ALL, [index > 4 for index in range(60)], ExitCode.REGRESSED, "regressed"),
        (ALL, [index > 2 for index in range(60)], ExitCode.INCONCLUSIVE, "inconclusive"),
    ],
)
def test_the_gate_answers_with_its_exit_code(
    make_run: Any, suite: Suite, before: list[bool], after: list[bool], code: ExitCode, word: str
) -> None:
    result = call("gate", make_run("run", {"task": (before, after)}, [suite]))
    assert result.exit_code == code
    assert f"gate: {word}" in result.stdout


def test_a_guarding_suite_must_only_not_get_worse(make_run: Any, suite: Suite, guard: Suite) -> None:
    kept = make_run("kept", {"task": (NONE, ALL), "guard": (MOST, MOST)}, [suite, guard])
    assert call("gate", kept).exit_code == ExitCode.DONE
    lost = make_run("lost", {"task": (NONE, ALL), "guard": (ALL, NONE)}, [suite, guard])
    result = call("gate", lost, "--json")
    assert result.exit_code == ExitCode.REGRESSED
    answer = json.loads(result.stdout)
    assert answer["outcome"] == "regressed"
    assert {row["suite"]: row["outcome"] for row in answer["suites"]} == {
        "task": "pass",
        "guard": "regressed",
    }


def test_claims_of_several_task_suites_are_corrected_as_the_recipe_declares(
    make_run: Any, suite: Suite, tmp_path: Path
) -> None:
    other = make_suite(tmp_path / "eval", "other")
    few = [index < 6 for index in range(60)]  # six fixed: p = 0.016 alone, 0.031 as the smaller of two
    answers = {"task": (NONE, few), "other": (NONE, [index < 5 for index in range(60)])}
    run = make_run("run", answers, [suite, other])
    result = call("gate", run, "--json", "--markdown", tmp_path / "gate.md")
    rows = {row["suite"]: row for row in json.loads(result.stdout)["suites"]}
    assert rows["task"]["p_adjusted"] == pytest.approx(2 * rows["task"]["p_value"])
    assert (rows["task"]["outcome"], rows["other"]["outcome"]) == ("pass", "pass")
    assert "p-values of 2 claims of improvement corrected (Holm" in (tmp_path / "gate.md").read_text()
    third = make_suite(tmp_path / "eval", "third")
    wider = make_run("wider", {**answers, "third": (MOST, MOST)}, [suite, other, third])
    rows = {row["suite"]: row for row in json.loads(call("gate", wider, "--json").stdout)["suites"]}
    assert rows["other"]["p_adjusted"] > 0.05 > rows["other"]["p_value"]
    assert rows["other"]["outcome"] == "no-evidence"
    assert "not among 3 task suites" in rows["other"]["message"]
    recipe = wider / "recipe.resolved.yaml"
    recipe.write_text(recipe.read_text().replace("eval: {", "eval: {correction: all-must-pass, "))
    answer = json.loads(call("gate", wider, "--json").stdout)
    assert {row["suite"]: row["outcome"] for row in answer["suites"]} == {
        "task": "pass", "other": "pass", "third": "no-evidence",
    }  # fmt: skip
    assert "needs no correction" in answer["correction"]["explained"]


def test_a_past_run_is_a_baseline_that_must_not_be_lost_to(
    make_run: Any, suite: Suite, monkeypatch: pytest.MonkeyPatch
) -> None:
    past = make_run("past", {"task": (NONE, MOST)}, [suite])
    same = make_run("same", {"task": (NONE, MOST)}, [suite])
    assert call("gate", same, "--baseline", past).exit_code == ExitCode.DONE
    assert (
        call("gate", same, "--baseline", past, "--require", "improvement").exit_code == ExitCode.NO_EVIDENCE
    )
    worse = make_run("worse", {"task": (NONE, NONE)}, [suite])
    monkeypatch.setenv("FINETUNE_RUNS", str(past.parent))
    named = past.rename(past.with_name("mine-1a2b3c4d"))
    for name in (named.name, "1a2b"):
        assert call("gate", worse, "--baseline", name).exit_code == ExitCode.REGRESSED
    shutil.copytree(named, named.with_name("other-1a2bffff"))
    with pytest.raises(UserError, match="names 2 runs: mine-1a2b3c4d, other-1a2bffff"):
        call("gate", worse, "--baseline", "1a2b")
    with pytest.raises(UserError, match="no such baseline"):
        call("gate", worse, "--baseline", "9f9f9f9f")
    past = named
    assert call("gate", worse, "--baseline", past).exit_code == ExitCode.REGRESSED
    records = past / "eval" / "task" / "tuned.jsonl"
    assert call("gate", worse, "--baseline", records).exit_code == ExitCode.REGRESSED


def test_the_gate_writes_junit_and_markdown(
    make_run: Any, suite: Suite, guard: Suite, tmp_path: Path
) -> None:
    run = make_run("run", {"task": (MOST, MOST), "guard": (ALL, NONE)}, [suite, guard])
    call("gate", run, "--junit", tmp_path / "gate.xml", "--markdown", tmp_path / "gate.md")
    group = ElementTree.parse(tmp_path / "gate.xml").getroot()[0]
    assert (group.get("tests"), group.get("failures"), group.get("errors")) == ("2", "2", "0")
    assert [case.get("classname") for case in group] == ["eval.task", "eval.guard"]
    assert [case[0].get("type") for case in group] == ["no-evidence", "regressed"]
    table = (tmp_path / "gate.md").read_text()
    assert "that needs no correction for their number." in table
    assert "**Evaluation gate: regressed** (against base)" in table
    assert "| guard | regression | exact_match | -100.0 points [" in table


def test_nothing_answered_never_passes(make_run: Any, suite: Suite, tmp_path: Path) -> None:
    run = make_run("run", {"task": (NONE, ALL)}, [suite])
    for path in (run / "baseline" / "task" / "zero_shot.jsonl", run / "eval" / "task" / "tuned.jsonl"):
        path.write_text("")
    with pytest.raises(UserError, match="holds no answers"):
        call("gate", run)
    with pytest.raises(UserError, match="is not a run folder"):
        call("gate", tmp_path)
    (run / "eval" / "task" / "tuned.jsonl").unlink()
    with pytest.raises(UserError, match="no answers of the tuned model"):
        call("gate", run)


def test_compare_takes_files_and_run_folders(make_run: Any, suite: Suite) -> None:
    run = make_run("run", {"task": (NONE, ALL)}, [suite])
    base = run / "baseline" / "task" / "zero_shot.jsonl"
    result = call("compare", base, run, "--suite", suite.path, "--json")
    assert result.exit_code == ExitCode.DONE
    assert json.loads(result.stdout)["comparisons"][0]["fixed"] == 60
    assert call("compare", run, base, "--suite", suite.path).exit_code == ExitCode.REGRESSED
    assert "60 fixed, 0 broken" in call("compare", base, run, "--suite", suite.path).stdout


def test_compare_refuses_items_on_one_side_unless_inner(make_run: Any, suite: Suite, tmp_path: Path) -> None:
    run = make_run("run", {"task": (NONE, ALL)}, [suite])
    half = tmp_path / "half.jsonl"
    write_jsonl(half, read_jsonl(run / "baseline" / "task" / "zero_shot.jsonl")[:30])
    with pytest.raises(UserError, match="30 only in the arm"):
        call("compare", half, run, "--suite", suite.path)
    result = call("compare", half, run, "--suite", suite.path, "--inner", "--json")
    assert json.loads(result.stdout)["comparisons"][0]["n"] == 30
    with pytest.raises(UserError, match="no such file or run folder"):
        call("compare", tmp_path / "gone", run)


def test_score_adds_a_metric_to_saved_answers(make_run: Any, suite: Suite) -> None:
    run = make_run("run", {"task": (NONE, MOST)}, [suite])
    result = call("score", run, "--scorer", 'regex:{pattern: "^no$", metric: says_no}', "--json")
    assert result.exit_code == ExitCode.DONE
    found = {one["metric"]: one for one in json.loads(result.stdout)["suites"][0]["comparisons"]}
    assert found["says_no"]["mean_a"] == 1.0
    assert found["says_no"]["mean_b"] == pytest.approx(0.1)
    assert read_summary(run / "eval" / "task", "tuned").metrics["says_no"]["n"] == 60
    assert call("gate", run).exit_code == ExitCode.DONE  # the suite itself has not changed
    assert set(read_jsonl(run / "eval" / "task" / "tuned.jsonl")[0]["scores"]) == {*suite.metrics, "says_no"}


@pytest.mark.parametrize(
    ("scorer", "message"),
    [
        ("regx", "did you mean 'regex'"),
        ("regex", "cannot be made"),
        ("regex:{pattern: '('}", "cannot be made"),
        ("regex:{patern: a}", "did you mean 'pattern'"),
        ("regex:[1]", "is not a mapping"),
    ],
)
def test_an_impossible_scorer_changes_no_file(make_run: Any, suite: Suite, scorer: str, message: str) -> None:
    run = make_run("run", {"task": (NONE, MOST)}, [suite])
    before = (run / "eval" / "task" / "tuned.jsonl").read_bytes()
    with pytest.raises(UserError, match=message):
        call("score", run, "--scorer", scorer)
    assert (run / "eval" / "task" / "tuned.jsonl").read_bytes() == before


def test_a_changed_suite_is_scored_again_without_new_answers(make_run: Any, suite: Suite) -> None:
    run = make_run("run", {"task": (NONE, MOST)}, [suite])
    suite.path.write_text(suite.path.read_text().replace("intent_accuracy]", "slot_f1]"))
    with pytest.raises(UserError, match="has changed since both arms ran"):
        call("gate", run)
    call("score", run)
    assert call("gate", run).exit_code == ExitCode.DONE


def test_pinned_items_become_a_regression_suite(make_run: Any, suite: Suite, tmp_path: Path) -> None:
    run = make_run("run", {"task": (NONE, [index < 5 for index in range(60)])}, [suite])
    regressions = tmp_path / "regressions"
    call("pin", run, "--to", regressions, "--limit", "3")
    assert [item.id for item in read_items(regressions / "task.jsonl")] == ["task-0", "task-1", "task-2"]
    result = call("pin", run, "--to", regressions, "--json")
    assert json.loads(result.stdout)["pinned"][0] | {"path": "", "suite": ""} == {
        "path": "", "added": 2, "total": 5, "suite": "",
    }  # fmt: skip
    pinned = load_suite(regressions / "task.yaml")
    assert pinned.role == "regression"
    assert len(load_suite_data(pinned).items) == 5
    assert pinned.primary_metric == "exact_match"


def test_nothing_right_is_nothing_to_pin(make_run: Any, suite: Suite, tmp_path: Path) -> None:
    run = make_run("run", {"task": (NONE, NONE)}, [suite])
    with pytest.raises(UserError, match="nothing to pin"):
        call("pin", run, "--to", tmp_path / "regressions")
    assert not (tmp_path / "regressions").exists()


TEXTS = """\
suite: 1
name: texts
role: forgetting
task: text
items: {jsonl: texts.jsonl}
scorers: [nll_per_token]
primary_metric: nll_per_token
margin: 0.1
"""


@pytest.fixture
def with_texts(make_run: Any, suite: Suite, guard: Suite, tmp_path: Path) -> Path:
    """A run on three suites: a task, a guard that nothing got right, and one of texts."""
    write_jsonl(tmp_path / "eval" / "texts.jsonl", [{"id": f"t{n}", "reference": "words"} for n in range(60)])
    (tmp_path / "eval" / "texts.yaml").write_text(TEXTS)
    texts = load_suite(tmp_path / "eval" / "texts.yaml")
    measured = {
        "log_likelihood": -9.0, "tokens": 3, "bytes": 5, "mean_tokens": 3.0, "mean_bytes": 5.0,
    }  # fmt: skip
    run: Path = make_run("many", {"task": (NONE, MOST), "guard": (NONE, NONE)}, [suite, guard])
    recipe = run / "recipe.resolved.yaml"
    recipe.write_text(recipe.read_text().replace("guard.yaml", f"guard.yaml, {texts.path}"))
    for folder, arm in (("baseline", "zero_shot"), ("eval", "tuned")):
        save_answers(run / folder / "texts", texts, arm, ALL, output=json.dumps(measured))
    return run


def test_pin_takes_what_a_run_on_several_suites_got_right(with_texts: Path, tmp_path: Path) -> None:
    result = call("pin", with_texts, "--to", tmp_path / "regressions", "--json")
    found = json.loads(result.stdout)
    assert [one["added"] for one in found["pinned"]] == [54]
    assert {one["suite"]: one["why"] for one in found["left_out"]} == {
        "guard": "no item has exact_match = 1, so there is nothing to pin",
        "texts": "suites with task: text have no items that could be pinned",
    }
    assert "left out: texts" in call("pin", with_texts, "--to", tmp_path / "regressions").stdout
    with pytest.raises(UserError, match="have no items that could be pinned"):
        call("pin", with_texts, "--suite", tmp_path / "eval" / "texts.yaml")


def test_score_adds_a_scorer_to_the_suites_that_it_fits(with_texts: Path, tmp_path: Path) -> None:
    found = json.loads(call("score", with_texts, "--scorer", "regex:{pattern: no}", "--json").stdout)
    assert [one["suite"] for one in found["suites"]] == ["task", "guard"]
    saved = read_json(with_texts / "eval" / "comparison-scored.json")
    assert saved["primary_metrics"] == {"task": "exact_match", "guard": "exact_match"}
    assert (with_texts / "report.html").is_file()
    with pytest.raises(
        UserError, match="'regex' scores suites with task: generate, and texts has task: text"
    ):
        call(
            "score",
            with_texts,
            "--scorer",
            "regex:{pattern: no}",
            "--suite",
            tmp_path / "eval" / "texts.yaml",
        )


def test_the_gate_holds_every_suite_of_a_run(with_texts: Path) -> None:
    answer = json.loads(call("gate", with_texts, "--json").stdout)
    assert {row["suite"]: row["outcome"] for row in answer["suites"]} == {
        "task": "pass", "guard": "pass", "texts": "pass",
    }  # fmt: skip


def test_a_suite_is_found_by_its_name_whatever_its_file_is_called_and_wherever_one_stands(
    make_run: Any, suite: Suite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run("run", {"task": (NONE, MOST)}, [suite])
    suite.path.rename(suite.path.with_name("another_name.yaml"))
    recipe = run / "recipe.resolved.yaml"
    recipe.write_text(recipe.read_text().replace(str(suite.path), "another_name.yaml"))
    (run / "manifest.json").write_text(json.dumps({"folders": {"eval.suites": str(suite.path.parent)}}))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert call("gate", run).exit_code == ExitCode.DONE
    assert call("gate", run, "--suite", "task").exit_code == ExitCode.DONE
    base = run / "baseline" / "task" / "zero_shot.jsonl"
    for arguments in ([], ["--suite", "task"], ["--suite", "another_name.yaml"]):
        assert call("compare", base, run, *arguments).exit_code == ExitCode.DONE
    with pytest.raises(UserError, match="no such file or shipped eval entry"):
        call("gate", run, "--suite", "tusk")


def test_prices_on_the_command_line_price_a_query(make_run: Any, suite: Suite) -> None:
    run = make_run("run", {"task": (NONE, ALL)}, [suite])
    base = run / "baseline" / "task" / "zero_shot.jsonl"
    compared = ["compare", base, run, "--suite", suite.path]
    cost = json.loads(call(*compared, "--input-price", "2", "--output-price", "10", "--json").stdout)["cost"]
    assert cost["arm"]["price_per_query"] == pytest.approx((5 * 2 + 3 * 10) / 1e6)
    assert "a query" in call(*compared, "--price-per-hour", "2").stdout
    assert "a query" not in call(*compared).stdout
    with pytest.raises(UserError, match="contradict each other"):
        call(*compared, "--price-per-hour", "2", "--input-price", "1")


def test_an_unknown_baseline_is_a_user_error(make_run: Any, suite: Suite) -> None:
    run = make_run("run", {"task": (NONE, ALL)}, [suite])
    with pytest.raises(UserError, match="did you mean 'base'"):
        call("gate", run, "--baseline", "bse")


def test_scorers_are_listed() -> None:
    listed = json.loads(call("scorers", "--json").stdout)["scorers"]
    assert listed["regex"]["parameters"] == ["pattern", "full", "ignore_case"]
    assert all(one["summary"] for one in listed.values())


def test_json_files_of_a_run_hold_no_nan(make_run: Any, suite: Suite) -> None:
    run = make_run("run", {"task": (NONE, ALL)}, [suite])
    assert read_json(run / "eval" / "task" / "tuned.summary.json")["n"] == 60


@pytest.fixture
def finished_run(make_finished_run: Any, suite: Suite) -> Path:
    """A run whose training is complete, with a saved adapter and no answers yet."""
    suite.path.write_text(suite.path.read_text() + "decoding: {max_new_tokens: 6}\n")
    run: Path = make_finished_run(suite.path)
    return run


def test_run_evaluates_a_finished_run_and_reuses_its_answers(
    finished_run: Path, suite: Suite, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = call("run", finished_run, "--noise", "--json")
    comparison = json.loads(result.stdout)
    assert result.exit_code == comparison["exit_code"]
    assert comparison["comparisons"][0]["n"] == 12
    assert comparison["noise"][0]["flip_rate"] == 0.0
    assert comparison["noise"][0]["answers_changed"] == 0
    assert read_json(finished_run / "eval" / "comparison-base.json")["verdict"] == comparison["verdict"]
    sha256 = read_summary(finished_run / "eval" / "task", "tuned").adapter_sha256
    assert sha256 == comparison["adapter_sha256"]
    answers = [
        [record["output"] for record in read_jsonl(finished_run / folder / "task" / f"{arm}.jsonl")]
        for folder, arm in (("baseline", "zero_shot"), ("eval", "tuned"))
    ]
    assert answers[0] != answers[1]  # the adapter was active in one of them only

    from finetune.evaluation.run import ArmJob

    monkeypatch.setattr(ArmJob, "evaluate", lambda *_, **__: pytest.fail("answered again"))
    again = call("run", finished_run, "--json")
    assert json.loads(again.stdout)["comparisons"] == comparison["comparisons"]
    assert call("gate", finished_run).exit_code in (ExitCode.NO_EVIDENCE, ExitCode.INCONCLUSIVE)


def test_run_takes_another_suite(finished_run: Path, tmp_path: Path) -> None:
    other = make_suite(tmp_path / "eval", "other", n=5)
    other.path.write_text(other.path.read_text() + "decoding: {max_new_tokens: 4}\n")
    result = call("run", finished_run, "--suite", other.path, "--batch-size", "2", "--json")
    assert json.loads(result.stdout)["comparisons"][0]["suite"] == "other"
    assert (finished_run / "eval" / "comparison-base-other.json").is_file()
    assert len(read_jsonl(finished_run / "baseline" / "other" / "zero_shot.jsonl")) == 5


def test_run_refuses_a_run_without_a_tuned_model(finished_run: Path) -> None:
    manifest = read_json(finished_run / "manifest.json")
    manifest["stages"]["train"]["completed"] = None
    (finished_run / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match="holds no tuned model yet"):
        call("run", finished_run)


class _Served(BaseHTTPRequestHandler):
    """Both models of a run: each answers with its name, so that they differ; `twins` answer alike."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = "same" if self.path.startswith("/twins") else body["model"]
        answer = {"choices": [{"text": text, "finish_reason": "stop"}], "usage": {"completion_tokens": 1}}
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, *_: Any) -> None:
        """Quiet."""


def test_run_lets_a_server_answer_both_arms_and_proves_that_they_differ(finished_run: Path) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Served) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        with pytest.raises(UserError, match="gives the base's answer to all 12 items"):
            call("run", finished_run, "--server", f"{url}/twins", "--server-base", "a", "--server-tuned", "b")
        result = call("run", finished_run, "--server", f"{url}/v1", "--json")
        server.shutdown()
    assert json.loads(result.stdout)["comparisons"][0]["n"] == 12
    assert (finished_run / "eval" / "comparison-base-server.json").is_file()
    folder = finished_run / "eval" / "task" / "server"
    assert read_summary(folder, "tuned").backend == "server"
    assert {record["output"] for record in read_jsonl(folder / "tuned.jsonl")} == {"tuned"}
    assert not (finished_run / "eval" / "task" / "tuned.jsonl").exists()


class _JudgeHandler(BaseHTTPRequestHandler):
    """Prefers the answer that is a JSON object, wherever it stands."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["messages"][1]["content"]
        better = "first" if "{" in asked.split("<first>")[1].split("</first>")[0] else "second"
        answer = {"choices": [{"message": {"content": json.dumps({"better": better})}}]}
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, *_: Any) -> None:
        """Quiet."""


def _read_by_hand(n: int, is_right: bool) -> dict[str, Any]:
    """What a review saves of an item that only the tuned model could have got right."""
    answers = {"baseline": "no", "tuned": f'{{"intent":"A","n":{n}}}' if is_right else "no"}
    return {
        "suite": "task",
        "item": f"task-{n}",
        "right": {"baseline": False, "tuned": is_right},
        "answers": {arm: answer_digest(text) for arm, text in answers.items()},
    }


def test_a_judges_verdict_counts_only_when_it_is_calibrated(make_run: Any, suite: Suite) -> None:
    run = make_run("run", {"task": (NONE, MOST)}, [suite])
    with ThreadingHTTPServer(("127.0.0.1", 0), _JudgeHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        options = ["--server", f"http://127.0.0.1:{server.server_address[1]}/v1", "--model", "judge"]
        result = call("judge", run, *options)
        assert result.exit_code == ExitCode.INCONCLUSIVE
        assert "tuned won 54, tied 6, lost 0 of 60" in result.stdout
        assert "not calibrated" in result.stdout
        write_jsonl(run / "eval" / "review.jsonl", [_read_by_hand(n, MOST[n]) for n in range(30)])
        result = call("judge", run, *options, "--json")
        server.shutdown()
    found = json.loads(result.stdout)
    assert result.exit_code == ExitCode.DONE
    assert (found["verdict"], found["calibration"]["agreed"], found["calibration"]["n"]) == (
        "improved",
        27,
        27,
    )
    assert len(read_json(run / "eval" / "task" / "judge.json")["judgements"]) == 60
