"""The events of a run as arrays, and the robust measures that every reading of a curve shares.

N steps in order, V validations. What an event lacks, and what was not finite in it, is NaN.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from finetune.recipe.preference_section import PREFERENCE_METHODS

FloatArray = NDArray[np.float64]
Event = dict[str, Any]
_MAD_TO_SIGMA = 1.4826  # of a normal distribution
_BLOCK = 20_000  # windows at a time: a long run must not fill the memory
_LARGEST = 1e150
_LAST_STEP = 2**53  # what is beyond is no step, but damage


@dataclass(frozen=True)
class Curve:
    """Arrays of shape [N], `validation_*` [V]. `rows` are the ids each step trained on, `worst_row` the one of them
    with the highest loss; empty where unknown.

    `accuracy` is the share of pairs whose chosen answer is ahead, with methods that learn from pairs; `margin` how far the
    rewards of wanted answers are ahead of the others', with all methods that learn from preferences; `wanted` and `unwanted`
    those rewards, either of them missing where a step has no such answer.
    `setting` is what the newest start event says of the run: `method`, `adapter`, `optimizer`, `parameters`; empty in old runs.
    `is_overflow` marks steps whose loss or gradient was not finite, `has_loss_scale` runs whose gradients are scaled (fp16).
    """

    step: NDArray[np.int64]
    loss: FloatArray
    grad_norm: FloatArray
    update_ratio: FloatArray
    rate: FloatArray
    speed: FloatArray
    epoch: FloatArray
    loss_scale: FloatArray
    is_overflow: NDArray[np.bool_]
    rows: tuple[tuple[str, ...], ...]
    worst_row: tuple[str, ...]
    worst_row_loss: FloatArray
    validation_step: NDArray[np.int64]
    validation_loss: FloatArray
    accuracy: FloatArray
    margin: FloatArray
    wanted: FloatArray
    unwanted: FloatArray
    total_steps: int | None
    setting: Event
    stopped: Event | None

    @property
    def n(self) -> int:
        return len(self.step)

    @property
    def has_diverged(self) -> bool:
        """Whether the run itself stopped at a divergence."""
        return (self.stopped or {}).get("reason") in ("not_finite", "diverged")

    @property
    def stopped_rows(self) -> tuple[str, ...]:
        """Ids of the rows around the beginning of the divergence that stopped the run."""
        return _ids((self.stopped or {}).get("rows"))

    @property
    def has_loss_scale(self) -> bool:
        return bool(np.isfinite(self.loss_scale).any())

    @property
    def knows_rows(self) -> bool:
        return self.n > 0 and all(self.rows)

    @property
    def clean(self) -> FloatArray:
        """Losses [N] with those that were not finite replaced by the last finite one before them."""
        filled = self.loss.copy()
        for index in np.flatnonzero(~np.isfinite(filled)):
            filled[index] = filled[index - 1] if index else np.nan
        return np.where(np.isfinite(filled), filled, np.nanmean(filled) if np.isfinite(filled).any() else 0.0)

    @property
    def unit(self) -> str:
        """What stands behind a loss: preference losses are no likelihoods."""
        return "" if self.is_of_preferences else " nats"

    @property
    def is_of_preferences(self) -> bool:
        return self.setting.get("method") in PREFERENCE_METHODS

    def spans(self, share: float, at_least: int) -> int:
        """A number of steps: a share of the run, but not below `at_least`."""
        return max(round(self.n * share), at_least)

    @property
    def rate_is_up(self) -> bool:
        """Whether the warm-up is over: the newest rate is no new maximum, or the last few are all the same."""
        known = self.rate[np.isfinite(self.rate)]
        return len(known) < 2 or bool(known[-1] < known.max() or known[-1] == known[max(-10, -len(known))])


def read_curve(events: Sequence[Event]) -> Curve:
    """The curve of `read_events(...)`; of several writings of a step the last one counts. Unknown events are passed over."""
    steps = _by_step(events, "step")
    validations = _by_step(events, "validation")
    starts = [event for event in events if event.get("event") == "start"]
    stops = [event for event in events if event.get("event") == "stop"]
    start = starts[-1] if starts else {}
    setting = start.get("setting")

    def column(name: str, source: Sequence[Event] = steps) -> FloatArray:
        return np.asarray([_number(event.get(name)) for event in source], dtype=np.float64)

    return Curve(
        step=np.asarray([event["step"] for event in steps], dtype=np.int64),
        accuracy=column("reward_accuracy"),
        margin=_margins(steps),
        wanted=column("reward_chosen"),
        unwanted=column("reward_rejected"),
        loss=column("loss"),
        grad_norm=column("grad_norm"),
        update_ratio=column("update_ratio"),
        rate=column("learning_rate"),
        speed=column("tokens_per_second"),
        epoch=column("epoch"),
        loss_scale=column("loss_scale"),
        is_overflow=np.asarray(
            [_is_not_finite(event.get("loss")) or _is_not_finite(event.get("grad_norm")) for event in steps],
            dtype=bool,
        ),
        rows=tuple(_ids(event.get("rows")) for event in steps),
        worst_row=tuple(_text(event.get("worst_row")) for event in steps),
        worst_row_loss=column("worst_row_loss"),
        validation_step=np.asarray([event["step"] for event in validations], dtype=np.int64),
        validation_loss=column("loss", validations),
        total_steps=whole_step(start.get("total_steps")),
        setting=setting if isinstance(setting, dict) else {},
        stopped=stops[-1] if stops else None,
    )


def _by_step(events: Sequence[Event], kind: str) -> list[Event]:
    found = {
        step: event
        for event in events
        if event.get("event") == kind and (step := whole_step(event.get("step"))) is not None
    }
    return [found[step] for step in sorted(found)]


def whole_step(value: Any) -> int | None:
    """A number of steps, or None where it is none."""
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if 0 <= value < _LAST_STEP else None


def _is_not_finite(value: Any) -> bool:
    """A number that was not finite when it was written; what is missing or of another kind says nothing."""
    return value in ("nan", "inf", "-inf") or (isinstance(value, float) and not math.isfinite(value))


def _margins(steps: Sequence[Event]) -> FloatArray:
    """reward_margin [N], or the difference of the rewards where answers are judged one by one."""
    found = [
        _number(event.get("reward_margin"))
        if "reward_margin" in event
        else _number(event.get("reward_chosen")) - _number(event.get("reward_rejected"))
        for event in steps
    ]
    return np.asarray(found, dtype=np.float64)


def _number(value: Any) -> float:
    """A finite number, or NaN; non-finite ones are written as words in the log. What is beyond the square root of the range
    is no measurement, and its square would be infinite."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    return float(value) if abs(value) < _LARGEST else math.nan


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _ids(value: Any) -> tuple[str, ...]:
    return tuple(str(one) for one in value) if isinstance(value, list) else ()


def running_median(values: FloatArray, window: int) -> FloatArray:
    """Median [N] of the `window` values (odd) around each; at the ends the window is cut."""
    half = window // 2
    padded = np.pad(values, half, constant_values=np.nan)
    windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * half + 1)
    blocks = [windows[start : start + _BLOCK] for start in range(0, len(windows), _BLOCK)]
    return np.concatenate([np.nanmedian(block, axis=1) for block in blocks]) if blocks else values.copy()


def spread(values: FloatArray) -> float:
    """Standard deviation estimated from the median absolute deviation; 0 for fewer than 3 values."""
    known = values[np.isfinite(values)]
    if len(known) < 3:
        return 0.0
    return float(_MAD_TO_SIGMA * np.median(np.abs(known - np.median(known))))


def noise_of(values: FloatArray) -> float:
    """Noise of a curve from its second differences, which a smooth trend does not touch (variance 6 sigma^2)."""
    known = values[np.isfinite(values)]
    if len(known) < 5:
        return 0.0
    second = np.diff(known, n=2)
    return float(_MAD_TO_SIGMA * np.median(np.abs(second)) / math.sqrt(6.0))


def trend(values: FloatArray) -> tuple[float, float]:
    """(change from first to last by a straight line, its t statistic); (0, 0) for fewer than 5 values."""
    known = values[np.isfinite(values)]
    n = len(known)
    if n < 5:
        return 0.0, 0.0
    x = np.linspace(-0.5, 0.5, n)
    slope = float((x * known).sum() / (x**2).sum())
    residual = known - known.mean() - slope * x
    error = math.sqrt(float((residual**2).sum()) / (n - 2) / float((x**2).sum()))
    return slope, slope / error if error > 0 else math.copysign(math.inf, slope) if slope else 0.0
