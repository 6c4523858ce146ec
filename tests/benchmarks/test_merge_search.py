"""The section on searches over merges: every model on both sides, and the claims with what came of them."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from finetune.paths import shipped_names

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    spec = importlib.util.spec_from_file_location("benchmarks_merge_search", FOLDER / "merge_search.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def model(name: str, exact: float) -> dict[str, Any]:
    metric = {"mean": exact, "low": exact - 0.05, "high": exact + 0.05, "n": 240}
    return {"name": name, "suites": {"home": {"metrics": {"exact_match": metric}}}}


def test_both_sides_and_the_claims_are_in_the_section(benchmark: ModuleType) -> None:
    beside = {"suite": "home", "against": "english", "difference": -0.03, "low": -0.06, "high": 0.0, "n": 240}
    claim = {
        "suite": "home",
        "against": "english",
        "requirement": "no-regression",
        "outcome": "pass",
        "message": "so",
    }
    result = {
        "suites": [{"name": "home", "metric": "exact_match", "metrics": ["exact_match"]}],
        "models": [model("english", 0.75), model("soup", 0.7)],
        "choice": {"winner": "soup"},
        "confirmation": {
            "models": [model("english", 0.74), model("soup", 0.71)],
            "comparisons": [beside | {"open_ended": False, "finding": "not told apart"}],
            "claims": [claim],
            "outcome": "pass",
        },
        "seconds": 600.0,
    }
    text = "\n".join(benchmark.section_lines(result, 900.0))
    assert (
        "| english | 75.0% [70%, 80%], n = 240 |" in text
        and "| **soup** | 71.0% [66%, 76%], n = 240 |" in text
    )
    assert re.search(r"\| home \| english \| -3(\.0)? points \[-6(\.0)?, ", text)
    assert "- home against english, no-regression: **pass** (so)" in text
    assert "took 10.0 min, the whole command 15.0 min" in text


def test_every_measured_search_is_shipped(benchmark: ModuleType) -> None:
    assert {f"merge/{name}" for name in benchmark.TITLES} <= set(shipped_names("searches"))
