"""Early stopping and the best step: inside the noise of the validation loss, exact after a kill, nothing needed is pruned."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from finetune.digest import digest_folder
from finetune.errors import UserError
from finetune.model.adapter_files import load_adapter
from finetune.telemetry.events import read_events
from finetune.training.best_step import RowLosses, choose, is_worse
from finetune.training.checkpoints import checkpoint_step, list_checkpoints
from finetune.training.exact_trainer import StopWhenAsked
from finetune.training.sft_trainer import ExactSftTrainer
from finetune.training.validation import own_batches


def rows(shift: float, *, noise: float = 0.05, n: int = 60, seed: int = 0) -> RowLosses:
    generator = np.random.default_rng(seed)
    targets = np.random.default_rng(9).integers(3, 30, n)
    means = 2.0 + np.random.default_rng(8).normal(0, 1, n) + shift + generator.normal(0, noise, n)
    return RowLosses((means * targets).tolist(), targets.tolist())


def test_the_mean_is_over_tokens_not_over_rows() -> None:
    assert RowLosses([10.0, 1.0], [10, 1]).mean == 1.0
    assert RowLosses([20.0, 1.0], [10, 1]).mean == pytest.approx(21 / 11)


def test_a_difference_inside_the_noise_is_not_worse_and_one_outside_is() -> None:
    best = rows(0.0, seed=1)
    assert not is_worse(rows(0.004, seed=2), best)
    assert is_worse(rows(0.05, seed=3), best)
    assert not is_worse(best, best)
    assert not is_worse(rows(-0.05, seed=4), best)


def test_pairing_finds_what_the_spread_between_rows_would_hide() -> None:
    """Rows differ by 1 nat from one another, steps by 0.05: only row by row can it be seen."""
    assert is_worse(rows(0.05, noise=0.01, n=30, seed=5), rows(0.0, noise=0.01, n=30, seed=6))


def test_the_earliest_step_that_is_not_worse_is_chosen() -> None:
    validations = {
        10: rows(0.5, seed=1),
        20: rows(0.003, seed=2),
        30: rows(0.0, seed=3),
        40: rows(0.3, seed=4),
    }
    choice = choose(validations)
    assert choice.lowest in (20, 30)
    assert choice.step == 20
    assert choice.alive == {20, 30}


def test_one_row_has_no_noise() -> None:
    assert is_worse(RowLosses([2.0], [1]), RowLosses([1.0], [1]))
    assert not is_worse(RowLosses([1.0], [1]), RowLosses([1.0], [1]))


@pytest.mark.parametrize(("n", "size", "ranks"), [(7, 2, 1), (7, 2, 2), (7, 3, 4), (1, 8, 3), (8, 2, 2)])
def test_every_example_is_validated_once_whatever_the_processes(n: int, size: int, ranks: int) -> None:
    plans = [list(own_batches(n, size, rank, ranks)) for rank in range(ranks)]
    assert sorted(index for plan in plans for batch in plan for index in batch) == list(range(n))
    assert len({len(plan) for plan in plans}) == 1


# A validation that gets better until step 6 and worse after it, far beyond its noise.
def scripted(monkeypatch: pytest.MonkeyPatch, levels: dict[int, float]) -> None:
    def row_losses(self: Any, model: Any) -> RowLosses:
        level = levels.get(self.state.global_step, 9.0)
        return RowLosses([level * 10 + 0.01 * row for row in range(8)], [10] * 8)

    monkeypatch.setattr(ExactSftTrainer, "_row_losses", row_losses)


LEVELS = {2: 3.0, 4: 2.0, 6: 1.0, 8: 1.5, 10: 2.0, 12: 2.5}
OPTIONS = {
    "train__packing": False,
    "train__epochs": 2,
    "train__validate_every_steps": 2,
    "train__checkpoint_every_steps": 100,
    "train__keep_checkpoints": 1,
}


def test_training_stops_and_the_best_step_is_the_result(
    make_recipe: Any, make_rows: Any, train: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted(monkeypatch, LEVELS)
    said: list[str] = []
    result, folder, _ = train(
        make_recipe(**OPTIONS, train__early_stopping=2), validation=make_rows(8), said=said, name="stopped"
    )
    assert result.steps == 10
    assert result.result_step == 6
    assert any("stopping at step 10" in line for line in said)
    left = {checkpoint_step(path) for path in list_checkpoints(folder / "checkpoints")}
    assert left == {6, 10}  # the best and the last
    # The result is what six steps of the same run give.
    (event,) = [e for e in read_events(folder / "events.jsonl") if e["event"] == "result"]
    assert (event["step"], event["lowest_step"]) == (6, 6)
    kept = load_state_of(folder / "checkpoints" / "step-6")
    saved = load_state_of(folder / "adapter")
    assert kept and all(torch.equal(saved[name], value) for name, value in kept.items())


def test_a_killed_run_chooses_as_a_whole_one_and_a_stopped_one_is_not_trained_on(
    make_recipe: Any, make_rows: Any, train: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted(monkeypatch, LEVELS)
    recipe = make_recipe(**OPTIONS, train__early_stopping=2)
    _, whole, _ = train(recipe, validation=make_rows(8), name="whole")

    def kill(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 9:
            raise SystemExit

    with monkeypatch.context() as patch:
        patch.setattr(StopWhenAsked, "on_step_end", kill)
        with pytest.raises(SystemExit):
            train(recipe, validation=make_rows(8), name="killed")
    result, killed, _ = train(recipe, validation=make_rows(8), name="killed")
    assert (result.steps, result.result_step) == (10, 6)
    assert digest_folder(killed / "adapter") == digest_folder(whole / "adapter")
    said: list[str] = []
    again, _, _ = train(recipe, validation=make_rows(8), name="killed", said=said)
    assert again.result_step == 6 and again.steps == 10
    assert any("nothing left to train" in line for line in said)
    assert digest_folder(killed / "adapter") == digest_folder(whole / "adapter")
    best = killed / "checkpoints" / "step-6"
    (best / "adapter_model.safetensors").write_bytes(b"damaged")
    with pytest.raises(UserError, match=r"step 6 is the best one.*adapter_model.safetensors is changed"):
        train(recipe, validation=make_rows(8), name="killed")
    shutil.rmtree(best)
    with pytest.raises(UserError, match="not there any more"):
        train(recipe, validation=make_rows(8), name="killed")


def test_without_early_stopping_the_best_of_all_steps_is_taken(
    make_recipe: Any, make_rows: Any, train: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted(monkeypatch, LEVELS)
    result, folder, _ = train(
        make_recipe(**OPTIONS, train__result="best", train__pin_checkpoints=[4]), validation=make_rows(8)
    )
    assert (result.steps, result.result_step) == (16, 6)
    left = {checkpoint_step(path) for path in list_checkpoints(folder / "checkpoints")}
    assert left == {4, 6, 16}


def test_the_last_step_is_validated_too_and_can_win(
    make_recipe: Any, make_rows: Any, train: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted(monkeypatch, {5: 3.0, 10: 2.0, 15: 1.9, 16: 1.0})
    recipe = make_recipe(**(OPTIONS | {"train__validate_every_steps": 5}), train__result="best")
    result, folder, model = train(recipe, validation=make_rows(8))
    assert result.result_step == 16
    saved = load_state_of(folder / "adapter")
    for name, value in model.state_dict().items():
        if "lora_" in name:
            assert torch.equal(saved[name.replace(".default", "")], value)


def load_state_of(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "adapter_model.safetensors")


@pytest.mark.parametrize("optimizer", ["schedule_free_adamw", "adamw"])
def test_the_validation_loss_of_the_result_is_that_of_the_saved_adapter(
    optimizer: str, make_recipe: Any, make_rows: Any, train: Any, make_tiny_model: Any
) -> None:
    """Averaging optimizers hold other weights while they train than those that are judged and saved."""
    recipe = make_recipe(
        train__optimizer=optimizer,
        train__schedule="constant",
        train__epochs=2,
        train__packing=False,
        train__validate_every_steps=4,
        train__result="best",
    )
    result, folder, _ = train(recipe, validation=make_rows(8))
    base = make_tiny_model()
    base.get_input_embeddings().weight.data *= 3
    model = load_adapter(base, folder / "adapter")
    total, n = 0.0, 0
    with torch.no_grad():
        for row in make_rows(8):
            ids, labels = torch.tensor([row.input_ids]), torch.tensor([row.labels])
            logits, wanted = model(input_ids=ids).logits[:, :-1], labels[:, 1:] != -100
            total += float(
                torch.nn.functional.cross_entropy(logits[wanted], labels[:, 1:][wanted], reduction="sum")
            )
            n += int(wanted.sum())
    assert result.validation_loss == pytest.approx(total / n, abs=5e-6)


def test_choosing_without_validation_rows_is_refused(make_recipe: Any, train: Any) -> None:
    with pytest.raises(UserError, match="no validation rows"):
        train(make_recipe(**OPTIONS, train__result="best"))
