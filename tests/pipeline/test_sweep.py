"""A sweep on a tiny model: halving, resuming, comparing on validation rows, and the curve over growing data."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from finetune.errors import UserError
from finetune.paths import read_json
from finetune.pipeline import sweep as module
from finetune.pipeline.sweep import SweepResult, sweep
from finetune.recipe.search_space import parse_axes


@pytest.fixture
def search(project: Any) -> Any:
    def made(over: Sequence[str], **options: Any) -> SweepResult:
        return sweep(
            str(project.recipe),
            parse_axes(over),
            overrides=["train.epochs=1"],
            say=project.said.append,
            **options,
        )

    return made


def test_many_short_trainings_then_few_long_ones_and_a_killed_sweep_goes_on(
    search: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    over = ["train.learning_rate=1e-4,1e-3,1e-2"]
    found = search(over)
    short, long = found.trials[:3], found.trials[3:]
    assert len(long) == 1 and long[0].rows == 3 * short[0].rows
    assert long[0].overrides == min(short, key=lambda trial: trial.loss).overrides
    assert found.finalists[0].trial == long[0]
    assert not any(
        (Path(trial.folder) / name).exists() for trial in found.trials for name in ("eval", "baseline")
    )
    monkeypatch.setattr(module, "_train", None)  # everything is there already
    again = search(over)
    assert again.to_dict() == found.to_dict()
    assert read_json(found.folder / "sweep.json") == json.loads(json.dumps(found.to_dict()))


def test_every_value_within_a_key_keeps_its_best_to_the_end(search: Any) -> None:
    found = search(["adapter.rank=2,8", "train.learning_rate=1e-5,1e-2"], within="adapter.rank")
    assert {one.trial.overrides[0] for one in found.finalists} == {"adapter.rank=2", "adapter.rank=8"}
    best, *others = found.finalists
    assert best.difference == 0.0 and len(others) == 3
    assert all(one.low <= one.difference <= one.high and one.difference >= 0.0 for one in others)
    assert others[-1].is_worse and "worse" in found.lines()[4]  # a rate of 1e-5 learns next to nothing


def test_fewer_trials_than_the_grid_are_drawn_and_repeat(
    search: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[tuple[str, ...]] = []

    def train(self: Any, overrides: tuple[str, ...], rows: int) -> module.Trial:
        trained.append(overrides)
        rate = float(overrides[0].partition("=")[2])
        return module.Trial(overrides, rows, abs(rate - 3e-4), "", (abs(rate - 3e-4), 0.0), (1, 1))

    monkeypatch.setattr(module._Search, "train", train)
    over = ["train.learning_rate=1e-5..1e-2:log20"]
    search(over, max_trials=6)
    first, trained = list(trained), []
    assert len(set(first[:6])) == 6
    search(over, max_trials=6)
    assert first == trained


def test_the_curve_tells_what_twice_the_data_would_bring(search: Any) -> None:
    found = search([], curve=True)
    assert found.curve is not None and found.curve.sizes == tuple(
        sorted({trial.rows for trial in found.trials})
    )
    assert len(found.curve.sizes) == 4 and found.curve.low <= found.curve.change <= found.curve.high
    assert "twice the data" in found.lines()[-2]


@pytest.mark.parametrize(
    ("over", "options", "told"),
    [
        (["train.learning_rat=1,2"], {}, "learning_rat"),
        (["train.learning_rate=1e-3,fast"], {}, "fast"),
        (["adapter.rank=2,4"], {"within": "adapter.kind"}, "is no key of the sweep"),
    ],
)
def test_what_is_wrong_is_told_before_anything_is_trained(
    search: Any, over: list[str], options: dict[str, Any], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_train", None)
    with pytest.raises(UserError, match=told):
        search(over, **options)
