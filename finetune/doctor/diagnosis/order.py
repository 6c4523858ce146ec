"""Steps in the curve that come from the order of the data: rows that were not shuffled, and epoch boundaries."""

from __future__ import annotations

import re
from itertools import pairwise

import numpy as np

from finetune.doctor.diagnosis.curve import Curve, FloatArray, noise_of, running_median
from finetune.doctor.diagnosis.finding import Diagnosis

_LAST_NUMBER = re.compile(r"(\d+)\D*$")
_SORTED_SHARE = 0.98  # of neighbouring rows in rising order
_REPEATED_SHARE = 0.9
_JUMP_NOISES = 3.0
_MOST_RISES = 100
_JUMP_SHARE = 0.12
_SMALL_JUMP_SHARE = 0.06  # enough where the order is known not to be shuffled


def find_regular_steps(curve: Curve) -> Diagnosis | None:
    """Rises of the level, or the same pattern every epoch, where rows come in the order of the file or the same every epoch.

    Where the rows of the steps are known and shuffled, it is something else. Where they are unknown, three rises or a
    pattern that repeats are needed.
    """
    if curve.n < 30:
        return None
    order = _order_of_rows(curve)
    rises = level_rises(curve, _JUMP_SHARE if order == "unknown" else _SMALL_JUMP_SHARE)
    alike = epoch_likeness(curve)
    repeats = alike is not None and alike > 0.6
    if order == "shuffled" or not (rises or repeats):
        return None
    if order == "unknown" and len(rises) < 3 and not repeats:
        return None
    steps = tuple(int(curve.step[index]) for index in rises)
    causes = {
        "sorted": "rows are read in the order of their numbers",
        "repeated": "every epoch reads the rows in the same order",
        "unknown": "which the order of the rows explains",
    }
    pattern = (
        f"the level of the loss rises at {len(rises)} places" if rises else "every epoch draws the same curve"
    )
    evidence: dict[str, float | int | str] = {"rises": len(rises), "order_of_rows": order}
    if alike is not None:
        evidence["correlation_of_epochs"] = round(alike, 3)
    return Diagnosis(
        "regular_steps",
        "warning",
        f"{pattern}, and {causes[order]}" if order != "unknown" else f"{pattern}, {causes[order]}",
        "shuffle: rows sorted by source, topic or length make each step forget the last block. finetune's own trainer "
        "shuffles every epoch by the recipe's seed",
        evidence,
        steps,
    )


def level_rises(curve: Curve, least_share: float) -> list[int]:
    """Places where the level of the loss goes up and stays for a while, largest rise of each neighbourhood."""
    loss = curve.clean
    half = min(max(curve.n // 50, 2), 12)
    window, early = 2 * half + 1, curve.spans(0.06, 5)
    level = running_median(loss, window)
    places = np.arange(max(window, early), curve.n - window + 1)
    before, after = level[places - half - 1], level[places + half]
    limit = np.maximum(
        least_share * before, max(_JUMP_NOISES * noise_of(loss), 0.03 * float(np.median(loss[:5])))
    )
    rises = after - before
    found: list[int] = []
    for index in np.argsort(-rises, kind="stable"):
        if rises[index] < limit[index]:
            continue
        place = int(places[index])
        if all(abs(place - other) > 2 * window for other in found):
            found.append(place)
        if len(found) == _MOST_RISES:
            break
    return sorted(found)


def _median_rise(loss: FloatArray, place: int, window: int) -> float:
    return float(np.median(loss[place : place + window]) - np.median(loss[place - window : place]))


def epoch_likeness(curve: Curve) -> float | None:
    """Mean correlation of one epoch's departures from its own parabola with those of the next; None under 2 epochs."""
    epochs = curve.epoch
    if not np.isfinite(epochs).all() or epochs[-1] < 1.9:
        return None
    loss = curve.clean
    per_epoch = round(curve.n / float(epochs[-1]))
    if per_epoch < 12:
        return None
    pieces = [
        _without_bend(loss[start : start + per_epoch])
        for start in range(0, curve.n - per_epoch + 1, per_epoch)
    ]
    correlations = []
    for one, other in pairwise(pieces):
        if len(one) == len(other) and np.std(one) > 0 and np.std(other) > 0:
            correlations.append(float(np.corrcoef(one, other)[0, 1]))
    return float(np.mean(correlations)) if correlations else None


def _without_bend(losses: FloatArray) -> FloatArray:
    """Losses less their best parabola, so that a steady fall within each epoch is no likeness."""
    x = np.linspace(-1.0, 1.0, len(losses))
    return np.asarray(losses - np.polyval(np.polyfit(x, losses, 2), x))


def _order_of_rows(curve: Curve) -> str:
    """'sorted' by the numbers in their ids, 'repeated' every epoch, 'shuffled', or 'unknown' where events name no rows."""
    if not curve.knows_rows:
        return "unknown"
    sequence = [row for rows in curve.rows for row in rows]
    numbers = [int(match[1]) if (match := _LAST_NUMBER.search(row)) else None for row in sequence]
    known = [number for number in numbers if number is not None]
    if len(known) == len(sequence) and len(known) > 20:
        rising = sum(later > earlier for earlier, later in pairwise(known))
        if rising / (len(known) - 1) > _SORTED_SHARE:
            return "sorted"
    first: dict[str, int] = {}
    distances = []
    for place, row in enumerate(sequence):
        if row in first:
            distances.append(place - first[row])
        first[row] = place
    if len(distances) > 20:
        common = max(set(distances), key=distances.count)
        if distances.count(common) / len(distances) > _REPEATED_SHARE:
            return "repeated"
    return "shuffled"


def find_epoch_steps(curve: Curve) -> Diagnosis | None:
    """The loss steps down where an epoch begins and is level within: rows are recognised, not understood."""
    epochs = curve.epoch
    if curve.n < 20 or not np.isfinite(epochs).all() or epochs[-1] < 1.5:
        return None
    loss, noise = curve.clean, noise_of(curve.clean)
    boundaries = [
        index for index in range(1, curve.n) if int(epochs[index] - 1e-6) > int(epochs[index - 1] - 1e-6)
    ]
    window = min(max(int(curve.n / epochs[-1]) // 4, 4), 25)
    drops = []
    for place in boundaries:
        if window < place <= curve.n - window:  # there are losses before the window before it
            drop = -_median_rise(loss, place, window)
            within = float(np.median(loss[max(place - 2 * window, 0) : place - window])) - float(
                np.median(loss[place - window : place])
            )
            drops.append((drop - max(within, 0.0), place))
    level = float(np.median(loss))
    steps = [place for drop, place in drops if drop > max(_JUMP_NOISES * noise, _JUMP_SHARE * level)]
    if not steps or len(steps) < 0.6 * len(drops):
        return None
    return Diagnosis(
        "epoch_steps",
        "note",
        f"the loss steps down where {len(steps)} of {len(drops)} epochs begin: rows seen before are recognised",
        "watch the validation loss: if it rises, fewer epochs are better",
        {"boundaries": len(drops), "steps_down": len(steps)},
        tuple(int(curve.step[place]) for place in steps),
    )
