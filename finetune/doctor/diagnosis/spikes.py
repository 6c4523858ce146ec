"""Spikes of the loss: one that recovers, those that come back with the same rows, and the rise that stays."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from finetune.doctor.diagnosis.curve import Curve, FloatArray, noise_of, running_median, spread
from finetune.doctor.diagnosis.finding import Diagnosis
from finetune.telemetry.divergence import STEPS as SUSTAINED_STEPS
from finetune.telemetry.divergence import first_divergence

_STRONG = 6.0  # standard deviations above the curve
_WEAK = 2.0  # enough where the worst row is one that was so before
_SLIGHT = 1.0  # enough where, besides, that row lies very far from all others
_FAR, _VERY_FAR = 4.0, 8.0  # standard deviations of a step's worst row above those of the steps around it
_LEAST_SHARE_OF_LEVEL = 0.3
_LEAST_SHARE_OF_START = 0.12
_HUGE_UPDATE = 0.1  # of the weights' norm in one step: nothing that was learned survives ten of them
_JUMP_OF_UPDATES = 5.0


@dataclass(frozen=True)
class Heights:
    """Of every step [N]: the curve without spikes, how far the loss lies above it, and that in standard deviations."""

    level: FloatArray
    above: FloatArray
    sigmas: FloatArray

    def are_spikes(self, sigmas: float, share_of_start: float) -> NDArray[np.bool_]:
        start = float(np.median(self.level[:5]))
        high = self.above > np.maximum(_LEAST_SHARE_OF_LEVEL * self.level, share_of_start * start)
        return np.asarray((self.sigmas > sigmas) & high)


def heights(curve: Curve) -> Heights:
    """Against the higher of the medians just before and just after, so that a steep fall makes no spikes.

    The noise is that of the neighbourhood, but never below half of the run's, nor below that of neighbouring steps.
    """
    loss = curve.clean
    half = min(max(curve.n // 40, 2), 12)
    medians = np.pad(running_median(loss, 2 * half + 1), half + 1, mode="edge")
    level = np.maximum(
        medians[: curve.n], medians[2 * half + 2 :]
    )  # around the steps half + 1 before and after
    above = loss - level
    overall = max(0.5 * spread(above), noise_of(loss))
    near = running_median(np.abs(above - np.median(above)), 16 * half + 1) * 1.4826
    noise = np.maximum(np.maximum(near, overall), 0.01 * np.abs(level) + 1e-4)
    return Heights(level, above, above / noise)


def find_recurring(curve: Curve) -> Diagnosis | None:
    """Rows that were the worst of their step at two spikes or more, each far above the worst rows of other steps."""
    if curve.n < 20 or not any(curve.worst_row):
        return None
    found = heights(curve)
    start = float(np.median(found.level[:5]))
    rows_above = _departures(curve.worst_row_loss)
    high = ((found.sigmas > _WEAK) & (rows_above > _FAR)) | (
        (found.sigmas > _SLIGHT) & (rows_above > _VERY_FAR)
    )
    high &= found.above > np.maximum(0.1 * found.level, 0.04 * start)
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
        f"the loss jumps by {rise:.2g} nats at {len(steps)} steps, and each time {which} is in the batch, with a loss of {worst:.3g}",
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
    """Strong spikes after which the loss is back on its curve within a few steps."""
    if curve.n < 20:
        return None
    found = heights(curve)
    early = curve.spans(0.05, 4)
    places = [
        index for index in np.flatnonzero(found.are_spikes(_STRONG, _LEAST_SHARE_OF_START)) if index >= early
    ]
    if not places:
        return None
    steps = tuple(int(curve.step[index]) for index in places)
    top = max(places, key=lambda index: found.above[index])
    where = f"step {steps[0]}" if len(steps) == 1 else f"{len(steps)} steps"
    return Diagnosis(
        "spike",
        "warning",
        f"at {where} the loss jumps, at most to {curve.clean[top]:.3g} where the curve is at {found.level[top]:.3g}, and comes back",
        "nothing has to be done for one spike; the worst row of each is named; all rows of a step are in events.jsonl. If spikes come back: read those "
        "rows, lower train.max_grad_norm, or lower the rate",
        {
            "highest_loss": round(float(curve.clean[top]), 4),
            "curve_there": round(float(found.level[top]), 4),
            "standard_deviations": round(float(found.sigmas[top]), 1),
        },
        steps,
        tuple(dict.fromkeys(row for place in places if (row := curve.worst_row[place]))),
    )


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
    if curve.stopped is not None and curve.stopped.get("reason") in ("not_finite", "diverged"):
        step = int(curve.stopped.get("step", 0))
        what = (
            "the loss or its gradient was not finite"
            if curve.stopped["reason"] == "not_finite"
            else "the loss stayed above where it began"
        )
        return _diverged(f"the run stopped at step {step}: {what}", _movement(curve, curve.n), step, ())
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
