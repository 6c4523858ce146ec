"""Spikes of the loss: one that recovers, those that come back with the same rows, and the rise that stays."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from finetune.doctor.diagnosis.curve import (
    Curve,
    FloatArray,
    noise_of,
    running_median,
    spread,
    whole_step,
)
from finetune.doctor.diagnosis.finding import Diagnosis
from finetune.telemetry.divergence import STEPS as SUSTAINED_STEPS
from finetune.telemetry.divergence import first_divergence

_STRONG = 6.0  # standard deviations above the curve, and more in long runs and in those with a heavy tail: strong_limit
_CHANCE = 0.01  # that the noise of a whole run makes one strong spike or more
_TAIL = 0.1  # of all steps: those whose heights tell how heavy the tail of the noise is
_WEAK = 2.0  # enough where the worst row is one that was so before
_SLIGHT = 1.0  # enough where, besides, that row lies very far from all others
_FAR, _VERY_FAR = 4.0, 8.0  # standard deviations of a step's worst row above those of the steps around it
_LEAST_SHARE_OF_LEVEL = 0.3
_LEAST_SHARE_OF_START = 0.12
_TALL_SHARE_OF_START = 0.5
_HUGE_UPDATE = 0.1  # of the weights' norm in one step: nothing that was learned survives ten of them
_JUMP_OF_UPDATES = 5.0
_ONE_EVENT = 3  # steps apart at most: spikes of one event
_RECOVERS_WITHIN = 5  # steps
_LEAST_AFTER = 3  # of them must be seen to say whether it came back
_STILL_THERE = 1 / 3  # of the spike's height


@dataclass(frozen=True)
class Heights:
    """Of every step [N]: the curve without spikes, how far the loss lies above it, that in standard deviations, the curve just
    before the step, and the standard deviation."""

    level: FloatArray
    above: FloatArray
    sigmas: FloatArray
    before: FloatArray
    noise: FloatArray

    def are_spikes(self) -> NDArray[np.bool_]:
        """Steps [N] that are strong spikes."""
        is_strong = self.are_strong(self.above, self.sigmas)
        return np.asarray(is_strong & (self.above > self.least_height(self.level)))

    def are_strong(self, rises: FloatArray, sigmas: FloatArray) -> NDArray[np.bool_]:
        """Rises [N] beyond the noise of the whole run; six standard deviations are enough for one of half the first loss."""
        is_tall = rises > _TALL_SHARE_OF_START * self.start
        return np.asarray((sigmas > strong_limit(self.sigmas)) | (is_tall & (sigmas > _STRONG)))

    @property
    def start(self) -> float:
        """The loss at the beginning."""
        return float(np.median(self.level[:5]))

    def least_height(self, level: FloatArray) -> FloatArray:
        """How far above `level` [N] a spike must reach, whatever the noise, nats [N]."""
        return np.asarray(np.maximum(_LEAST_SHARE_OF_LEVEL * level, _LEAST_SHARE_OF_START * self.start))


def strong_limit(sigmas: FloatArray) -> float:
    """Standard deviations that the noise of a healthy run of N steps passes anywhere with a chance of one in a hundred.

    All N steps are looked at, so the limit grows with N; losses have heavier tails than a normal distribution, so it is taken
    from the run's own: heights above their 90 % quantile are taken as exponential (peaks over a threshold; the tail of
    Pickands 1975, Annals of Statistics 3:119-131, with shape 0), with a scale from their median, which spikes among
    them hardly move. At least six.
    """
    threshold = float(np.quantile(sigmas, 1.0 - _TAIL))
    over = sigmas[sigmas > threshold] - threshold
    if not len(over):
        return _STRONG
    scale = float(np.median(over) / np.log(2.0))
    return max(_STRONG, threshold + scale * float(np.log(_TAIL * len(sigmas) / _CHANCE)))


def heights(curve: Curve) -> Heights:
    """Against the higher of the medians just before and just after, so that a steep fall makes no spikes.

    The noise is that of the neighbourhood, but never below half of the run's, nor below that of neighbouring steps.
    """
    loss = curve.clean
    half = min(max(curve.n // 40, 2), 12)
    medians = np.pad(running_median(loss, 2 * half + 1), half + 1, mode="edge")
    before = medians[: curve.n]
    level = np.maximum(before, medians[2 * half + 2 :])  # around the steps half + 1 before and after
    above = loss - level
    overall = max(0.5 * spread(above), noise_of(loss))
    near = running_median(np.abs(above - np.median(above)), 16 * half + 1) * 1.4826
    noise = np.maximum(np.maximum(near, overall), 0.01 * np.abs(level) + 1e-4)
    return Heights(level, above, above / noise, before, noise)


def find_recurring(curve: Curve) -> Diagnosis | None:
    """Rows that were the worst of their step at two spikes or more, each far above the worst rows of other steps."""
    if curve.n < 20 or not any(curve.worst_row):
        return None
    found = heights(curve)
    rows_above = _departures(curve.worst_row_loss)
    high = ((found.sigmas > _WEAK) & (rows_above > _FAR)) | (
        (found.sigmas > _SLIGHT) & (rows_above > _VERY_FAR)
    )
    high &= found.above > np.maximum(0.1 * found.level, 0.04 * found.start)
    high[: curve.spans(0.06, 5)] = False  # the steep beginning hides spikes
    hits: dict[str, list[int]] = defaultdict(list)
    for place in np.flatnonzero(high):
        hits[curve.worst_row[place]].append(int(place))
    hits = {row: places for row, places in hits.items() if row and len(places) > 1}
    if not hits:
        return None
    places = sorted(place for one in hits.values() for place in one)
    steps = tuple(int(curve.step[place]) for place in places)
    rise, worst = float(np.median(found.above[places])), float(np.median(curve.worst_row_loss[places]))
    rows = tuple(sorted(hits, key=lambda row: (hits[row][0], row)))
    which = "the same row" if len(rows) == 1 else f"one of {len(rows)} rows"
    return Diagnosis(
        "recurring_spikes",
        "warning",
        f"the loss jumps by {rise:.2g}{curve.unit} at {len(steps)} steps, and each time {which} is in the batch, with a loss of {worst:.3g}",
        "read these rows: wrong language, broken encoding, cut answers, or text that no model can foresee. Remove or repair "
        "them in the dataset's source, and train again",
        {"spikes": len(steps), "median_rise_nats": round(rise, 4), "median_loss_of_rows": round(worst, 4)},
        steps,
        rows,
    )


def _departures(losses: FloatArray) -> FloatArray:
    """How far each step's worst row lies above the worst rows of the steps around it, in standard deviations; 0 where it is
    not a third above them."""
    known = np.where(np.isfinite(losses), losses, np.nanmedian(losses) if np.isfinite(losses).any() else 0.0)
    level = running_median(known, min(max(len(known) // 4, 15), 101) // 2 * 2 + 1)
    above = known - level
    noise = max(spread(above), 1e-9)
    return np.asarray(np.where(above > 0.3 * level, above / noise, 0.0), dtype=np.float64)


def find_spike(curve: Curve) -> Diagnosis | None:
    """Strong spikes. One after which the loss is back on its curve within a few steps is a `note`; two and more, or one whose
    loss takes longer, are a `warning`."""
    if curve.n < 20:
        return None
    found = heights(curve)
    early = curve.spans(0.05, 4)
    high = found.are_spikes()
    high[:early] = False
    lasting = _lasting(curve, found, early)
    places = sorted({*np.flatnonzero(high).tolist(), *lasting})
    if not places:
        return None
    events = _events(places)
    is_unseen = curve.n - 1 - events[-1][-1] < _LEAST_AFTER
    is_alarm = len(events) > 1 or bool(lasting)
    steps = tuple(int(curve.step[place]) for place in places)
    top = max(places, key=lambda place: found.above[place])
    level = found.before[top] if top in lasting else found.level[top]
    return Diagnosis(
        "spike",
        "warning" if is_alarm else "note",
        f"at {f'step {steps[0]}' if len(steps) == 1 else f'{len(steps)} steps'} the loss jumps, at most to {curve.clean[top]:.3g} "
        f"where the curve is at {level:.3g}, and {_what_follows(curve, found, lasting, is_unseen)}",
        "read the worst row of each step; all rows of a step are in events.jsonl. Lower train.max_grad_norm or the rate; if the loss "
        "does not come down again, go back to a checkpoint from before"
        if is_alarm
        else "nothing has to be done for one spike; its worst row is named, and all rows of the step are in events.jsonl",
        {
            "highest_loss": round(float(curve.clean[top]), 4),
            "curve_there": round(float(level), 4),
            "standard_deviations": round(float((curve.clean[top] - level) / found.noise[top]), 1),
            "limit_standard_deviations": round(strong_limit(found.sigmas), 1),
            "spikes": len(events),
        },
        steps,
        tuple(dict.fromkeys(row for place in places if (row := curve.worst_row[place]))),
    )


def _events(places: list[int]) -> list[list[int]]:
    """Places in order, those close together in one list."""
    events: list[list[int]] = []
    for place in places:
        if events and place - events[-1][-1] <= _ONE_EVENT:
            events[-1].append(place)
        else:
            events.append([place])
    return events


def _lasting(curve: Curve, found: Heights, early: int) -> list[int]:
    """Steps where the loss jumps as a spike does and is still up for the steps after it: first places, one a stretch.

    Against the curve before alone, which a fall does not pass.
    """
    loss = curve.clean
    rise = loss - found.before
    high = found.are_strong(rise, rise / found.noise) & (rise > found.least_height(found.before))
    places: list[int] = []
    until = early
    for place in np.flatnonzero(high).tolist():
        after = loss[place + 1 : place + 1 + _RECOVERS_WITHIN]
        if place < until or len(after) < _RECOVERS_WITHIN:
            continue
        up = found.before[place] + _STILL_THERE * rise[place]
        if float(np.median(after)) > up:
            places.append(place)
            until = _back_at(loss, place, up)
    return places


def _back_at(loss: FloatArray, place: int, limit: float) -> int:
    """The first step after `place` from which three losses have a median of `limit` and less; the end, if there is none."""
    level = running_median(loss[place + 1 :], 3)
    back = np.flatnonzero(level <= limit)
    return place + 1 + int(back[0]) if len(back) else len(loss)


def _what_follows(curve: Curve, found: Heights, lasting: list[int], is_unseen: bool) -> str:
    """Whether the loss came back, in words."""
    if not lasting:
        return "the run ends before it is seen whether it comes back" if is_unseen else "comes back"
    place, loss = lasting[0], curve.clean
    limit = found.before[place] + _STILL_THERE * (loss[place] - found.before[place])
    back = _back_at(loss, place, float(limit))
    if back == curve.n:
        return f"has not come back since step {curve.step[place]}"
    return f"comes back only after {back - place} steps"


def find_divergence(curve: Curve) -> Diagnosis | None:
    """A loss that stays above what it was, one that is not finite outside fp16's scaling, or a rate that tears weights apart."""
    if (stopped := _stopped(curve)) is not None:
        return stopped
    onset = _onset(curve)
    if onset is None:
        return _torn_apart(curve)
    loss = curve.clean
    before, after = float(np.median(loss[max(onset - 10, 0) : onset])), float(np.median(loss[onset:]))
    jump = _jump_of_updates(curve, onset)
    cause = f" and updates grew {jump:.0f} times" if jump is not None and jump > _JUMP_OF_UPDATES else ""
    return _diverged(
        f"from step {curve.step[onset]} on the loss stays at {after:.3g}, after {before:.3g} before{cause}",
        {"loss_before": round(before, 4), "loss_after": round(after, 4), **_movement(curve, onset)},
        int(curve.step[onset]),
        curve.rows[onset],
    )


def _stopped(curve: Curve) -> Diagnosis | None:
    broken = np.flatnonzero(curve.is_overflow) if not curve.has_loss_scale else np.zeros(0, dtype=int)
    if curve.stopped is not None and curve.has_diverged:
        step = whole_step(curve.stopped.get("step")) or 0
        onset = whole_step(curve.stopped.get("onset")) or step
        place = int(np.searchsorted(curve.step, onset))
        what = (
            "the loss or its gradient was not finite"
            if curve.stopped["reason"] == "not_finite"
            else f"from step {onset} on the loss stayed above where it began"
        )
        rows = curve.stopped_rows or (curve.rows[place] if place < curve.n else ())
        return _diverged(f"the run stopped at step {step}: {what}", _movement(curve, place), onset, rows)
    if len(broken):
        first = int(broken[0])
        return _diverged(
            f"loss or gradient is not finite from step {curve.step[first]} on ({len(broken)} steps)",
            {"steps_not_finite": len(broken), **_movement(curve, first)},
            int(curve.step[first]),
            curve.rows[first],
        )
    return None


def _diverged(
    why: str, evidence: dict[str, float | int | str], step: int, rows: tuple[str, ...]
) -> Diagnosis:
    return Diagnosis(
        "divergence",
        "fault",
        why,
        "go back to the last good checkpoint and lower train.learning_rate by 2 to 10 times, or leave out the rows of that step; "
        "train.on_divergence: rewind does it by itself. A longer warm-up (train.warmup_share) and a lower "
        "train.max_grad_norm help against the next one",
        evidence,
        (step,),
        rows,
    )


def _movement(curve: Curve, onset: int) -> dict[str, float | int | str]:
    ratios = curve.update_ratio[onset : onset + 10]
    known = ratios[np.isfinite(ratios)]
    return {"update_ratio": float(f"{np.median(known):.3g}")} if len(known) else {}


def _jump_of_updates(curve: Curve, onset: int) -> float | None:
    before, after = curve.update_ratio[max(onset - 15, 0) : onset], curve.update_ratio[onset : onset + 5]
    before, after = before[np.isfinite(before)], after[np.isfinite(after)]
    if len(before) < 3 or not len(after) or np.median(before) <= 0:
        return None
    return float(np.median(after) / np.median(before))


def _onset(curve: Curve) -> int | None:
    """Where the loss leaves its curve for good: for the sustained steps it was worse than the untrained model, or it is above its
    curve until the end."""
    loss = curve.clean
    worse = first_divergence(loss.tolist())
    if worse is not None:
        return worse
    n_last = max(SUSTAINED_STEPS, curve.spans(0.1, 5))
    if curve.n < 2 * n_last + 5:
        return None
    best = running_median(loss, 9)
    lowest = int(np.argmin(best[:-n_last]))
    level = float(best[lowest])
    rise = max(0.25 * level, 6.0 * noise_of(loss), 0.15 * float(np.median(loss[:5])))
    high = loss > level + rise
    if not high[-n_last:].mean() > 0.9:
        return None
    return int(np.flatnonzero(~high)[-1]) + 1 if (~high).any() else None


def _torn_apart(curve: Curve) -> Diagnosis | None:
    """Updates of a tenth of the weights and more from the first steps on, with a loss that shows it."""
    ratios = curve.update_ratio[np.isfinite(curve.update_ratio) & (curve.update_ratio > 0)]
    if len(ratios) < 5 or curve.n < 10:
        return None
    early = float(np.median(ratios[:10]))
    loss = curve.clean
    start, end, top = float(loss[0]), float(np.median(loss[-max(curve.n // 10, 3) :])), float(loss[:15].max())
    if early < _HUGE_UPDATE or not (top > 1.15 * start or end > 0.6 * start):
        return None
    return _diverged(
        f"each of the first steps changed {early:.0%} of the weights' norm; the loss went from {start:.3g} to {top:.3g} and ended at {end:.3g}",
        {"update_ratio": round(early, 4), "first_loss": round(start, 4), "highest_loss": round(top, 4)},
        int(curve.step[int(np.argmax(loss[:15]))]),
        (),
    )
