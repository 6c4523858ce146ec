"""Every shape is named from a curve that has it, with its evidence, and not from one beside it."""

from __future__ import annotations

import itertools
import json
import math
import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from finetune.doctor.diagnosis import diagnose, new_findings
from finetune.doctor.diagnosis.finding import PRECEDENCE, TITLES
from finetune.doctor.diagnosis.spikes import strong_limit
from finetune.doctor.rates import usual_rate

Events = list[dict[str, Any]]
Make = Callable[..., Events]


def falling(step: int) -> float:
    return 0.5 + 2.0 * math.exp(-step / 30)


def first_shape(events: Events) -> str:
    return diagnose(events)[0].shape


def test_a_falling_loss_is_healthy(make_events: Make) -> None:
    (only,) = diagnose(make_events(falling))
    assert only.shape == "healthy" and not only.is_alarm
    assert only.evidence["steps"] == 120


@pytest.mark.parametrize("seed", range(20))
def test_noise_is_no_alarm(make_events: Make, seed: int) -> None:
    assert not any(one.is_alarm for one in diagnose(make_events(falling, noise=0.1, seed=seed)))


def test_a_plateau_then_a_fall_is_nothing_to_act_on(make_events: Make) -> None:
    found = diagnose(make_events(lambda step: 2.5 if step < 50 else 2.5 - 0.025 * (step - 50)))
    assert found[0].shape == "plateau_then_fall" and found[0].severity == "note"
    assert 45 <= found[0].steps[0] <= 75


def test_a_single_spike_names_its_step_and_its_worst_row(make_events: Make) -> None:
    events = make_events(
        lambda step: 5.0 if step == 70 else falling(step),
        worst_row=lambda step: f"row-{step}",
        worst_row_loss=lambda step: 9.0 if step == 70 else 3.0,
    )
    (spike,) = diagnose(events)
    assert spike.shape == "spike" and spike.steps == (70,) and spike.rows == ("row-70",)
    assert spike.severity == "note" and "nothing has to be done" in spike.remedy


def test_spikes_of_the_same_row_name_it_and_no_other(make_events: Make) -> None:
    bad = {22, 55, 88}
    events = make_events(
        lambda step: falling(step) + (1.5 if step in bad else 0.0),
        worst_row=lambda step: "poison" if step in bad else f"row-{step % 30}",
        worst_row_loss=lambda step: 9.0 if step in bad else 3.0 + 0.1 * (step % 7),
    )
    found = diagnose(events)
    assert found[0].shape == "recurring_spikes"
    assert found[0].rows == ("poison",) and set(found[0].steps) == bad
    assert "spike" not in {one.shape for one in found}  # said once


def test_spikes_of_different_rows_do_not_recur(make_events: Make) -> None:
    bad = {22, 55, 88}
    events = make_events(
        lambda step: falling(step) + (1.5 if step in bad else 0.0),
        worst_row=lambda step: f"row-{step}",
        worst_row_loss=lambda step: 9.0 if step in bad else 3.0,
    )
    spike = diagnose(events)[0]
    assert spike.shape == "spike" and spike.severity == "warning" and set(spike.steps) == bad
    assert spike.rows == ("row-22", "row-55", "row-88")


def test_high_losses_side_by_side_are_one_spike(make_events: Make) -> None:
    spike = diagnose(make_events(lambda step: 5.0 if step in (70, 72) else falling(step)))[0]
    assert spike.shape == "spike" and spike.severity == "note" and spike.evidence["spikes"] == 1


def test_a_jump_that_takes_long_to_come_back_is_a_warning(make_events: Make) -> None:
    events = make_events(lambda step: falling(step) + (1.2 if 60 <= step < 75 else 0.0))
    spike = diagnose(events)[0]
    assert spike.shape == "spike" and spike.severity == "warning" and spike.steps == (60,)
    assert "only after 15 steps" in spike.why


def test_a_spike_at_the_very_end_is_not_said_to_come_back(make_events: Make) -> None:
    spike = diagnose(make_events(lambda step: 5.0 if step == 119 else falling(step)))[0]
    assert spike.shape == "spike" and "before it is seen" in spike.why


class TestLimitOfSpikes:
    """All steps are looked at: the limit grows with their number and with the tail of the noise."""

    @pytest.mark.parametrize("n", [200, 5000])
    def test_noise_with_a_heavy_tail_passes_it_in_few_runs(self, n: int) -> None:
        draw = np.random.default_rng(1)
        runs = [draw.laplace(size=n) for _ in range(300)]
        heights = [run / (1.4826 * np.median(np.abs(run))) for run in runs]
        passed = sum(bool((one > strong_limit(one)).any()) for one in heights)
        assert passed / len(runs) < 0.05
        assert (
            sum(bool((one > 6.0).any()) for one in heights) > 2 * passed
        )  # which a fixed limit does not hold

    def test_it_is_never_below_six_and_spikes_hardly_move_it(self) -> None:
        sigmas = np.random.default_rng(2).normal(size=300)
        assert 6.0 <= strong_limit(sigmas) < 8.0
        spiked = sigmas.copy()
        spiked[[50, 100, 150]] = 80.0
        assert strong_limit(spiked) < strong_limit(sigmas) + 1.0
        assert strong_limit(np.zeros(100)) == 6.0


@pytest.mark.parametrize("after", [4.0, 2.0])
def test_a_rise_that_stays_is_a_divergence(make_events: Make, after: float) -> None:
    """Above where it began, or only far above where it had come to."""
    found = diagnose(make_events(lambda step: falling(step) if step < 80 else after))
    assert found[0].shape == "divergence" and found[0].severity == "fault"
    assert abs(found[0].steps[0] - 80) <= 2
    assert "checkpoint" in found[0].remedy


def test_updates_that_tear_the_weights_apart_are_a_divergence(make_events: Make) -> None:
    events = make_events(lambda step: 3.0 if step < 3 else 4.5 if step < 9 else 2.9, update_ratio=0.4)
    assert first_shape(events) == "divergence"


def test_a_loss_that_is_not_finite_is_a_divergence_and_in_fp16_an_overflow(make_events: Make) -> None:
    events = make_events(falling)
    for event in events:
        if event["event"] == "step" and event["step"] > 60:
            event["loss"], event["grad_norm"] = "nan", "inf"
    assert first_shape(events) == "divergence"
    for event in events:
        event["loss_scale"] = 65536.0
    assert first_shape(events) == "fp16_overflow"


@pytest.mark.parametrize(("n_overflows", "shape"), [(3, "healthy"), (12, "fp16_overflow")])
def test_a_loss_scale_may_search_at_the_start(make_events: Make, n_overflows: int, shape: str) -> None:
    events = make_events(
        falling,
        grad_norm=lambda step: "inf" if step <= n_overflows else 1.0,
        loss_scale=lambda step: 65536.0 / 2 ** min(step, n_overflows),
    )
    assert first_shape(events) == shape


def test_a_run_that_was_stopped_says_why(make_events: Make) -> None:
    events = [*make_events(falling, n=8), {"event": "stop", "step": 9, "reason": "not_finite", "onset": 9}]
    (found,) = [one for one in diagnose(events) if one.is_alarm]
    assert found.shape == "divergence" and found.steps == (9,)


def test_overfitting_names_the_best_step(make_events: Make) -> None:
    events = make_events(
        lambda step: 2.0 * math.exp(-step / 40), validation=lambda step: 1.5 + ((step - 40) / 60) ** 2
    )
    found = diagnose(events)
    assert found[0].shape == "overfitting" and found[0].steps == (40,)
    assert found[0].evidence["lowest_at_step"] == 40


def test_validation_that_follows_is_no_overfitting(make_events: Make) -> None:
    events = make_events(falling, validation=lambda step: falling(step) + 0.1)
    assert first_shape(events) == "healthy"


class TestFlat:
    """Both flat, told apart by what arrives."""

    def test_no_gradient(self, make_events: Make) -> None:
        found = diagnose(make_events(lambda step: 2.4, grad_norm=0.0, update_ratio=0.0))
        assert [one.shape for one in found] == ["no_signal"]
        assert "nothing arrives" in found[0].why

    def test_a_gradient_without_movement(self, make_events: Make) -> None:
        found = diagnose(make_events(lambda step: 2.4, update_ratio=0.0))
        assert [one.shape for one in found] == ["no_signal"]
        assert "do not move" in found[0].why

    def test_little_movement(self, make_events: Make) -> None:
        assert first_shape(make_events(lambda step: 2.4, update_ratio=5e-6)) == "rate_too_low"

    def test_movement_and_a_high_loss(self, make_events: Make) -> None:
        assert first_shape(make_events(lambda step: 2.4)) == "data_too_hard"

    def test_movement_and_a_low_loss(self, make_events: Make) -> None:
        assert first_shape(make_events(lambda step: 0.4)) == "data_too_easy"

    def test_a_warm_up_that_still_goes_on_says_nothing_yet(self, make_events: Make) -> None:
        events = make_events(
            lambda step: 2.4, n=40, learning_rate=lambda step: step * 1e-6, update_ratio=1e-6
        )
        assert first_shape(events) == "healthy"


def test_a_loss_near_zero_from_the_start(make_events: Make) -> None:
    found = diagnose(make_events(lambda step: 0.01, noise=0.001))
    assert [one.shape for one in found] == ["near_zero_loss"]


def test_a_student_that_begins_near_its_teacher_is_no_fault(make_events: Make) -> None:
    events = make_events(lambda step: 0.01, noise=0.001)
    events[0]["setting"] = {
        "method": "distil",
        "adapter": "lora",
        "optimizer": "adamw",
        "parameters": 135_000_000,
    }
    assert "near_zero_loss" not in [one.shape for one in diagnose(events)]


def test_a_loss_that_comes_down_to_zero_is_healthy(make_events: Make) -> None:
    assert first_shape(make_events(lambda step: 2.0 * math.exp(-step / 15), noise=0.002)) == "healthy"


class TestOrder:
    @staticmethod
    def sawtooth(step: int) -> float:
        return 2.0 - 0.04 * (step % 30)

    def test_rises_in_a_sorted_order(self, make_events: Make) -> None:
        events = make_events(self.sawtooth, rows=lambda step: [f"row-{step * 2}", f"row-{step * 2 + 1}"])
        found = diagnose(events)
        assert found[0].shape == "regular_steps" and found[0].evidence["order_of_rows"] == "sorted"
        assert [abs(step - 30 * k) <= 2 for k, step in enumerate(found[0].steps, start=1)] == [True] * 3

    def test_the_same_pattern_every_epoch(self, make_events: Make) -> None:
        events = make_events(
            lambda step: 2.0 + 0.4 * math.sin(step / 40 * 2 * math.pi),
            per_epoch=40,
            rows=lambda step: [f"{'abcdefgh'[step * 7 % 8]}-{step % 40}x"],
        )
        found = diagnose(events)
        assert found[0].shape == "regular_steps" and found[0].evidence["order_of_rows"] == "repeated"

    def test_in_a_shuffled_order_it_is_something_else(self, make_events: Make) -> None:
        order = random.Random(1).sample(range(1000), 240)
        events = make_events(
            self.sawtooth, rows=lambda step: [f"row-{order[2 * step - 2]}", f"row-{order[2 * step - 1]}"]
        )
        assert "regular_steps" not in {one.shape for one in diagnose(events)}

    def test_steps_down_at_epochs_are_a_note(self, make_events: Make) -> None:
        events = make_events(lambda step: 2.0 - 0.5 * ((step - 1) // 40), per_epoch=40)
        shapes = {one.shape: one for one in diagnose(events)}
        assert "epoch_steps" in shapes and not shapes["epoch_steps"].is_alarm
        assert shapes["epoch_steps"].evidence["steps_down"] == 2


class TestRemedyOfALowRate:
    """The range is that of the method, what is trained, and the model's size."""

    @staticmethod
    def remedy(make_events: Make, rate: float, **setting: Any) -> str:
        events = make_events(lambda step: 2.4, update_ratio=5e-6, learning_rate=lambda step: rate)
        if setting:
            events[0]["setting"] = {"optimizer": "adamw", "parameters": 135_000_000} | setting
        (found,) = diagnose(events)
        assert found.shape == "rate_too_low"
        return found.remedy

    @pytest.mark.parametrize(
        ("method", "adapter"),
        [("sft", "lora"), ("dpo", "lora"), ("sft", "none"), ("dpo", "none"), ("kto", "dora")],
    )
    def test_it_names_the_usual_range(self, make_events: Make, method: str, adapter: str) -> None:
        usual = usual_rate(method, adapter, 135_000_000)
        rate = 2.0 * usual.low
        told = self.remedy(make_events, rate, method=method, adapter=adapter)
        assert f"from {rate:.3g} to {10 * rate:.3g} " in told
        assert f"usual here are {usual.low:g} to {usual.high:g}" in told and usual.source in told

    def test_it_does_not_leave_the_range(self, make_events: Make) -> None:
        assert "from 1e-09 to 1e-07 " in self.remedy(make_events, 1e-9, method="dpo", adapter="none")
        assert "from 2e-05 to 5e-05 " in self.remedy(make_events, 2e-5, method="dpo", adapter="none")
        told = self.remedy(make_events, 1e-3, method="dpo", adapter="lora")
        assert "ends at 0.001" in told and "before you raise it" in told

    def test_without_a_known_range_it_names_none(self, make_events: Make) -> None:
        for told in (
            self.remedy(make_events, 1e-6),
            self.remedy(make_events, 1e-6, method="sft", adapter="lora", optimizer="sgd"),
            self.remedy(make_events, 1e-6, method="sft", adapter="lora", parameters=None),
        ):
            assert "10 times" in told and "finetune doctor" in told and "usual here" not in told


class TestSpeed:
    @staticmethod
    def noisy(seed: int, cost: Callable[[int], float]) -> Callable[[int], float]:
        draw = random.Random(seed)
        return lambda step: 1000.0 / (cost(step) * math.exp(0.1 * draw.gauss(0, 1)))

    @pytest.mark.parametrize("seed", range(5))
    def test_a_leak_in_noise_is_a_warning(self, make_events: Make, seed: int) -> None:
        events = make_events(falling, n=300, tokens_per_second=self.noisy(seed, lambda step: 1 + step / 300))
        found = diagnose(events)[0]
        assert found.shape == "throughput_leak" and found.severity == "warning"
        assert 0.0 < found.evidence["decline_at_least"] < found.evidence["decline"] < 0.6

    @pytest.mark.parametrize("seed", range(30))
    def test_other_jobs_that_come_and_go_are_no_warning(self, make_events: Make, seed: int) -> None:
        draw, jobs = random.Random(seed), [False, True, False]
        costs = []
        for _ in range(200):
            jobs = [is_on != (draw.random() < 3 / 200) for is_on in jobs]
            costs.append(1.0 + 0.5 * sum(jobs))
        events = make_events(falling, n=200, tokens_per_second=self.noisy(seed, lambda step: costs[step - 1]))
        assert not any(one.is_alarm for one in diagnose(events))

    def test_a_fall_in_uneven_pieces_is_a_note_with_two_causes(self, make_events: Make) -> None:
        slower = [1.0, 1.05, 1.1, 1.12, 1.14, 1.6, 1.62, 1.64]
        events = make_events(
            falling, tokens_per_second=lambda step: 1000.0 / slower[(step - 1) // 15] * (1 + step % 3 / 100)
        )
        shapes = {one.shape: one for one in diagnose(events)}
        assert diagnose(events)[0].shape == "healthy"
        note = shapes["throughput_leak"]
        assert (
            note.severity == "note"
            and "another job" in note.remedy
            and "grows with every step" in note.remedy
        )

    def test_a_slow_leak(self, make_events: Make) -> None:
        events = make_events(falling, tokens_per_second=lambda step: 1000.0 / (1 + step / 120))
        found = diagnose(events)
        assert found[0].shape == "throughput_leak"
        assert 0.3 < found[0].evidence["decline"] < 0.5  # a half, between the means of the ends

    @pytest.mark.parametrize(
        "speed",
        [lambda step: 1000.0 if step < 60 else 500.0, lambda step: 600.0 if 40 < step < 70 else 1000.0],
        ids=["once slower", "a slow stretch"],
    )
    def test_one_event_is_no_leak(self, make_events: Make, speed: Callable[[int], float]) -> None:
        assert first_shape(make_events(falling, tokens_per_second=speed)) == "healthy"


def test_few_steps_are_too_few(make_events: Make) -> None:
    (only,) = diagnose(make_events(falling, n=6))
    assert only.shape == "too_short"
    assert diagnose([])[0].shape == "too_short"


def test_damaged_events_do_not_break_it(make_events: Make) -> None:
    events = make_events(falling)
    events[20] |= {"loss": None, "grad_norm": "x", "rows": 7, "worst_row": None, "update_ratio": True}
    events[21] = {"event": "step", "step": "many"}
    events[22] = {"event": "step", "step": 22}
    assert first_shape(events) == "healthy"


def test_an_answer_is_json_and_every_shape_has_a_rank(make_events: Make) -> None:
    found = diagnose(make_events(lambda step: falling(step) if step < 80 else 4.0))
    told = json.loads(json.dumps([one.to_dict() for one in found], allow_nan=False))
    assert told[0]["shape"] == "divergence" and told[0]["steps"]
    assert str(found[0]).startswith("fault   divergence: ")
    assert set(PRECEDENCE) == set(TITLES)


def test_while_a_run_goes_on_each_alarm_is_new_once_and_plateaus_wait(make_events: Make) -> None:
    flat = make_events(lambda step: 2.4, n=60)
    flat[0]["total_steps"] = 200
    assert new_findings(flat, ()) == []
    flat[0]["total_steps"] = 100
    assert [one.shape for one in new_findings(flat, ())] == ["data_too_hard"]
    assert new_findings(flat, {"data_too_hard"}) == []


def test_while_a_run_goes_on_one_spike_is_not_told_and_a_second_is(make_events: Make) -> None:
    def spiked(*steps: int) -> Events:
        return make_events(lambda step: 5.0 if step in steps else falling(step))

    assert new_findings(spiked(60), ()) == []
    (told,) = new_findings(spiked(60, 90), ())
    assert told.shape == "spike" and told.severity == "warning"


def test_a_leak_is_told_in_the_second_half_of_the_run(make_events: Make) -> None:
    leak = make_events(falling, tokens_per_second=lambda step: 1000.0 / (1 + step / 120))
    leak[0]["total_steps"] = 1000
    assert new_findings(leak, ()) == []
    leak[0]["total_steps"] = 200
    assert [one.shape for one in new_findings(leak, ())] == ["throughput_leak"]


def test_a_long_run_is_read_in_bounded_memory_and_its_spike_found(make_events: Make) -> None:
    events = make_events(
        lambda step: 9.0 if step == 30_000 else 0.5 + 2.0 * math.exp(-step / 5000), n=45_000, per_epoch=15_000
    )
    spike = diagnose(events)[0]
    assert spike.shape == "spike" and spike.steps == (30_000,)


def test_a_row_that_lies_very_far_out_recurs_even_where_the_loss_rises_little(make_events: Make) -> None:
    """In a large batch one broken row moves the step's loss by hardly more than its noise; its own loss tells."""

    def events(row_loss: float) -> Events:
        bad = {30: 0.9, 75: 0.18}
        return make_events(
            lambda step: falling(step) + bad.get(step, 0.0),
            noise=0.08,
            worst_row=lambda step: "poison" if step in bad else f"row-{step % 30}",
            worst_row_loss=lambda step: row_loss if step in bad else 3.0 + 0.1 * (step % 7),
        )

    found = diagnose(events(12.0))
    assert found[0].shape == "recurring_spikes" and found[0].rows == ("poison",)
    assert "recurring_spikes" not in {one.shape for one in diagnose(events(4.2))}


def test_speed_that_falls_in_one_half_of_the_run_is_no_leak(make_events: Make) -> None:
    """Another job began: slowly for a third of the run, and then no more."""
    slower = make_events(falling, tokens_per_second=lambda step: 1000.0 / (1 + 0.4 * min(step / 45, 1.0)))
    assert first_shape(slower) == "healthy"


def test_a_rate_too_low_names_the_run_before_rows_that_recur(make_events: Make) -> None:
    """Where nothing is learned, hard rows stay the worst ones."""
    bad = {22, 55, 88}
    events = make_events(
        lambda step: 2.4 + (1.5 if step in bad else 0.0),
        update_ratio=5e-6,
        worst_row=lambda step: "hard" if step in bad else f"row-{step % 30}",
        worst_row_loss=lambda step: 9.0 if step in bad else 3.0 + 0.1 * (step % 7),
    )
    assert [one.shape for one in diagnose(events)] == ["rate_too_low", "recurring_spikes"]


def level(make_events: Make, value: float, method: str, **fields: Any) -> Any:
    """The first finding of a loss that stays although weights move."""
    events = make_events(lambda step: value, update_ratio=5e-3, **fields)
    events[0]["setting"] = {"method": method, "adapter": "lora", "optimizer": "adamw", "parameters": 10**8}
    return diagnose(events)[0]


@pytest.mark.parametrize(
    ("method", "value", "accuracy", "shape", "words"),
    [
        ("dpo", 0.69, 0.5, "data_too_hard", "50% of the pairs"),
        ("reward", 0.69, 0.52, "data_too_hard", "swapped"),
        ("dpo", 0.3, 0.98, "data_too_easy", "prefers the better answers already"),
        ("simpo", 2.1, 0.97, "data_too_easy", "98%"),
        ("kto", 0.5, None, "data_too_hard", "at random"),
        ("kto", 0.15, None, "data_too_easy", "prefers"),
        ("distil", 2.0, None, "data_too_hard", "nearer to its teacher"),
        ("distil", 0.3, None, "data_too_easy", "as near to its teacher"),
        ("sft", 2.5, None, "data_too_hard", "do not follow from the prompts"),
        ("sft", 0.6, None, "data_too_easy", "knows these rows"),
    ],
)
def test_a_level_loss_is_read_in_the_words_of_its_method(
    make_events: Make, method: str, value: float, accuracy: float | None, shape: str, words: str
) -> None:
    fields = {} if accuracy is None else {"reward_accuracy": accuracy}
    found = level(make_events, value, method, **fields)
    assert found.shape == shape
    assert words.replace("98%", "97%") in f"{found.why} {found.remedy}"
    assert ("nats" in found.why) == (method in ("sft", "distil"))


def test_a_preference_loss_below_zero_is_not_near_zero(make_events: Make) -> None:
    assert "near_zero_loss" not in [one.shape for one in diagnose(make_events(lambda step: -2.0 - step / 60))]


def test_a_stop_names_where_it_began_and_its_rows(make_events: Make) -> None:
    events = make_events(falling, n=60, rows=lambda step: [f"row-{step}"])
    stop = {"event": "stop", "step": 60, "reason": "diverged", "onset": 51}
    (found,) = [one for one in diagnose([*events, stop]) if one.shape == "divergence"]
    assert (found.steps, found.rows) == ((51,), ("row-51",))
    (found,) = [one for one in diagnose([*events, {**stop, "rows": ["a", "b"]}]) if one.shape == "divergence"]
    assert found.rows == ("a", "b")


DAMAGE: list[Any] = [
    None,
    True,
    "x",
    "nan",
    math.nan,
    math.inf,
    -1,
    10**400,
    2**70,
    1e308,
    [],
    {},
    [None, {}],
    "",
]


@pytest.mark.parametrize("kind", ["start", "step", "validation", "stop"])
def test_fields_of_any_kind_are_read_without_a_traceback(make_events: Make, kind: str) -> None:
    """Every field of an event, in a fifth of them and in all, holds something that training never writes."""
    whole = make_events(
        falling, n=40, validation=lambda step: 1.0, rows=lambda step: [f"row-{step % 9}"], worst_row="row-1",
        worst_row_loss=3.0, loss_scale=65536.0, reward_accuracy=0.5,
    )  # fmt: skip
    whole[0]["setting"] = {"method": "sft", "adapter": "lora", "optimizer": "adamw", "parameters": 10**8}
    whole.append({"event": "stop", "step": 40, "reason": "diverged", "onset": 31, "rows": ["row-3"]})
    fields = {name for event in whole if event["event"] == kind for name in event} - {"event"}
    for name, value, every in itertools.product(sorted(fields), DAMAGE, (1, 5)):
        events = [
            {**event, name: value} if event["event"] == kind and place % every == 0 else event
            for place, event in enumerate(whole)
        ]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = diagnose(events)
        assert found
        json.dumps([one.to_dict() for one in found], allow_nan=False)


@pytest.mark.parametrize(
    ("method", "fields"),
    [
        ("dpo", {"reward_margin": lambda step: 3e-4 * step}),
        ("kto", {"reward_chosen": lambda step: 1e-4 * step, "reward_rejected": lambda step: -2e-4 * step}),
    ],
)
def test_preferences_that_come_apart_slowly_are_no_rate_too_low(
    make_events: Make, method: str, fields: dict[str, Any]
) -> None:
    """DPO at 1e-5: the loss falls by 4 %, the weights go 0.7 % of their norm, and the margin rises all the same."""
    setting = {"method": method, "adapter": "lora", "optimizer": "adamw", "parameters": 134_500_000}

    def shape(**given: Any) -> str:
        events = make_events(lambda step: 0.72 - 2e-4 * step, update_ratio=6e-5, **given)
        events[0]["setting"] = setting
        return first_shape(events)

    assert shape(**fields) == "healthy"
    assert shape(**dict.fromkeys(fields, 0.0)) == "rate_too_low"
    assert shape() == "rate_too_low"
    setting["method"] = "sft"
    assert shape(**fields) == "rate_too_low"


def judged_one_by_one(make_events: Make, gained: float, *, n: int = 120, noise: float = 0.02) -> str:
    """KTO with one answer a step: the loss stays near a half, every step has the reward of one kind of answer and no margin."""
    draw = np.random.default_rng(7)
    shaken = noise * draw.standard_normal(n + 1)
    events = make_events(lambda step: 0.5 - 0.02 * gained * step / n, n=n, update_ratio=6e-4)
    events[0]["setting"] = {"method": "kto", "adapter": "lora", "optimizer": "adamw", "parameters": 10**8}
    for event in events[1:]:
        step, wanted = event["step"], bool(draw.integers(2))
        reward = (1 if wanted else -1) * gained / 2 * step / n + float(shaken[step])
        event["reward_chosen" if wanted else "reward_rejected"] = reward
    return first_shape(events)


def test_answers_that_are_judged_one_by_one_come_apart_although_no_step_holds_both(make_events: Make) -> None:
    assert judged_one_by_one(make_events, 0.1) == "healthy"
    assert judged_one_by_one(make_events, 0.1, n=40) == "healthy"
    assert judged_one_by_one(make_events, 0.0) == "data_too_hard"
    assert judged_one_by_one(make_events, -0.1) == "data_too_hard"  # what is wanted becomes less likely
