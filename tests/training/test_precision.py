"""fp16 with a scaled loss and products in 8-bit floats, on a machine without a GPU: torch's own scaler and types run there.

accelerate refuses fp16 on a CPU, so that its switches are set by hand; all that trains, scales, saves and resumes is what a
GPU uses. The rounding of 8-bit products is emulated by torchao, where it is installed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from finetune.digest import digest_folder
from finetune.errors import UserError
from finetune.telemetry.events import read_events
from finetune.training.exact_trainer import ExactTrainer, StopWhenAsked
from finetune.training.preflight import check_training
from finetune.training.sft_trainer import ExactSftTrainer

UNPACKED = {"train__packing": False, "train__micro_batch_size": 4, "train__epochs": 4}


def steps_of(folder: Path) -> list[dict[str, Any]]:
    return [event for event in read_events(folder / "events.jsonl") if event["event"] == "step"]


@pytest.fixture
def in_fp16(monkeypatch: pytest.MonkeyPatch) -> Any:
    """in_fp16(scale): trainers built from here on compute in fp16 and begin with this factor on the loss."""
    original = ExactTrainer.follow

    def begin(scale: float) -> None:
        def follow(self: Any, *args: Any, **options: Any) -> None:
            original(self, *args, **options)
            accelerator = self.accelerator
            accelerator.state._mixed_precision = "fp16"
            accelerator.native_amp = True
            accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=1000)

        monkeypatch.setattr(ExactTrainer, "follow", follow)

    return begin


def test_fp16_with_a_scaled_loss_trains_what_fp32_does(make_recipe: Any, train: Any, in_fp16: Any) -> None:
    recipe = make_recipe(**UNPACKED)
    _, plain, _ = train(recipe, name="fp32")
    in_fp16(2.0**12)
    _, scaled, model = train(recipe, name="fp16")
    expected, found = steps_of(plain), steps_of(scaled)
    assert [s["loss"] for s in found] == pytest.approx([s["loss"] for s in expected], abs=0.02)
    assert [s["loss"] for s in found] != [s["loss"] for s in expected]
    assert [s["grad_norm"] for s in found] == pytest.approx([s["grad_norm"] for s in expected], rel=0.02)
    assert {s["loss_scale"] for s in found} == {2.0**12}
    assert all(p.dtype == torch.float32 for p in model.parameters() if p.requires_grad)


def test_an_overflow_skips_the_step_and_halves_the_scale(make_recipe: Any, train: Any, in_fp16: Any) -> None:
    """Weights, moments and the schedule stay where they were until the gradients fit into fp16."""
    in_fp16(2.0**24)
    _, folder, _ = train(make_recipe(**UNPACKED))
    steps = steps_of(folder)
    scales = [step["loss_scale"] for step in steps]
    skipped = [step for step in steps if step["update_ratio"] == 0.0]
    assert 1 <= len(skipped) < len(steps)
    assert steps[: len(skipped)] == skipped
    assert scales[: len(skipped) + 1] == [2.0 ** (24 - n) for n in range(len(skipped) + 1)]
    assert {step["learning_rate"] for step in skipped} == {steps[0]["learning_rate"]}
    assert steps[-1]["loss"] < steps[0]["loss"]


def test_a_run_killed_in_fp16_resumes_with_its_scale_to_the_same_bytes(
    make_recipe: Any, train: Any, in_fp16: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_fp16(2.0**24)
    recipe = make_recipe(**UNPACKED)
    _, whole, _ = train(recipe, name="whole")

    def kill(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 5:
            raise SystemExit  # nothing is saved on the way out, as after kill -9

    with monkeypatch.context() as patch:
        patch.setattr(StopWhenAsked, "on_step_end", kill)
        with pytest.raises(SystemExit):
            train(recipe, name="killed")
    _, killed, _ = train(recipe, name="killed")
    assert digest_folder(killed / "adapter") == digest_folder(whole / "adapter")
    assert [s["loss_scale"] for s in steps_of(killed)] == [s["loss_scale"] for s in steps_of(whole)]


def test_a_gradient_that_no_scale_brings_into_range_stops_the_run(
    make_recipe: Any, train: Any, in_fp16: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_fp16(4.0)
    original = ExactSftTrainer.training_step

    def poisoned(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        loss = original(self, model, *args, **kwargs)
        next(p for p in model.parameters() if p.grad is not None).grad[0] = torch.nan
        return loss

    monkeypatch.setattr(ExactSftTrainer, "training_step", poisoned)
    with pytest.raises(UserError, match="gradient of step 3 is not finite"):
        train(make_recipe(**UNPACKED))


def test_products_in_8_bits_train_all_weights(
    make_recipe: Any, train: Any, make_tiny_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torchao", reason="torchao is not installed: pip install 'finetune-pipeline[fp8]'")
    monkeypatch.setattr("finetune.training.preflight.float8_fault", lambda recipe, on_cuda: None)
    full = {"adapter__kind": "none", "train__learning_rate": 3e-3, **UNPACKED}
    _, plain, _ = train(make_recipe(**full), name="plain")
    _, rounded, model = train(make_recipe(**full, train__fp8=True), name="fp8")
    expected, found = [[s["loss"] for s in steps_of(folder)] for folder in (plain, rounded)]
    assert found != expected
    assert found == pytest.approx(expected, abs=0.15)
    assert found[-1] < found[0] - 1
    kinds = {name: type(module).__name__ for name, module in model.named_modules()}
    assert kinds["model.layers.0.mlp.down_proj"] == "Float8Linear" and kinds["lm_head"] == "Linear"
    saved = load_file(str(rounded / "model/model.safetensors"))
    assert saved.keys() == load_file(str(plain / "model/model.safetensors")).keys()
    assert {tensor.dtype for tensor in saved.values()} == {torch.float32}


@pytest.mark.parametrize(
    ("capability", "installed", "changes", "said"),
    [
        ((8, 0), True, {"adapter__kind": "none"}, "8.9 or more"),
        ((9, 0), False, {"adapter__kind": "none"}, "torchao is not installed"),
        ((9, 0), True, {}, "tuning of all weights"),
        ((9, 0), True, {"adapter__kind": "none"}, None),
    ],
)
def test_8_bit_products_are_refused_where_they_cannot_be_had(
    capability: tuple[int, int],
    installed: bool,
    changes: dict[str, Any],
    said: str | None,
    make_recipe: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: capability)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if installed else None)
    recipe = make_recipe(train__fp8=True, **changes)
    if said is None:
        check_training(recipe, on_cuda=True)
        return
    with pytest.raises(UserError, match=said) as caught:
        check_training(recipe, on_cuda=True)
    assert caught.value.faults[0].where == "train.fp8" and caught.value.faults[0].fix
