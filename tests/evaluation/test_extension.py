"""Scorers from outside: user functions, local metrics of `evaluate`, and running written code within limits."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from finetune.errors import UserError
from finetune.evaluation.scorers.extension import ALLOW_CODE, code_of
from finetune.evaluation.scorers.registry import make_scorer
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
    with pytest.raises(UserError, match="gives no 'other'"):
        make_scorer("evaluate_metric", {"path": str(tmp_path / "same"), "key": "other"})("a", "a", None)


def test_a_metric_that_would_be_downloaded_is_refused() -> None:
    with pytest.raises(UserError, match="would be downloaded"):
        make_scorer("evaluate_metric", {"path": "exact_match", "key": "exact_match"})


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


def test_an_item_without_tests_is_an_error(runs: Any) -> None:
    with pytest.raises(ValueError, match=r"no check\.tests"):
        runs("x = 1", "  ")


def test_the_first_fenced_block_is_the_code() -> None:
    assert code_of("a\n```py\nx = 1\n```\n```\ny = 2\n```") == "x = 1\n"
    assert code_of("x = 1") == "x = 1"
