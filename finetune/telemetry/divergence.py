"""When a loss has diverged: one rule, used while training and when the curve is read afterwards, and how what was done about it
is told. No torch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

STEPS = 10  # in a row that must be bad: a spike that recovers is over by then
LONG_STEPS = 20  # of which most must be bad: a loss over few examples has good steps however bad the model is
_MOST_OF_LONG = 0.7
_LEAST_RISE = 0.1
_AFTER = 5  # steps at the start that tell where the loss began
_ABOVE_BEST = 0.25
_ABOVE_START = 0.05
_NOISES_ABOVE_BEST = 4.0
_ROWS_NAMED = 20


class DivergenceRule:
    """Told the loss of every step, says whether training has diverged.

    It has when for `STEPS` steps in a row, or in 70 % of `LONG_STEPS`, the loss was above its best level by a quarter and by four
    times its noise, and in the middle above where it began, so that the model is worse than before training. The best level is the lowest
    median of five neighbouring losses, the noise the median distance of neighbours. A loss that is not finite counts as bad.
    """

    def __init__(self) -> None:
        self._losses: list[float] = []
        self._best = math.inf
        self._changes: list[float] = []
        self.n_steps = STEPS  # from the first bad one to the last, once `add` has said True

    def add(self, loss: float) -> bool:
        """Count one step; True at the step that proves it."""
        self._losses.append(loss)
        losses = self._losses
        n = len(losses)
        if n <= _AFTER + STEPS:
            return False
        settled = losses[n - STEPS - _AFTER : n - STEPS]  # before the steps that are judged
        if all(map(math.isfinite, settled)):
            self._best = min(self._best, statistics.median(settled))
            self._changes.append(abs(settled[-1] - settled[-2]))
        if not math.isfinite(self._best):
            return False
        noise = statistics.median(self._changes[-101:])
        limit = self._best + max(_ABOVE_BEST * abs(self._best), _NOISES_ABOVE_BEST * noise)
        start = statistics.median(losses[:_AFTER])
        above = start + _ABOVE_START * abs(start)
        # What wavers near zero has good and bad steps too, and is not lost.
        for n_steps, share, least in (
            (STEPS, 1.0, above),
            (LONG_STEPS, _MOST_OF_LONG, max(above, start + _LEAST_RISE)),
        ):
            if n <= _AFTER + n_steps:
                break
            last = [loss if math.isfinite(loss) else math.inf for loss in losses[-n_steps:]]
            bad = [place for place, loss in enumerate(last) if loss > limit]
            if len(bad) >= share * n_steps and statistics.median(last) > least:
                self.n_steps = n_steps - bad[0]
                return True
        return False

    @property
    def onset(self) -> int:
        """Place of the first bad step, from 0, once `add` has said True."""
        return len(self._losses) - self.n_steps


def rewind_sentence(event: Mapping[str, Any]) -> str:
    """One `rewind` event in a sentence; what the event lacks or holds damaged is shown as it is."""
    reason = "a loss or gradient that was not finite" if event.get("reason") == "not_finite" else "divergence"
    rows = event.get("rows")
    if isinstance(rows, list) and rows:
        more = f" and {len(rows) - _ROWS_NAMED} more" if len(rows) > _ROWS_NAMED else ""
        remedy = f"without rows {', '.join(map(str, rows[:_ROWS_NAMED]))}{more}"
    else:
        remedy = f"with {event.get('rate_share', event.get('rate_factor'))} of the rate"
    return f"After {reason} at step {event.get('onset')} the run went back to step {event.get('step')} and on {remedy}."


def first_divergence(losses: Sequence[float]) -> int | None:
    """Place, from 0, of the first step of a divergence, or None."""
    rule = DivergenceRule()
    for loss in losses:
        if rule.add(loss):
            return rule.onset
    return None
