"""A run as a terminal shows it: curves, time left, what a resume took back, and text that cannot move the cursor."""

from __future__ import annotations

import io
import math
from typing import Any

from finetune.telemetry.sparkline import can_draw, sparkline
from finetune.telemetry.terminal import RunView, on_one_line, step_line
from finetune.telemetry.trackers import tracked


def step(number: int, **fields: Any) -> dict[str, Any]:
    minute, second = divmod(2 * number, 60)
    values = {"loss": 4.0 / number, "grad_norm": 2.0, "update_ratio": 1e-3, "learning_rate": 1e-4, "mfu": 0.4}
    return {
        "event": "step",
        "time": f"2026-01-01T00:{minute:02d}:{second:02d}.000+00:00",
        "step": number,
        "epoch": number / 10,
        "tokens_per_second": 200.0,
        "memory_bytes": 10**9,
        **values,
        **fields,
    }


def view_of(*events: dict[str, Any]) -> RunView:
    view = RunView()
    for event in events:
        view.add(event)
    return view


def test_a_sparkline_rises_and_falls_with_its_values() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert sparkline([3.0, 3.0, 3.0]) == "▁▁▁"
    assert sparkline([]) == ""
    assert sparkline([1.0, None, math.nan, 2.0]) == "▁··█"
    assert sparkline([None, None]) == "··"
    assert sparkline([0, 0, 10, 10], width=2) == "▁█"


def test_where_it_cannot_be_drawn_it_is_left_out() -> None:
    assert can_draw(io.TextIOWrapper(io.BytesIO(), encoding="utf-8"))
    assert not can_draw(io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    lines = view_of(step(1), step(2)).lines(draws=False)
    assert all(line.isascii() for line in lines)


def test_time_left_goes_by_the_pace_of_the_last_steps() -> None:
    view = view_of({"event": "start", "step": 0, "total_steps": 100}, *(step(n) for n in range(1, 31)))
    assert view.seconds_left() == 2.0 * 70
    assert view.lines()[0] == "step 30/100, epoch 3.00, 2 min 20 s left"
    assert step_line(view).startswith("step 30/100  loss 0.1333  grad 2  ratio 0.001  rate 0.0001")
    assert view_of(step(1)).seconds_left() is None


def test_every_number_has_its_curve_and_what_is_not_finite_is_said() -> None:
    view = view_of(step(1), step(2, loss="nan", reward_margin=0.5))
    text = "\n".join(view.lines())
    for title in (
        "loss",
        "gradient norm",
        "update / weight",
        "learning rate",
        "tokens/s",
        "share of peak",
        "memory",
    ):
        assert f"\n{title} " in f"\n{text}"
    assert "not finite" in text and "reward margin" in text and "reward, chosen" not in text


def test_what_a_resume_took_back_is_gone() -> None:
    view = view_of(*(step(n) for n in range(1, 6)), {"event": "resume", "step": 3}, step(4, loss=9.0))
    assert sorted(view.steps) == [1, 2, 3, 4]
    assert view.steps[4]["loss"] == 9.0
    assert "look at this: resumed after step 3" in view.lines()


def test_what_a_person_should_look_at_is_told_as_it_is_found() -> None:
    finding = {
        "event": "finding",
        "step": 9,
        "title": "a spike",
        "why": "the loss\x1b[2J jumps",
        "rows": ["a"],
    }
    rewind = {
        "event": "rewind",
        "step": 4,
        "from_step": 8,
        "reason": "diverged",
        "rate_factor": 0.5,
        "rows": [],
    }
    skipped = {**rewind, "reason": "not_finite", "rate_factor": 1.0, "rows": ["a", "b"]}
    stop = {"event": "stop", "step": 12, "reason": "not_finite"}
    found = view_of(step(9), finding, rewind, skipped, stop, {"event": "novelty", "step": 3}).summary()[
        "notes"
    ]
    assert found == [
        "step 9: a spike: the loss [2J jumps",
        "step 4: back from step 8 and on with 0.5 of the rate, for its loss stayed above where it began",
        "step 4: back from step 8 and on without 2 rows, for its loss or gradient was not finite",
        "step 12: the run stopped: its loss or gradient was not finite",
    ]


def test_answers_and_sources_are_shown_without_their_control_characters() -> None:
    sample = {
        "event": "sample",
        "step": 2,
        "name": "row-1",
        "output": "red\x1b[31m\nand\rblue",
        "kl_to_base": 0.25,
    }
    validation = {
        "event": "validation",
        "step": 2,
        "loss": 1.5,
        "sources": {"a\x1b[2J": {"loss": 1.0, "target_tokens": 5}},
    }
    text = "\n".join(view_of(step(2), sample, validation).lines())
    assert "\x1b" not in text and "\r" not in text
    assert "row-1: red [31m and blue  [KL to the base 0.25]" in text
    assert "a [2J: 1 over 5 targets" in text
    assert on_one_line("x" * 500).endswith("…")


def test_trackers_get_the_finite_numbers_of_an_event() -> None:
    event = {
        "step": 3,
        "loss": 1.0,
        "grad_norm": math.inf,
        "update_ratio_blocks": {"0": 0.5},
        "rows": ["a"],
        "kind": "x",
    }
    assert tracked(event) == {"loss": 1.0, "update_ratio_blocks/0": 0.5}


def test_an_event_whose_step_is_no_number_is_passed_over() -> None:
    view = RunView()
    for step in (1, "2", None, [3]):
        view.add({"event": "step", "step": step, "loss": 1.0})
    assert list(view.steps) == [1]
    assert view.summary()["step"]["step"] == 1 and view.lines(60)


def test_a_narrow_window_shows_the_last_values_and_as_much_of_the_curve_as_fits() -> None:
    view = view_of(*(step(n) for n in range(1, 41)), {"event": "validation", "step": 40, "loss": 1.234})
    for width in (30, 40, 60, 100):
        lines = view.lines(width)
        loss = next(line for line in lines if line.startswith("loss"))
        assert "0.1" in loss and any("1.234" in line for line in lines) and len(loss) <= width
        assert sum(character in "▁▂▃▄▅▆▇█" for character in loss) == min(width - 30, 32)
