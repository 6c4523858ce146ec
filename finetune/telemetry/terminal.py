"""A run on a terminal: where it is, how long it will take, a curve a number, and the latest answers."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

from rich.cells import cell_len, set_cell_size

from finetune.telemetry.sparkline import sparkline
from finetune.units import format_bytes, format_duration

Record = dict[str, Any]
_CURVE_WIDTH = 32
# Of a curve's line: its name and its last value, which a narrow window shows before the curve.
_NUMBER_COLUMNS = 30
_RECENT_STEPS = 20  # the speed that the time left is told by
_SAMPLE_CHARACTERS = 200
_NOTE_CHARACTERS = 400
_MOST_SOURCES = 8  # with a line of their own, those with most targets
_REASONS = {
    "diverged": "its loss stayed above where it began",
    "not_finite": "its loss or gradient was not finite",
}
# What a person should look at, by kind of event: in a sentence.
_NOTES: dict[str, Callable[[Record], str]] = {
    "flag": lambda event: str(event.get("message")),
    "finding": lambda event: f"{event.get('title')}: {event.get('why')}",
    "rewind": lambda event: _rewound(event),
    "stop": lambda event: "the run stopped: " + _REASONS.get(str(event.get("reason")), "it went wrong"),
}


class RunView:
    """What is known of a run from its events so far; `add` them as they come, and `lines` are its picture."""

    def __init__(self) -> None:
        self.steps: dict[int, Record] = {}
        self.validations: dict[int, Record] = {}
        self.samples: dict[int, list[Record]] = {}
        self.notes: list[str] = []
        self.total_steps: int | None = None
        self.stage: Record = {}
        self.max_grad_norm: float | None = None

    def add(self, event: Record) -> None:
        """Take in one event, in the order of the file. What a resume says was lost is forgotten.

        An event whose step is no number is passed over: a damaged file is shown as far as it can be read.
        """
        kind, step = event["event"], event.get("step", 0)
        if not isinstance(step, int):
            return
        if kind == "step":
            self.steps[step] = event
        elif kind == "validation":
            self.validations[step] = event
        elif kind == "sample":
            self.samples.setdefault(step, []).append(event)
        elif kind == "start":
            total = number(event.get("total_steps"))
            self.total_steps = None if total is None else int(total)
            self.max_grad_norm = number(event.get("max_grad_norm"))
        elif kind == "stage":
            self.stage = event
        elif kind == "resume":
            for kept in (self.steps, self.validations, self.samples):
                for lost in [known for known in kept if known > step]:
                    del kept[lost]
            self.notes.append(f"resumed after step {step}")
        elif (told := _NOTES.get(kind)) is not None:
            self.notes.append(f"step {step}: {on_one_line(told(event), _NOTE_CHARACTERS)}")

    def seconds_left(self) -> float | None:
        """By the median pace of the last steps; None before two of them."""
        if self.total_steps is None:
            return None
        recent = [self.steps[step] for step in sorted(self.steps)[-_RECENT_STEPS - 1 :]]
        times = [time for event in recent if (time := _time_of(event)) is not None]
        paces = [(later - sooner).total_seconds() for sooner, later in pairwise(times)]
        paces = [pace for pace in paces if pace > 0]
        if not paces:
            return None
        return statistics.median(paces) * max(self.total_steps - max(self.steps), 0)

    def summary(self) -> Record:
        """The state as plain data: the last step and validation, and the time left."""
        last = self.steps[max(self.steps)] if self.steps else None
        validation = self.validations[max(self.validations)] if self.validations else None
        samples = self.samples[max(self.samples)] if self.samples else []
        return {
            "stage": self.stage or None,
            "total_steps": self.total_steps,
            "seconds_left": self.seconds_left(),
            "step": last,
            "validation": validation,
            "samples": samples,
            "notes": self.notes,
        }

    def lines(self, width: int = 100, *, draws: bool = True) -> list[str]:
        """The picture, each line at most `width` columns; without curves where the terminal cannot draw them."""
        if not self.steps:
            return [_cut(self._stage_line() or "no optimizer step yet", width)]
        events = [self.steps[step] for step in sorted(self.steps)]
        room = min(max(width - _NUMBER_COLUMNS, 0), _CURVE_WIDTH) if draws else 0
        found = [self._head(), *self._curves(events, room)]
        if self.validations:
            found += self._validation_lines(room)
        found += [f"look at this: {note}" for note in self.notes[-3:]]
        found += self._sample_lines()
        return [_cut(line, width) for line in found]

    def _stage_line(self) -> str:
        name, status = self.stage.get("name"), self.stage.get("status")
        return f"stage {name}: {status}" if name else ""

    def _head(self) -> str:
        last = max(self.steps)
        total = f"/{self.total_steps}" if self.total_steps else ""
        epoch = number(self.steps[last].get("epoch"))
        parts = [f"step {last}{total}", *([f"epoch {epoch:.2f}"] if epoch is not None else [])]
        left = self.seconds_left()
        if left:
            parts.append(f"{format_duration(left)} left")
        if stage := self._stage_line():
            parts.append(stage)
        return ", ".join(parts)

    def _curves(self, events: Sequence[Record], room: int) -> list[str]:
        limit = self.max_grad_norm
        clipped = f"clipped at {limit:g}" if limit else ""
        rows: list[tuple[str, str, Callable[[float], str], str]] = [
            ("loss", "loss", _short, ""),
            ("gradient norm", "grad_norm", _short, clipped),
            ("update / weight", "update_ratio", _short, ""),
            ("learning rate", "learning_rate", _short, ""),
            ("tokens/s", "tokens_per_second", lambda value: f"{value:.0f}", ""),
            ("share of peak", "mfu", lambda value: f"{value:.0%}", ""),
            ("memory", "memory_bytes", lambda value: format_bytes(round(value)), ""),
            ("reward margin", "reward_margin", _short, ""),
            ("reward, chosen", "reward_chosen", _short, ""),
            ("reward, rejected", "reward_rejected", _short, ""),
        ]
        found = []
        for title, field, shown, remark in rows:
            values = [number(event.get(field)) for event in events]
            known = [value for value in values if value is not None]
            if known:
                curve = f" {sparkline(values, room):<{room}}" if room else ""
                last = shown(values[-1]) if values[-1] is not None else "not finite"
                low, high = shown(min(known)), shown(max(known))
                found.append(
                    f"{title:<17}{curve} {last:>10}  {low} to {high}{', ' + remark if remark else ''}"
                )
        return found

    def _validation_lines(self, room: int) -> list[str]:
        steps = sorted(self.validations)
        losses = [number(self.validations[step].get("loss")) for step in steps]
        curve = f" {sparkline(losses, room):<{room}}" if room else ""
        last = f"{losses[-1]:.4g}" if losses[-1] is not None else "not finite"
        found = [f"{'validation':<17}{curve} {last:>10}  at step {steps[-1]}"]
        sources = self.validations[steps[-1]].get("sources")
        parts = [
            (name, loss, targets)
            for name, part in (sources.items() if isinstance(sources, dict) else ())
            if isinstance(part, dict)
            and (loss := number(part.get("loss"))) is not None
            and (targets := number(part.get("target_tokens"))) is not None
        ]
        for name, loss, targets in sorted(parts, key=lambda part: -part[2])[:_MOST_SOURCES]:
            found.append(f"  {on_one_line(name)}: {loss:.4g} over {targets:.0f} targets")
        return found

    def _sample_lines(self) -> list[str]:
        if not self.samples:
            return []
        step = max(self.samples)
        found = [f"answers at step {step}"]
        for sample in self.samples[step]:
            kl = number(sample.get("kl_to_base"))
            moved = f"  [KL to the base {kl:.3g}]" if kl is not None else ""
            name, output = (on_one_line(sample.get(key, "")) for key in ("name", "output"))
            found.append(f"  {name}: {output}{moved}")
        return found


def step_line(view: RunView) -> str:
    """The last step in one line of a log."""
    step = max(view.steps)
    event = view.steps[step]
    parts = [f"step {step}" + (f"/{view.total_steps}" if view.total_steps else "")]
    for name, field in (
        ("loss", "loss"),
        ("grad", "grad_norm"),
        ("ratio", "update_ratio"),
        ("rate", "learning_rate"),
    ):
        value = number(event.get(field))
        parts.append(f"{name} {value:.4g}" if value is not None else f"{name} not finite")
    left = view.seconds_left()
    return "  ".join(parts) + (f"  {format_duration(left)} left" if left else "")


def number(value: Any) -> float | None:
    """A finite number of an event, or None: what is not finite is written by its name."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        found = float(value)
    except OverflowError:  # an integer of hundreds of digits
        return None
    return found if math.isfinite(found) else None


def _time_of(event: Record) -> datetime | None:
    try:
        time = datetime.fromisoformat(event["time"])
    except (KeyError, TypeError, ValueError):
        return None
    return time if time.tzinfo is not None else time.replace(tzinfo=UTC)


def _cut(line: str, width: int) -> str:
    """At most `width` columns of a terminal, on which characters of Asian scripts and pictures take two."""
    if cell_len(line) <= width:
        return line
    return set_cell_size(line, max(width - 1, 0)).rstrip() + "…"


def on_one_line(text: str, most_characters: int = _SAMPLE_CHARACTERS) -> str:
    """Text of a model for a terminal: no line break, no control character that could move its cursor or colour it."""
    shown = "".join(character if character.isprintable() else " " for character in str(text))
    shown = " ".join(shown.split())
    return shown if len(shown) <= most_characters else f"{shown[:most_characters]}…"


def _rewound(event: Record) -> str:
    """What `train.on_divergence: rewind` did, and where it goes on from."""
    rows, share = event.get("rows"), number(event.get("rate_share", event.get("rate_factor")))
    done = (
        f"without {len(rows)} rows"
        if isinstance(rows, list) and rows
        else f"with {share or 0.0:g} of the rate"
    )
    why = _REASONS.get(str(event.get("reason")), "it went wrong")
    return f"back from step {event.get('from_step')} and on {done}, for {why}"


def _short(value: float) -> str:
    return f"{value:.4g}"
