"""Training does what its definition says: every number here is checked against the plain computation."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from finetune.digest import digest_folder
from finetune.errors import UserError
from finetune.telemetry.callback import StepTally
from finetune.telemetry.events import read_events
from finetune.training.sft import count_steps, trainer_arguments, training_dataset
from finetune.training.sft_trainer import ExactSftTrainer, StopWhenAsked

IGNORED = -100


def steps_of(folder: Path) -> list[dict[str, Any]]:
    return [event for event in read_events(folder / "events.jsonl") if event["event"] == "step"]


@pytest.fixture
def make_trainer(tmp_path: Path, tiny_tokenizer: Any, adapted_model: Any) -> Callable[..., ExactSftTrainer]:
    def build(recipe: Any, rows: Any, validation: Any = ()) -> ExactSftTrainer:
        train_set = training_dataset(rows, recipe.train)
        return ExactSftTrainer(
            checkpoint_root=tmp_path / "checkpoints",
            owner="o",
            settings=recipe.train,
            tally=StepTally(),
            model=adapted_model(recipe),
            args=trainer_arguments(
                recipe, count_steps(len(train_set), recipe.train), tmp_path / "checkpoints"
            ),
            train_dataset=train_set,
            eval_dataset=training_dataset(validation, recipe.train) if validation else None,
            processing_class=tiny_tokenizer,
        )

    return build


def first_step(trainer: ExactSftTrainer) -> tuple[float, torch.Tensor]:
    """Loss and flattened gradient of the first optimizer step, before clipping."""
    found: dict[str, Any] = {}

    def capture(model: Any) -> float:
        found["gradient"] = torch.cat(
            [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        ).clone()
        found["loss"] = trainer.tally.nll_sum / trainer.tally.n_targets
        raise KeyboardInterrupt

    trainer._clip_grad_norm = capture  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    return found["loss"], found["gradient"]


def reference_loss(model: Any, rows: Any) -> float:
    """Token-weighted mean over rows, one by one, from full logits."""
    total, n = 0.0, 0
    with torch.no_grad():
        for row in rows:
            ids, labels = torch.tensor([row.input_ids]), torch.tensor([row.labels])
            logits = model(input_ids=ids).logits[:, :-1]
            wanted = labels[:, 1:] != IGNORED
            total += float(
                torch.nn.functional.cross_entropy(logits[wanted], labels[:, 1:][wanted], reduction="sum")
            )
            n += int(wanted.sum())
    return total / n


@pytest.mark.parametrize("packing", [True, False])
def test_the_first_loss_is_the_token_weighted_mean_of_the_definition(
    make_recipe: Any, make_rows: Any, make_trainer: Any, packing: bool
) -> None:
    rows = make_rows(8)
    recipe = make_recipe(train__packing=packing, train__micro_batch_size=8, train__pack_tokens=1024)
    trainer = make_trainer(recipe, rows)
    expected = reference_loss(trainer.model, rows)
    loss, _ = first_step(trainer)
    assert loss == pytest.approx(expected, abs=2e-6)
    assert trainer.tally.n_targets == sum(row.n_targets for row in rows)


def test_packed_and_unpacked_gradients_are_equal(make_recipe: Any, make_rows: Any, make_trainer: Any) -> None:
    rows = make_rows(8)
    _, packed = first_step(make_trainer(make_recipe(train__pack_tokens=1024), rows))
    _, plain = first_step(make_trainer(make_recipe(train__packing=False, train__micro_batch_size=8), rows))
    assert (packed - plain).norm() / plain.norm() < 1e-5


def test_accumulated_micro_batches_equal_one_batch_for_uneven_rows(
    make_recipe: Any, make_rows: Any, make_trainer: Any
) -> None:
    rows = sorted(make_rows(9), key=lambda row: row.n_targets)
    uneven = [rows[0], rows[-1]]
    big = make_recipe(train__packing=False, train__micro_batch_size=2)
    small = make_recipe(train__packing=False, train__micro_batch_size=1, train__gradient_accumulation_steps=2)
    big_loss, big_gradient = first_step(make_trainer(big, uneven))
    small_loss, small_gradient = first_step(make_trainer(small, uneven))
    assert small_loss == pytest.approx(big_loss, abs=1e-6)
    assert (small_gradient - big_gradient).norm() / big_gradient.norm() < 1e-5


def test_the_short_last_window_is_not_scaled_down(make_recipe: Any, make_rows: Any, train: Any) -> None:
    rows = [make_rows(1)[0]] * 5
    recipe = make_recipe(
        train__packing=False,
        train__gradient_accumulation_steps=2,
        train__epochs=1,
        train__learning_rate=1e-12,
        train__schedule="constant",
    )
    _, folder, _ = train(recipe, rows=rows)
    norms = [event["grad_norm"] for event in steps_of(folder)]
    assert len(norms) == 3
    assert norms == pytest.approx([norms[0]] * 3, rel=1e-4)


def test_validation_loss_does_not_depend_on_batch_or_packing(
    make_recipe: Any, make_rows: Any, make_trainer: Any
) -> None:
    rows = make_rows(7)
    values = []
    for changes in (
        {"train__packing": False, "train__micro_batch_size": 1},
        {"train__packing": False, "train__micro_batch_size": 5},
        {"train__pack_tokens": 200},
        {"train__pack_tokens": 1024, "train__micro_batch_size": 2},
    ):
        trainer = make_trainer(make_recipe(**changes), rows, rows)
        values.append(trainer.evaluate()["eval_loss"])
    assert values == pytest.approx([reference_loss(trainer.model, rows)] * 4, abs=2e-6)


# An adapter over a frozen random head cannot do this; tests/test_embedded_model.py does it with LoRA on the real model.
def test_eight_examples_are_learned_by_heart(make_recipe: Any, train: Any) -> None:
    recipe = make_recipe(
        adapter__kind="none", train__epochs=80, train__pack_tokens=1024, train__checkpoint_every_steps=1000
    )
    result, folder, _ = train(recipe)
    assert steps_of(folder)[-1]["loss"] < 0.05
    assert result.train_loss < 0.05


def test_only_the_adapter_changes(make_recipe: Any, train: Any, make_tiny_model: Any) -> None:
    _, _, model = train(make_recipe(train__epochs=2))
    untouched = make_tiny_model()
    untouched.get_input_embeddings().weight.data *= 3
    base = dict(untouched.named_parameters())
    tuned = dict(model.named_parameters())
    for name, parameter in base.items():
        head, _, tail = name.rpartition(".")
        found = tuned.get(f"base_model.model.{name}", tuned.get(f"base_model.model.{head}.base_layer.{tail}"))
        assert found is not None and torch.equal(found, parameter), name
    moved = [name for name, p in tuned.items() if "lora_B" in name and float(p.norm()) > 0]
    assert len(moved) == 14
    assert all(p.dtype == torch.float32 for p in tuned.values() if p.requires_grad)


@pytest.mark.parametrize("kind", ["lora", "dora", "none"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_every_kind_trains_with_and_without_checkpointing(
    make_recipe: Any, train: Any, kind: str, checkpointing: bool
) -> None:
    recipe = make_recipe(
        adapter__kind=kind,
        train__gradient_checkpointing=checkpointing,
        train__epochs=6,
        train__learning_rate=5e-3,
    )
    result, folder, _ = train(recipe)
    losses = [event["loss"] for event in steps_of(folder)]
    assert losses[-1] < losses[0] - 0.3
    assert result.output == ("model" if kind == "none" else "adapter")
    assert (folder / result.output / "model.safetensors").exists() == (kind == "none")
    assert not list(folder.rglob("*.bin"))
    assert not list(folder.rglob("README.md"))  # PEFT's is an empty form, in checkpoints too


@pytest.mark.parametrize("packing", [True, False])
def test_an_interrupted_run_ends_with_the_same_adapter_bytes(
    make_recipe: Any, make_rows: Any, train: Any, monkeypatch: pytest.MonkeyPatch, packing: bool
) -> None:
    recipe = make_recipe(
        train__packing=packing,
        train__pack_tokens=160,
        train__epochs=3,
        adapter__dropout=0.1,
        train__checkpoint_every_steps=2,
    )
    rows = make_rows(11)
    whole, whole_folder, _ = train(recipe, name="whole", rows=rows)
    n_steps = len(steps_of(whole_folder))
    assert n_steps > 9

    for kill_at in (1, 5, n_steps - 1):  # before the first checkpoint, inside the second epoch, near the end
        name = f"killed-{kill_at}"

        def kill(self: Any, args: Any, state: Any, control: Any, _at: int = kill_at, **kwargs: Any) -> None:
            if state.global_step == _at:
                raise SystemExit  # nothing is saved on the way out, as after kill -9

        with monkeypatch.context() as patch:
            patch.setattr(StopWhenAsked, "on_step_end", kill)
            with pytest.raises(SystemExit):
                train(recipe, name=name, rows=rows)
        said: list[str] = []
        resumed, folder, _ = train(recipe, name=name, rows=rows, said=said)
        assert bool(said) == (kill_at >= 2)
        assert digest_folder(folder / "adapter") == digest_folder(whole_folder / "adapter")
        assert resumed.adapter_sha256 == whole.adapter_sha256
        same = [(event["step"], event["loss"], event["tokens"]) for event in steps_of(folder)]
        assert same == [(event["step"], event["loss"], event["tokens"]) for event in steps_of(whole_folder)]


def test_ctrl_c_saves_the_step_and_the_run_continues(
    make_recipe: Any, train: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import signal

    recipe = make_recipe(train__epochs=4, train__checkpoint_every_steps=100)
    whole, _, _ = train(recipe, name="whole")
    before = signal.getsignal(signal.SIGINT)
    original = ExactSftTrainer._clip_grad_norm

    def press(self: Any, model: Any) -> Any:
        if self.state.global_step == 2:
            signal.raise_signal(signal.SIGINT)
        return original(self, model)

    with monkeypatch.context() as patch:
        patch.setattr(ExactSftTrainer, "_clip_grad_norm", press)
        with pytest.raises(KeyboardInterrupt):
            train(recipe, name="pressed")
    assert signal.getsignal(signal.SIGINT) is before
    said: list[str] = []
    resumed, _folder, _ = train(recipe, name="pressed", said=said)
    assert "step-3" in said[0]
    assert resumed.adapter_sha256 == whole.adapter_sha256


def test_a_non_finite_loss_stops_before_the_step(
    make_recipe: Any, train: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    recipe = make_recipe(train__epochs=3, train__checkpoint_every_steps=1)
    original = ExactSftTrainer._losses

    def poisoned(self: Any, model: Any, inputs: Any, shape: Any) -> Any:
        losses = original(self, model, inputs, shape)
        if self.state.global_step == 1:
            losses.objective = losses.nll = losses.nll * math.inf
        return losses

    monkeypatch.setattr(ExactSftTrainer, "_losses", poisoned)
    with pytest.raises(UserError, match="loss of step 2 is not finite"):
        train(recipe)
    assert [path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*")] == ["step-1"]


def test_a_row_longer_than_the_pack_is_refused(make_recipe: Any, make_rows: Any) -> None:
    with pytest.raises(UserError, match=r"does not fit a pack of 16"):
        training_dataset(make_rows(2), make_recipe(train__pack_tokens=16).train)


def test_first_token_of_a_packed_document_is_never_a_target(
    make_recipe: Any, make_rows: Any, make_trainer: Any
) -> None:
    rows = make_rows(6, turns=2)
    trainer = make_trainer(make_recipe(train__pack_tokens=1024), rows)
    batch = next(iter(trainer.get_train_dataloader()))
    starts = batch["position_ids"][0] == 0
    assert int(starts.sum()) == 6
    assert bool((batch["labels"][0][starts] == IGNORED).all())
    assert int((batch["labels"] != IGNORED).sum()) == sum(row.n_targets for row in rows)


def test_cosine_schedule_ends_at_the_floor_and_events_tell_the_rate_used(
    make_recipe: Any, train: Any
) -> None:
    recipe = make_recipe(
        train__epochs=10, train__warmup_share=0.2, train__learning_rate=1e-3, train__pack_tokens=1024
    )
    _, folder, _ = train(recipe)
    rates = [event["learning_rate"] for event in steps_of(folder)]
    assert len(rates) == 10
    assert rates[0] == 0.0 and rates[1] == pytest.approx(5e-4) and rates[2] == pytest.approx(1e-3)
    progress = (9 - 2) / 8
    expected = 1e-3 * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * progress)))
    assert rates[9] == pytest.approx(expected)


# Losses of 20 steps from a fixed seed; a change of any part of the step moves them by far more than the tolerance.
GOLDEN = [
    5.7759,
    6.03557,
    5.89379,
    5.3768,
    5.19546,
    5.28311,
    4.92616,
    5.05145,
    4.80759,
    4.94808,
    4.75231,
    4.89685,
    4.72362,
    4.86919,
    4.8581,
    4.7071,
    4.84045,
    4.70341,
    4.70139,
    4.82985,
]


def test_golden_trajectory_of_twenty_steps(make_recipe: Any, make_rows: Any, train: Any) -> None:
    recipe = make_recipe(
        train__pack_tokens=192, train__epochs=10, train__max_steps=20, train__learning_rate=3e-3
    )
    _, folder, _ = train(recipe, rows=make_rows(6))
    assert [event["loss"] for event in steps_of(folder)] == pytest.approx(GOLDEN, rel=2e-3)


def test_a_disk_without_room_for_the_checkpoints_is_refused_before_the_first_step(
    make_recipe: Any, train: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil

    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(UserError, match=r"1 kB free, the checkpoints need"):
        train(make_recipe())
    assert not steps_of(tmp_path / "run")
    assert not list((tmp_path / "run" / "checkpoints").iterdir())


def test_a_disk_that_fills_up_in_the_trial_save_is_a_user_error(
    make_recipe: Any, train: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import errno
    import os

    def full(self: Any, folder: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))

    monkeypatch.setattr(ExactSftTrainer, "save_weights", full)
    with pytest.raises(UserError, match="no space left"):
        train(make_recipe())
    assert not steps_of(tmp_path / "run")
