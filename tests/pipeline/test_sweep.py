"""A sweep on a tiny model: halving, resuming, comparing on validation rows, and the curve over growing data."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from finetune.errors import UserError
from finetune.paths import read_json
from finetune.pipeline import sweep as module
from finetune.pipeline.sweep import rung_sizes, sweep
from finetune.pipeline.sweep_result import SweepResult, Trial, finalists_of
from finetune.recipe.search_space import parse_axes
from finetune.telemetry.flops import measure_peak_flops
from finetune.training.exact_trainer import NotFiniteError


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
    over = ["train.learning_rate=1e-5,1e-4,1e-3,1e-2"]
    found = search(over)
    short, long = found.trials[:4], found.trials[4:]
    assert len(long) == 2 and all(trial.rows == 3 * short[0].rows for trial in long)
    ranked = sorted(short, key=lambda trial: trial.known_loss)
    assert [trial.overrides for trial in long] == [trial.overrides for trial in ranked[:2]]
    assert {one.trial for one in found.finalists} == set(long)
    assert found.finalists[1].low <= found.finalists[1].difference <= found.finalists[1].high
    assert not any(
        (Path(trial.folder) / name).exists()
        for trial in found.trials
        for name in ("eval", "baseline", "checkpoints")
    )
    assert 'SET="train.learning_rate=' in found.lines()[-1] and str(found.recipe) in found.lines()[-1]
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

    def train(self: Any, overrides: tuple[str, ...], rows: int, steps: int | None) -> module.Trial:
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


def test_a_best_value_at_the_end_of_what_was_tried_is_told(tmp_path: Path) -> None:
    """LoRA's best rate lies within, that of full tuning at an end: the two are not yet each at its own best."""

    def trial(kind: str, rate: str, loss: float) -> Trial:
        overrides = (f"adapter.kind={kind}", f"train.learning_rate={rate}")
        return Trial(overrides, 8, loss, "", (loss, loss + 0.1), (1, 1))

    losses = {
        "lora": {"1e-4": 3.0, "1e-3": 1.0, "1e-2": 2.0},
        "none": {"1e-4": 3.0, "1e-3": 2.0, "1e-2": 1.5},
    }
    trials = [trial(kind, rate, loss) for kind, rates in losses.items() for rate, loss in rates.items()]
    best = finalists_of([trials[1], trials[5]])
    told = [line for line in SweepResult(tmp_path, "r", tuple(trials), best).lines() if "beyond" in line]
    assert told == [
        "  adapter.kind=none train.learning_rate=1e-2: train.learning_rate is the highest that was tried; "
        "the best may lie beyond"
    ]
    two = [one for one in trials if "1e-4" not in one.name]  # of two values each is an end
    assert not any("beyond" in line for line in SweepResult(tmp_path, "r", tuple(two), best).lines())


@pytest.mark.parametrize(
    ("n", "keep", "sizes"),
    [(1, 2, [1]), (3, 2, [3]), (4, 2, [4, 2]), (9, 2, [9, 3, 2]), (27, 1, [27, 9, 3, 1]), (3, 1, [3, 1])],
)
def test_rungs_thin_out_to_the_finalists(n: int, keep: int, sizes: list[int]) -> None:
    assert rung_sizes(n, keep) == sizes


def test_a_candidate_that_diverges_is_lost_and_the_search_goes_on(
    search: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = module.train_model

    def train(context: Any, rows: Any, **options: Any) -> Any:
        if context.inputs.recipe.train.learning_rate == 0.5:
            raise NotFiniteError("loss", 3)
        return original(context, rows, **options)

    monkeypatch.setattr(module, "train_model", train)
    over = ["train.learning_rate=1e-2,0.5"]
    found = search(over)
    (lost,) = found.lost
    assert lost.loss is None and "step 3 is not finite" in lost.why
    assert [one.trial.overrides for one in found.finalists] == [("train.learning_rate=1e-2",)]
    assert "2 trainings, 1 of them lost" in found.lines()[0]
    json.dumps(found.to_dict(), allow_nan=False)
    monkeypatch.setattr(module, "_train", None)
    assert search(over).to_dict() == found.to_dict()  # it is not tried again
    with pytest.raises(UserError, match="every training was lost: the loss of step 3"):
        monkeypatch.undo()
        monkeypatch.setattr(module, "train_model", train)
        search(["train.learning_rate=0.5"])


def test_combinations_that_the_recipe_refuses_are_left_out(search: Any, project: Any) -> None:
    """lora_plus_ratio goes with LoRA only, and each value goes with the recipe by itself."""
    found = search(["adapter.kind=lora,none", "train.lora_plus_ratio=4"])
    assert [trial.overrides[0] for trial in found.trials] == ["adapter.kind=lora"]
    assert any("left out: adapter.kind=none train.lora_plus_ratio=4" in line for line in project.said)


def test_the_curve_tells_what_twice_the_data_would_bring(search: Any) -> None:
    found = search([], curve=True)
    assert found.curve is not None and found.curve.sizes == tuple(
        sorted({trial.rows for trial in found.trials})
    )
    assert len(found.curve.sizes) == 4 and found.curve.low <= found.curve.change <= found.curve.high
    least = [trial for trial in found.trials if trial.rows == found.curve.sizes[0]]
    assert [trial.overrides for trial in least] == [(), ("seed=18",), ("seed=19",)]
    spread = np.std([trial.known_loss for trial in least], ddof=1)
    assert found.curve.seed_spread == pytest.approx(spread) and spread > 0
    assert "twice the data" in found.lines()[-2] and "and seeds of training" in found.lines()[-2]


@pytest.mark.parametrize(
    ("over", "options", "told"),
    [
        (["train.learning_rat=1,2"], {}, "learning_rat"),
        (["train.learning_rate=1e-3,fast"], {}, "fast"),
        (["adapter.rank=2,4"], {"within": "adapter.kind"}, "is no key of the sweep"),
        (["train.method=sft,dpo"], {}, "cannot be searched by validation loss"),
        (["train.preference.beta=0.1,0.5"], {}, "cannot be searched by validation loss"),
        (["data.max_train_rows=8,16"], {}, "is what the sweep itself gives"),
        (["train.max_steps=8,16"], {"steps": 3}, "is what the sweep itself gives"),
    ],
)
def test_what_is_wrong_is_told_before_anything_is_trained(
    search: Any, over: list[str], options: dict[str, Any], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_train", None)
    with pytest.raises(UserError, match=told):
        search(over, **options)


def test_a_sweep_by_steps_that_is_killed_in_a_later_rung_ends_as_one_that_is_not(
    project: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With dropout, so that what a process draws before a trial would show; another process goes on, hence the cleared cache."""
    over = parse_axes(["train.learning_rate=1e-4,1e-3,3e-3,1e-2"])
    options: dict[str, Any] = {"overrides": ["adapter.dropout=0.3"], "steps": 3, "say": project.said.append}
    whole = sweep(str(project.recipe), over, **options)
    assert [trial.steps for trial in whole.trials] == [1, 1, 1, 1, 3, 3]
    assert len({trial.rows for trial in whole.trials}) == 1
    assert "finalists on 3 steps" in whole.lines()[0] and "max_steps" not in whole.lines()[-1]
    last = Path(whole.trials[-1].folder)
    kept = {path: path.stat().st_mtime_ns for path in whole.folder.rglob("*.safetensors")}
    module.shutil.rmtree(last)
    (whole.folder / "sweep.json").unlink()
    monkeypatch.undo()  # the measured peak below is the real one
    monkeypatch.chdir(project.folder)
    monkeypatch.setenv("FINETUNE_RUNS", str(project.folder / "runs"))
    measure_peak_flops.cache_clear()
    again = sweep(str(project.recipe), over, **options)
    assert again.to_dict() == whole.to_dict()
    for path, written in kept.items():
        assert last in path.parents or path.stat().st_mtime_ns == written  # nothing else is trained again


def test_a_budget_beyond_the_recipe_s_own_steps_is_refused_by_the_first_trial(
    search: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    over = ["train.learning_rate=1e-5,1e-4,1e-3,1e-2"]
    trained: list[int] = []
    original = module.train_model

    def train(*given: Any, **options: Any) -> Any:
        trained.append(1)
        return original(*given, **options)

    monkeypatch.setattr(module, "train_model", train)
    with pytest.raises(UserError, match="whole training has 10 steps, and the budget is 54") as caught:
        search(over, steps=54)
    assert len(trained) == 1
    assert "lower --steps to 10, or set train.epochs to 6" in caught.value.faults[0].fix
