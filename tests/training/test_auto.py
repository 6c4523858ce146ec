"""`train.auto`: the fastest way that fits, the same tokens a step, the same choice after a kill."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from finetune.digest import digest_folder
from finetune.errors import ExitCode, UserError
from finetune.plan.batching import Batching, batchings, own_batching
from finetune.telemetry.events import read_events
from finetune.training import auto
from finetune.training.auto import choose_batching
from finetune.training.bench import BatchProbe

GIGA = 10**9


def test_every_way_keeps_the_tokens_of_a_step(make_recipe: Any) -> None:
    recipe = make_recipe(
        train__pack_tokens=512, train__micro_batch_size=2, train__gradient_accumulation_steps=4
    )
    ways = batchings(recipe, longest_row_tokens=100)
    tokens = {way.micro_batch_size * way.gradient_accumulation_steps * way.pack_tokens for way in ways}
    assert tokens == {4096}
    assert min(way.pack_tokens for way in ways) == 128  # the next half would not hold the longest row
    assert own_batching(recipe) in ways
    assert {way.gradient_checkpointing for way in ways} == {False, "selective", True}


def test_rows_without_packing_are_cut_by_halves(make_recipe: Any) -> None:
    recipe = make_recipe(
        train__packing=False, train__micro_batch_size=2, train__gradient_accumulation_steps=6
    )
    sizes = {(way.micro_batch_size, way.gradient_accumulation_steps) for way in batchings(recipe, 100)}
    assert sizes == {(12, 1), (6, 2), (3, 4), (2, 6)}


class FakeMachine:
    """Runs ways in no time: peak and speed by formula. Longer forward passes are faster; recomputation is slower."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, bytes_per_token: float) -> None:
        self.clock, self.peak, self.bytes_per_token = 0.0, 0, bytes_per_token
        self.ran: list[Batching] = []
        monkeypatch.setattr(auto, "_now", lambda: self.clock)
        monkeypatch.setattr(auto, "reset_peak_memory", lambda: setattr(self, "peak", 0))
        monkeypatch.setattr(auto, "peak_memory_bytes", lambda: self.peak)

    def run(self, recipe: Any, number: int) -> int:
        train = recipe.train
        tokens = train.micro_batch_size * (train.pack_tokens if train.packing else 100)
        kept = {False: 1.0, "selective": 0.5, True: 0.1}[train.gradient_checkpointing]
        self.peak = max(self.peak, round(kept * tokens * self.bytes_per_token))
        slower = {False: 1.0, "selective": 1.1, True: 1.3}[train.gradient_checkpointing]
        self.clock += slower * (tokens + 200) / 1000
        if own_batching(recipe) not in self.ran:
            self.ran.append(own_batching(recipe))
        return tokens

    def forecast(self, recipe: Any) -> int:
        kept = {False: 1.0, "selective": 0.5, True: 0.1}[recipe.train.gradient_checkpointing]
        return round(kept * recipe.train.micro_batch_size * recipe.train.pack_tokens * self.bytes_per_token)


@pytest.fixture
def wide(make_recipe: Any) -> Any:
    return make_recipe(train__pack_tokens=256, train__gradient_accumulation_steps=8, train__auto=True)


def choose(wide: Any, machine: FakeMachine, budget: int, forecast: Any = None) -> Any:
    return choose_batching(
        wide,
        100,
        budget_bytes=budget,
        forecast=forecast or machine.forecast,
        run_batch=machine.run,
        optimizer_bytes=0,
    )


def test_with_memory_to_spare_one_large_pass_without_recomputation_is_taken(
    wide: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = FakeMachine(monkeypatch, bytes_per_token=1e3)
    choice = choose(wide, machine, GIGA)
    assert choice.batching == Batching(1, 1, 2048, False)
    assert "fastest" in choice.reason
    assert len(machine.ran) <= 6


def test_what_the_forecast_rules_out_is_not_run_and_stays_in_the_account(
    wide: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = FakeMachine(monkeypatch, bytes_per_token=1e6)
    choice = choose(wide, machine, 600_000_000)
    assert all(machine.forecast(way.apply(wide)) <= 600_000_000 for way in machine.ran)
    assert choice.batching == Batching(
        1, 2, 1024, "selective"
    )  # 760 tokens/s; 512 whole gives 719, 2048 recomputed 701
    ruled_out = [probe for probe in choice.probes if probe.note == "the forecast does not fit"]
    assert ruled_out and all(probe.peak_bytes is None for probe in ruled_out)


def test_a_measured_peak_overrules_the_forecast(wide: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = FakeMachine(monkeypatch, bytes_per_token=1e6)
    choice = choose(wide, machine, 600_000_000, forecast=lambda recipe: None)
    assert choice.batching.pack_tokens == 512  # 1 MB a token: 512 tokens are the most without recomputation
    too_large = {probe.batching.pack_tokens for probe in choice.probes if "no room" in probe.note}
    assert too_large == {1024, 2048}


def test_running_out_of_memory_in_a_probe_is_survived(wide: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = FakeMachine(monkeypatch, bytes_per_token=1e3)

    def run(recipe: Any, number: int) -> int:
        if recipe.train.pack_tokens > 512:
            raise torch.OutOfMemoryError("no more")
        return machine.run(recipe, number)

    choice = choose_batching(
        wide, 100, budget_bytes=GIGA, forecast=machine.forecast, run_batch=run, optimizer_bytes=0
    )
    assert choice.batching.pack_tokens == 512
    assert {probe.note for probe in choice.probes} >= {"ran out of memory"}


def test_nothing_that_fits_is_refused_with_its_own_exit_code(
    wide: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = FakeMachine(monkeypatch, bytes_per_token=1e9)
    with pytest.raises(UserError, match="no way to cut") as caught:
        choose(wide, machine, GIGA)
    assert caught.value.exit_code == ExitCode.WILL_NOT_FIT


@pytest.mark.parametrize("changes", [{}, {"train__packing": False}, {"adapter__kind": "none"}], ids=str)
def test_probing_leaves_weights_gradients_and_forward_passes_as_they_were(
    changes: dict[str, Any], make_recipe: Any, make_rows: Any, adapted_model: Any, tiny_tokenizer: Any
) -> None:
    recipe = make_recipe(train__gradient_accumulation_steps=2, train__pack_tokens=256, **changes)
    model, rows = adapted_model(recipe), make_rows(8)
    ids = torch.tensor([rows[0].input_ids])
    before = model(input_ids=ids).logits
    forwards = {name for name, module in model.named_modules() if "forward" in module.__dict__}
    with BatchProbe(recipe, model, tokenizer=tiny_tokenizer, rows=rows) as probe:
        for way in batchings(recipe, max(len(row.input_ids) for row in rows)):
            assert probe.run(way.apply(recipe), 0) >= probe.run(way.apply(recipe), 1) > 0
    assert torch.equal(model.eval()(input_ids=ids).logits, before)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert {name for name, module in model.named_modules() if "forward" in module.__dict__} == forwards
    assert not any(getattr(module, "gradient_checkpointing", False) for module in model.modules())


def test_a_run_stores_its_choice_and_a_killed_one_keeps_it(
    make_recipe: Any, train: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from finetune.training.exact_trainer import StopWhenAsked

    recipe = make_recipe(
        train__auto=True, train__gradient_accumulation_steps=2, train__pack_tokens=128, train__epochs=4
    )
    said: list[str] = []
    _, whole, _ = train(recipe, name="whole", said=said)
    stored = json.loads((whole / "auto.json").read_text())
    assert any(line.startswith("auto: packs of") for line in said)
    chosen = Batching(**stored["chosen"])
    assert chosen.gradient_accumulation_steps * chosen.pack_tokens == 256

    def kill(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 3:
            raise SystemExit

    (whole.parent / "killed").mkdir()
    (whole.parent / "killed" / "auto.json").write_text((whole / "auto.json").read_text())
    with monkeypatch.context() as patch:
        patch.setattr(StopWhenAsked, "on_step_end", kill)
        with pytest.raises(SystemExit):
            train(recipe, name="killed")
    said = []
    _, killed, _ = train(recipe, name="killed", said=said)
    assert any("as before" in line for line in said)
    assert digest_folder(killed / "adapter") == digest_folder(whole / "adapter")
    plain = chosen.apply(recipe.model_copy(update={"train": recipe.train.model_copy(update={"auto": False})}))
    _, by_hand, _ = train(plain, name="by-hand")
    losses = [
        [event["loss"] for event in read_events(folder / "events.jsonl") if event["event"] == "step"]
        for folder in (whole, by_hand)
    ]
    assert losses[0] == losses[1]
    assert digest_folder(Path(by_hand) / "adapter") == digest_folder(whole / "adapter")
