"""The calibration benchmark judges with the code that judges real runs; here a few hundred comparisons of some scenarios."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "stats_calibration.py"


@pytest.fixture(scope="module")
def calibration() -> ModuleType:
    spec = importlib.util.spec_from_file_location("stats_calibration", BENCHMARK)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["stats_calibration"] = module
    spec.loader.exec_module(module)
    return module


def test_every_scenario_agrees_with_compare(calibration: ModuleType) -> None:
    """Each scenario's first comparisons go through `compare`; a difference ends the program."""
    scenarios = calibration.scenarios()
    assert len({(scenario.name, scenario.n) for scenario in scenarios}) == len(scenarios)
    for scenario in scenarios:
        if scenario.n <= 300:
            calibration.run_scenario(scenario, 4, seed=2)


@pytest.mark.parametrize(
    ("name", "n"),
    [("binary, 10% discordant", 200), ("graded, 70 % ties", 100), ("asymmetric, equal means", 300)],
)
def test_rates_of_a_few_hundred_comparisons(calibration: ModuleType, name: str, n: int) -> None:
    scenario = next(one for one in calibration.scenarios() if (one.name, one.n) == (name, n))
    found = calibration.run_scenario(scenario, 800, seed=3)
    assert found.false_positives < 0.08
    assert 0.92 < found.coverage_null < 0.98
    assert 0.92 < found.coverage_effect < 0.98
    if found.predicted_power is not None:
        assert found.power == pytest.approx(found.predicted_power, abs=0.05)


def test_misses_are_named(calibration: ModuleType) -> None:
    good = calibration.Result("x", 200, 0.05, 0.95, 0.95, 0.02, 0.8, 0.8)
    assert calibration.missed_targets(good) == []
    bad = calibration.Result("x", 200, 0.06, 0.93, 0.97, 0.02, 0.75, 0.8)
    assert calibration.missed_targets(bad) == [
        "false positives",
        "coverage at 0",
        "coverage at effect",
        "power",
    ]
    small = calibration.Result("x", 30, 0.05, 0.99, 0.90, 0.02, 0.8, None)
    assert calibration.missed_targets(small) == []
    bad.misses = ["power"]
    assert "! power" in calibration.table([bad])
