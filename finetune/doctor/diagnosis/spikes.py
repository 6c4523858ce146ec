"""Spikes of the loss: one that recovers, those that come back with the same rows, and the rise that stays."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from finetune.doctor.diagnosis.curve import Curve, FloatArray, noise_of, running_median, spread
from finetune.doctor.diagnosis.finding import Diagnosis
from finetune.telemetry.divergence import STEPS as SUSTAINED_STEPS
from finetune.telemetry.divergence import first_divergence

_STRONG = 8.0  # standard deviations above the curve
_WEAK = 4.0
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

    def are_spikes(self, sigmas: float, share_of_start: float) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        start = float(np.median(self.level[:5]))
        high = self.above > np.maximum(_LEAST_SHARE_OF_LEVEL * self.level, share_of_start * start)
        return np.asarray((self.sigmas > sigmas) & high)


def heights(curve: Curve) -> Heights:
    """Against a running median; the noise is that of the neighbourhood, but never below half of the run's."""
    loss = curve.clean
    window = min(max(curve.n // 10, 9), 51) // 2 * 2 + 1
    level = running_median(loss, window)
    above = loss - level
    overall = spread(above)
    near = running_median(np.abs(above - np.median(above)), 4 * (window // 2) + 1) * 1.4826
    noise = np.maximum(np.maximum(near, 0.5 * overall), 0.01 * np.abs(level) + 1e-4)
    return Heights(level, above, above / noise)


def find_recurring(curve: Curve) -> Diagnosis | None:
    """Rows whose every coming-back raises the loss, when they explain most spikes.

    A row counts when it came at least three times, or twice with strong spikes, and a spike was there each time (one
    miss in four is allowed: what comes often is learnt). A row that shares a spike with a better explanation is left out.
    """
    if not curve.knows_rows or curve.n < 20:
        return None
    found = heights(curve)
    weak = found.are_spikes(_WEAK, 0.04) | ((found.sigmas > 6.0) & (found.above > 0.1 * found.level))
    if weak.sum() < 2:
        return None
    culprits = _explain(curve, found, weak)
    explained = {step for steps in culprits.values() for step in steps}
    # What no row explains must be the smaller part, or the rows are chance.
    if len(explained) < 2 or len(explained) < 0.5 * int(
        (weak & (np.arange(curve.n) >= curve.spans(0.08, 5))).sum()
    ):
        return None
    steps = tuple(int(curve.step[index]) for index in sorted(explained))
    rise = float(np.median(found.above[sorted(explained)]))
    rows = tuple(sorted(culprits, key=lambda row: (min(culprits[row]), row)))
    return Diagnosis(
        "recurring_spikes",
        "warning",
        f"the loss jumps by {rise:.2g} nats at {len(steps)} steps, and each time the same "
        f"{'row is' if len(rows) == 1 else f'{len(rows)} rows are'} in the batch",
        "read these rows: wrong language, broken encoding, cut answers, or text that no model can foresee. Remove or repair "
        "them in the dataset spec, or train with train.on_divergence: rewind and its remedy skip_rows",
        {"spikes": len(steps), "median_rise_nats": round(rise, 4), "rows": len(rows)},
        steps,
        rows,
    )


def _explain(curve: Curve, found: Heights, spikes: Sequence[bool] | FloatArray) -> dict[str, list[int]]:
    """Rows that explain spikes, greedily by the number of spikes: row -> places of its spikes in the curve."""
    visits: dict[str, list[int]] = defaultdict(list)
    for index, rows in enumerate(curve.rows):
        for row in dict.fromkeys(rows):
            visits[row].append(index)
    early = curve.spans(0.08, 5)  # the steep beginning hides spikes
    candidates = {}
    for row, places in visits.items():
        late = [place for place in places if place >= early]
        hits = [place for place in late if spikes[place]]
        strong = all(found.sigmas[place] > _STRONG for place in hits)
        enough = len(hits) >= 3 or (len(hits) == 2 and strong and len(late) == 2)
        if enough and len(hits) >= 0.75 * len(late):
            candidates[row] = hits
    chosen: dict[str, list[int]] = {}
    left = set(np.flatnonzero(np.asarray(spikes)).tolist())
    while candidates:
        row = max(
            candidates,
            key=lambda one: (len(left & set(candidates[one])), found.sigmas[candidates[one]].sum()),
        )
        hits = candidates.pop(row)
        if len(left & set(hits)) < 2:
            break
        chosen[row] = hits
        left -= set(hits)
    return chosen


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
        "nothing has to be done for one spike; the rows of that step are in events.jsonl. If spikes come back: read those "
        "rows, lower train.max_grad_norm, or lower the rate",
        {
            "highest_loss": round(float(curve.clean[top]), 4),
            "curve_there": round(float(found.level[top]), 4),
            "standard_deviations": round(float(found.sigmas[top]), 1),
        },
        steps,
        curve.rows[top] if len(steps) == 1 else (),
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
