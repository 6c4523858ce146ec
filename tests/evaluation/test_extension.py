"""Scorers from outside: user functions, local metrics of `evaluate`, and running written code within limits."""

from __future__ import annotations

import importlib
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from finetune.errors import UserError
from finetune.evaluation.rescore import parse_scorer, with_scorers
from finetune.evaluation.scorers.code import ALLOW_CODE, code_of
from finetune.evaluation.scorers.registry import find_scorer, make_format, make_scorer, scorer_names
from finetune.evaluation.scoring import score_records
from finetune.evaluation.suite import Suite, load_suite

METRIC = """
import datasets
import evaluate

class Same(evaluate.Metric):
    def _info(self):
        text = datasets.Value("string")
        return evaluate.MetricInfo(
            description="", citation="", inputs_description="",
            features=datasets.Features({"predictions": text, "references": text}),
        )

    def _compute(self, predictions, references, bonus=0.0):
        return {"same": sum(a == b for a, b in zip(predictions, references)) / len(predictions) + bonus}
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "my_scorers.py"
    path.write_text("def longer(output, reference):\n    return len(output) > len(reference)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_scorers", raising=False)
    return path


def test_a_function_of_the_users_scores(module: Path) -> None:
    score = make_scorer("python", {"function": "my_scorers:longer"})
    assert (score("abc", "ab", None), score("a", "ab", None)) == (1.0, 0.0)


@pytest.mark.parametrize("function", ["my_scorers:shorter", "gone_module:longer", "my_scorers", ""])
def test_a_function_that_is_not_there_is_a_user_error(module: Path, function: str) -> None:
    with pytest.raises(UserError, match="there is no function"):
        make_scorer("python", {"function": function})


def test_the_suites_digest_holds_the_users_function(module: Path, suite: Suite) -> None:
    text = suite.path.read_text().replace(
        "slot_f1]", "{scorer: python, metric: longer, parameters: {function: 'my_scorers:longer'}}]"
    )
    suite.path.write_text(text)
    before = load_suite(suite.path).digest
    module.write_text(module.read_text().replace(">", ">="))
    assert load_suite(suite.path).digest != before


def test_a_local_metric_of_evaluate_scores_each_answer(tmp_path: Path) -> None:
    (tmp_path / "same").mkdir()
    (tmp_path / "same" / "same.py").write_text(METRIC)
    score = make_scorer("evaluate_metric", {"path": str(tmp_path / "same"), "key": "same"})
    assert (score("a", "a", None), score("a", "b", None)) == (1.0, 0.0)
    bonus: dict[str, Any] = {"path": str(tmp_path / "same"), "key": "same", "arguments": {"bonus": 0.5}}
    assert make_scorer("evaluate_metric", bonus)("a", "b", None) == 0.5
    with pytest.raises(UserError, match="same' gave no number: TypeError"):
        make_scorer("evaluate_metric", bonus | {"arguments": {"bonus": "x"}})("a", "b", None)
    with pytest.raises(UserError, match="gives no 'other'"):
        make_scorer("evaluate_metric", {"path": str(tmp_path / "same"), "key": "other"})("a", "a", None)


def test_a_metric_of_the_hub_needs_a_revision() -> None:
    with pytest.raises(UserError, match="no revision to fetch one by"):
        make_scorer("evaluate_metric", {"path": "exact_match", "key": "exact_match"})


def test_a_metric_that_cannot_be_fetched_is_told_with_its_remedy() -> None:
    wanted = {"path": "owner/no_such_metric", "key": "x", "revision": "v1"}
    with pytest.raises(UserError, match="cannot be loaded") as caught:
        make_scorer("evaluate_metric", wanted)
    assert "give the folder of its script" in str(caught.value)


def test_a_metric_of_the_hub_is_loaded_by_its_revision(monkeypatch: pytest.MonkeyPatch) -> None:
    import evaluate

    asked: dict[str, Any] = {}

    class Metric:
        def compute(self, predictions: list[str], references: list[str]) -> dict[str, list[float]]:
            return {"errors": [float(len(predictions[0]) - len(references[0]))]}

    def load(path: str, **options: Any) -> Metric:
        asked.update(options, path=path)
        return Metric()

    monkeypatch.setattr(evaluate, "load", load)
    parameters = {"path": "owner/errors", "key": "errors", "revision": "a1b2", "higher_is_better": False}
    assert make_scorer("evaluate_metric", parameters)("abc", "a", None) == 2.0
    assert (asked["path"], asked["revision"]) == ("owner/errors", "a1b2")
    assert not find_scorer("evaluate_metric").bound(parameters).higher_is_better


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return 1 / 0", "ZeroDivisionError"),
        ("return None", "gave no number: TypeError"),
        ("return 'good'", "gave no number: ValueError"),
        ("return float('nan')", "gave nan"),
        ("return float('inf')", "gave inf"),
        ("return 10 ** 400", "gave no number: OverflowError"),
        ("raise SystemExit(3)", "gave no number: SystemExit"),
        ("return faulty(output, reference)", "gave no number: RecursionError"),
    ],
)
def test_a_function_without_a_number_is_named_with_the_item(
    body: str, message: str, module: Path, suite: Suite
) -> None:
    module.write_text(f"def faulty(output, reference):\n    {body}\n")
    suite = with_scorers(suite, [parse_scorer("python:{function: 'my_scorers:faulty', metric: own}")])
    record = {"item": "item-7", "arm": "tuned", "output": "{}", "reference": "{}", "scores": {}}
    with pytest.raises(UserError, match=message) as caught:
        score_records(suite, [record])
    assert "item-7" in str(caught.value)


def test_what_a_function_prints_is_no_answer_of_the_command(
    module: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module.write_text("print('loaded')\ndef loud(output, reference):\n    print('noise')\n    return 1.0\n")
    assert make_scorer("python", {"function": "my_scorers:loud"})("a", "b", None) == 1.0
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", "loaded\nnoise\n")


def test_a_module_that_cannot_be_loaded_is_named(module: Path) -> None:
    for body in ("1 / 0\n", "def broken(:\n", "raise SystemExit\n"):
        module.write_text(body)
        importlib.invalidate_caches()
        with pytest.raises(UserError, match="the module of 'my_scorers:own' cannot be loaded"):
            make_scorer("python", {"function": "my_scorers:own"})


def test_a_metric_of_the_suite_keeps_its_meaning(suite: Suite) -> None:
    """A gate reads the suite's metrics by name: another scorer under that name would decide it."""
    with pytest.raises(UserError, match="'exact_match' is a metric of suite"):
        with_scorers(suite, [parse_scorer("regex:{pattern: a, metric: exact_match}")])
    assert with_scorers(suite, [parse_scorer("exact_match")]).metrics == [*suite.metrics[1:], "exact_match"]
    with pytest.raises(UserError, match="metric: 5 is not a name"):
        parse_scorer("regex:{pattern: a, metric: 5}")


def test_a_function_may_take_the_items_check_and_arguments(module: Path) -> None:
    module.write_text(
        "def share(output, reference, check, weight=1.0):\n    return weight * (output in check['any'])\n"
    )
    score = make_scorer("python", {"function": "my_scorers:share", "arguments": {"weight": 0.5}})
    assert (score("a", "", {"any": ["a"]}), score("b", "", {"any": ["a"]})) == (0.5, 0.0)
    with pytest.raises(UserError, match="cannot be made"):
        make_scorer("python", {"function": "my_scorers:share", "arguments": {"wight": 0.5}})


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed package that brings a scorer."""
    (tmp_path / "their_scorers.py").write_text(
        "def brevity(output, reference, *, per=1.0):\n"
        '    """Characters of the answer. More words."""\n'
        "    return len(output) / per\n"
        "brevity.higher_is_better = False\n"
    )
    information = tmp_path / "their_scorers-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: their-scorers\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(
        "[finetune.scorers]\nbrevity = their_scorers:brevity\nlost = their_scorers:gone\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "their_scorers", raising=False)
    return tmp_path


def test_an_installed_package_brings_scorers(package: Path, suite: Suite) -> None:
    kind = find_scorer("brevity")
    assert (kind.summary, kind.parameters, kind.higher_is_better) == (
        "Characters of the answer",
        ("per",),
        False,
    )
    assert make_scorer("brevity", {"per": 2.0})("abcd", "", None) == 2.0
    assert "brevity" in scorer_names()
    with pytest.raises(UserError, match="did you mean 'per'"):
        make_scorer("brevity", {"pr": 2.0})
    with pytest.raises(UserError, match="'lost' of the package their-scorers cannot be loaded"):
        make_scorer("lost", {})
    suite.path.write_text(suite.path.read_text().replace("slot_f1]", "brevity]"))
    before = load_suite(suite.path).digest
    source = package / "their_scorers.py"
    source.write_text(source.read_text() + "# changed\n")
    assert load_suite(suite.path).digest != before


def test_running_code_is_off_unless_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ALLOW_CODE, raising=False)
    with pytest.raises(UserError, match="is off"):
        make_scorer("runs_code", {})


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv(ALLOW_CODE, "1")
    score = make_scorer("runs_code", {"seconds": 1, "memory_megabytes": 256})
    return lambda output, tests="assert add(2, 3) == 5": score(output, "", {"tests": tests})


def test_right_code_passes_its_tests(runs: Any) -> None:
    assert runs("def add(a, b):\n    return a + b") == 1.0
    assert runs("Here you are:\n```python\ndef add(a, b):\n    return a + b\n```\nDone.") == 1.0


@pytest.mark.parametrize(
    "output",
    [
        "def add(a, b):\n    return a - b",
        "def add(a, b:",
        "no code at all",
        "import sys; sys.exit(1)",
        "while True: pass",
        "block = bytearray(2_000_000_000)\ndef add(a, b):\n    return a + b",
        "open('big', 'wb').write(b'x' * 5_000_000)\ndef add(a, b):\n    return a + b",
        "raise SystemExit(3)",
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "print('a' * 10_000_000)",
    ],
)
def test_wrong_endless_or_greedy_code_fails(runs: Any, output: str) -> None:
    assert runs(output) == 0.0


def test_code_sees_none_of_our_variables_and_leaves_nothing(
    runs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_SECRET", "hidden")
    before = set(os.listdir("."))  # noqa: PTH208
    assert runs("import os", "assert 'MY_SECRET' not in os.environ; open('trace', 'w').write('x')") == 1.0
    assert set(os.listdir(".")) == before  # noqa: PTH208


@pytest.mark.parametrize(
    "output",
    [
        "import os\nif os.fork() == 0:\n    os._exit(0)",
        "import subprocess\nsubprocess.run(['/bin/true'])",
        "import threading\nthreading.Thread(target=print).start()",
    ],
)
def test_code_starts_no_process_not_even_as_root(runs: Any, output: str) -> None:
    assert runs(output, "pass") == 0.0


def test_what_the_code_started_is_ended_with_it(runs: Any, tmp_path: Path) -> None:
    late = tmp_path / "late"
    spawning = f"import subprocess, sys\nsubprocess.Popen(['/bin/sh', '-c', 'sleep 0.5; touch {late}'])"
    runs(spawning, "pass")
    time.sleep(0.8)
    assert not late.exists()


def test_code_that_is_no_python_is_off_format(runs: Any) -> None:
    well_formed = make_format("runs_code", {})
    assert well_formed is not None
    assert well_formed("```python\nx = 1\n```")
    assert not well_formed("def add(a, b:")


def test_an_item_without_tests_is_an_error(runs: Any) -> None:
    with pytest.raises(ValueError, match=r"no check\.tests"):
        runs("x = 1", "  ")


def test_the_first_fenced_block_is_the_code() -> None:
    assert code_of("a\n```py\nx = 1\n```\n```\ny = 2\n```") == "x = 1\n"
    assert code_of("x = 1") == "x = 1"
