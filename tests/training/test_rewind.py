"""A divergence stops the run, or is mended: back to the last good checkpoint, and from there on exactly as if it had been known."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from finetune.digest import digest_folder
from finetune.doctor.diagnosis import diagnose
from finetune.errors import UserError
from finetune.telemetry.events import EventLog, read_events
from finetune.training import rewind
from finetune.training.exact_trainer import StopWhenAsked
from finetune.training.rewind import Act, left_out, rate_factor, read_acts, write_acts
from finetune.training.sft_trainer import ExactSftTrainer

EXPLODES_FROM = 16
REWINDING = {
    "train__on_divergence": "rewind",
    "train__epochs": 20,
    "train__pack_tokens": 192,
    "train__checkpoint_every_steps": 4,
    "train__max_steps": 34,
    "train__model_dropout": 0.1,
    "adapter__kind": "none",
}


def events_of(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_events(folder / "events.jsonl") if event["event"] == kind]


def losses_of(folder: Path) -> list[float]:
    return [event["loss"] for event in events_of(folder, "step")]


@pytest.fixture
def explosive(monkeypatch: pytest.MonkeyPatch) -> None:
    """From some step on the whole rate tears the weights apart; half of it does not."""
    original = ExactSftTrainer.training_step

    def step(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        at = self.state.global_step
        if at >= EXPLODES_FROM and self.rate_factor(at) == 1.0:
            draw = torch.Generator().manual_seed(at)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.copy_(torch.randn(parameter.shape, generator=draw))
        return original(self, model, *args, **kwargs)

    monkeypatch.setattr(ExactSftTrainer, "training_step", step)


@pytest.fixture
def rewound(explosive: None, make_recipe: Any, train: Any) -> tuple[Any, Path, list[str]]:
    """(recipe, folder, what was said) of a run that diverged once and was mended."""
    said: list[str] = []
    recipe = make_recipe(**REWINDING)
    _, folder, _ = train(recipe, name="rewound", said=said)
    return recipe, folder, said


def test_a_divergence_goes_back_to_the_last_good_checkpoint_at_half_the_rate(rewound: Any) -> None:
    _, folder, said = rewound
    (act,) = read_acts(folder)
    assert act.onset == EXPLODES_FROM + 1  # the step after `EXPLODES_FROM` steps
    assert act.to_step == EXPLODES_FROM
    assert act.rate_factor == 0.5 and not act.rows
    (event,) = events_of(folder, "rewind")
    assert (event["step"], event["from_step"], event["reason"]) == (act.to_step, act.from_step, "diverged")
    steps = events_of(folder, "step")
    assert [event["step"] for event in steps] == list(range(1, 35))
    assert steps[-1]["tokens"] == sum(steps[-1]["tokens"] // 34 for _ in range(34)) + steps[-1]["tokens"] % 34
    assert losses_of(folder)[-1] < losses_of(folder)[0]
    assert any("back to step 16" in line and "rewind 1 of at most 3" in line for line in said)


def test_a_rewound_run_is_the_run_that_had_known(
    rewound: Any, make_recipe: Any, train: Any, tmp_path: Path
) -> None:
    recipe, folder, _ = rewound
    (tmp_path / "known").mkdir()
    write_acts(tmp_path / "known", read_acts(folder))
    _, known, _ = train(recipe, name="known")
    assert not events_of(known, "rewind")
    assert losses_of(known) == losses_of(folder)
    rates = [event["learning_rate"] for event in events_of(folder, "step")]
    assert rates == [event["learning_rate"] for event in events_of(known, "step")]
    assert digest_folder(known / "model") == digest_folder(folder / "model")


def test_a_run_that_is_killed_resumes_to_the_same_bytes(
    rewound: Any, train: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, whole, _ = rewound

    def kill(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 30:
            raise SystemExit

    with monkeypatch.context() as patch:
        patch.setattr(StopWhenAsked, "on_step_end", kill)
        with pytest.raises(SystemExit):
            train(recipe, name="killed")
    _, killed, _ = train(recipe, name="killed")
    assert losses_of(killed) == losses_of(whole)
    assert digest_folder(killed / "model") == digest_folder(whole / "model")


def test_what_is_not_finite_is_mended_too_back_to_before_the_first_step(
    make_recipe: Any, train: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    original = ExactSftTrainer.training_step

    def poisoned(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        loss = original(self, model, *args, **kwargs)
        if self.state.global_step == 1 and self.rate_factor(1) > 0.3:  # the first remedy is not enough
            next(p for p in model.parameters() if p.grad is not None).grad[0] = math.nan
        return loss

    monkeypatch.setattr(ExactSftTrainer, "training_step", poisoned)
    recipe = make_recipe(**{**REWINDING, "train__max_steps": 6})
    _, folder, _ = train(recipe)
    acts = read_acts(folder)
    assert [(act.to_step, act.from_step, act.reason) for act in acts] == [(0, 2, "not_finite")] * 2
    rates = [event["learning_rate"] for event in events_of(folder, "step")]
    assert rates[0] == pytest.approx(0.25 * 1e-2)
    (tmp_path / "known").mkdir()
    write_acts(tmp_path / "known", acts)
    _, known, _ = train(recipe, name="known")
    assert digest_folder(known / "model") == digest_folder(folder / "model")


def test_rewinds_end_with_the_recipes_limit(
    explosive: None, make_recipe: Any, make_rows: Any, train: Any, tmp_path: Path
) -> None:
    recipe = make_recipe(**{**REWINDING, "train__rewind": {"remedy": "skip_rows", "at_most": 1}})
    with pytest.raises(UserError, match="diverged at step 21, after 1 rewind; the last checkpoint before it"):
        train(recipe, rows=make_rows(24))  # the steps in between learn nothing: their rows are left out
    (act,) = read_acts(tmp_path / "run")
    assert act.rows and act.rate_factor == 1.0
    (event,) = events_of(tmp_path / "run", "stop")
    assert event["reason"] == "diverged" and event["onset"] == 21


def test_without_rewind_a_divergence_stops_the_run(
    explosive: None, make_recipe: Any, train: Any, tmp_path: Path
) -> None:
    recipe = make_recipe(**{**REWINDING, "train__on_divergence": "stop"})
    with pytest.raises(UserError, match="the loss diverged at step 17"):
        train(recipe)
    assert read_acts(tmp_path / "run") == []
    assert not (tmp_path / "run" / "model").exists()


def test_rows_of_the_step_carry_no_loss_any_more(
    make_recipe: Any, make_rows: Any, train: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row breaks every step that learns from it; without it the run goes on and never names it again."""
    original = ExactSftTrainer.training_step

    def poisoned(self: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        learns = inputs["rows"] == [5] and bool((inputs["labels"] >= 0).any())
        loss = original(self, model, inputs, *args, **kwargs)
        if learns and self.state.global_step > 8:
            next(p for p in model.parameters() if p.grad is not None).grad[0] = math.nan
        return loss

    monkeypatch.setattr(ExactSftTrainer, "training_step", poisoned)
    recipe = make_recipe(
        **REWINDING
        | {"train__rewind": {"remedy": "skip_rows"}, "train__packing": False, "train__max_steps": 20}
    )
    _, folder, _ = train(recipe)
    (act,) = read_acts(folder)
    assert "row-5" in act.rows and len(act.rows) == 2  # and the row of the step before
    trained = [
        row
        for event in events_of(folder, "step")
        if event["step"] > act.to_step
        for row in event.get("rows", [])
    ]
    assert trained and "row-5" not in trained


@pytest.mark.parametrize("packing", [True, False])
def test_a_silenced_row_leaves_the_loss_of_the_others(
    packing: bool, make_recipe: Any, make_rows: Any, train: Any, tmp_path: Path
) -> None:
    """One step over four rows of which one is silenced has loss, targets and gradient of the other three."""
    common = {"train__max_steps": 1, "train__micro_batch_size": 4, "train__packing": packing}
    rows = make_rows(4)
    act = Act(1, 1, 0, "diverged", "skip_rows", 1.0, ("row-2",))
    (tmp_path / "silenced").mkdir()
    write_acts(tmp_path / "silenced", [act])
    steps = []
    for name, given in (("silenced", rows), ("without", [rows[0], rows[1], rows[3]])):
        _, folder, _ = train(make_recipe(**common), rows=given, name=name)
        steps += events_of(folder, "step")
    assert steps[0]["target_tokens"] == steps[1]["target_tokens"]
    assert steps[0]["loss"] == pytest.approx(steps[1]["loss"], abs=1e-6)
    assert steps[0]["grad_norm"] == pytest.approx(steps[1]["grad_norm"], rel=1e-5)
    assert "row-2" not in steps[0]["rows"] and len(steps[0]["rows"]) == 3


def test_acts_hold_from_their_step_on() -> None:
    acts = [
        Act(30, 21, 20, "diverged", "halve_rate", 0.5, ()),
        Act(50, 41, 40, "diverged", "halve_rate", 0.5, ("a",)),
    ]
    assert [rate_factor(acts, step) for step in (19, 20, 39, 40)] == [1.0, 0.5, 0.5, 0.25]
    assert left_out(acts, 39) == frozenset() and left_out(acts, 40) == {"a"}


def test_rows_are_not_left_out_of_pairs(make_recipe: Any) -> None:
    with pytest.raises(ValidationError, match="none can be left out alone"):
        make_recipe(train__method="dpo", train__rewind={"remedy": "skip_rows"})


@pytest.mark.parametrize("moment", ["proven", "decided", "half cleared", "cleared", "told", "done"])
def test_a_process_killed_during_a_rewind_goes_on_as_decided(
    moment: str, rewound: Any, train: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, whole, _ = rewound
    write_event, write, remove = EventLog.write, rewind.write_acts, shutil.rmtree

    def told(self: Any, event: str, **fields: Any) -> None:
        if moment == "cleared" and event == "rewind":
            raise SystemExit
        write_event(self, event, **fields)
        if moment == "told" and event == "rewind":
            raise SystemExit

    def decided(folder: Path, acts: Any, *, is_done: bool = True) -> None:
        if moment == "proven":
            raise SystemExit
        write(folder, acts, is_done=is_done)
        if moment == ("done" if is_done else "decided"):
            raise SystemExit

    def removed(path: Path, *args: Any, **kwargs: Any) -> None:
        if moment == "half cleared" and str(path).endswith(".removed"):
            raise SystemExit
        remove(path, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(EventLog, "write", told)
        patch.setattr(rewind, "write_acts", decided)
        patch.setattr(rewind.shutil, "rmtree", removed)
        with pytest.raises(SystemExit):
            train(recipe, name="killed")
    _, killed, _ = train(recipe, name="killed")
    assert read_acts(killed) == read_acts(whole)
    assert len(events_of(killed, "rewind")) == 1
    assert losses_of(killed) == losses_of(whole)
    assert digest_folder(killed / "model") == digest_folder(whole / "model")


def test_leaving_out_rows_ends_when_it_changes_nothing(
    make_recipe: Any, make_rows: Any, train: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A step that breaks whatever its rows are: the second time there is nothing left to leave out."""
    original = ExactSftTrainer.training_step

    def poisoned(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        loss = original(self, model, *args, **kwargs)
        if self.state.global_step == 9:
            next(p for p in model.parameters() if p.grad is not None).grad[0] = math.nan
        return loss

    monkeypatch.setattr(ExactSftTrainer, "training_step", poisoned)
    recipe = make_recipe(**REWINDING | {"train__rewind": {"remedy": "skip_rows"}, "train__packing": False})
    with pytest.raises(UserError, match="step 10 is not finite again, without the rows") as caught:
        train(recipe, rows=make_rows(16))
    assert "halve_rate" in caught.value.faults[0].fix
    (act,) = read_acts(tmp_path / "run")
    assert len(act.rows) == 2
    (stop,) = events_of(tmp_path / "run", "stop")
    assert (stop["step"], stop["reason"]) == (10, "not_finite")


def test_what_stopped_a_run_names_the_rows_of_its_beginning(
    explosive: None, make_recipe: Any, train: Any, tmp_path: Path
) -> None:
    recipe = make_recipe(**{**REWINDING, "train__on_divergence": "stop"})
    with pytest.raises(UserError, match="diverged at step 17"):
        train(recipe)
    (stop,) = events_of(tmp_path / "run", "stop")
    rows = {event["step"]: event["rows"] for event in events_of(tmp_path / "run", "step")}
    assert stop["rows"] == list(dict.fromkeys([*rows[16], *rows[17]]))
    found = diagnose(read_events(tmp_path / "run" / "events.jsonl"))[0]
    assert (found.shape, found.steps, list(found.rows)) == ("divergence", (17,), stop["rows"])
    assert "from step 17 on" in found.why
    with pytest.raises(UserError, match="diverged at step 17"):  # again, at once
        train(recipe)
    assert len(events_of(tmp_path / "run", "step")) == len(rows)


def test_damaged_rewinds_are_refused_with_their_remedy(make_recipe: Any, train: Any, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "rewinds.json").write_text('{"acts": [{"onset": 3}]}')
    with pytest.raises(UserError, match=r"rewinds\.json does not hold the rewinds of a run"):
        train(make_recipe(**REWINDING))
