"""A loss that does not move, told apart by what arrives: no gradient, no movement, too little of it, or nothing to learn."""

from __future__ import annotations

import math

import numpy as np

from finetune.doctor.diagnosis.curve import Curve, FloatArray, noise_of, running_median, trend
from finetune.doctor.diagnosis.data import find_data
from finetune.doctor.diagnosis.finding import Diagnosis
from finetune.doctor.rates import UsualRate, ranges_are_known, usual_rate

_NO_GRADIENT = 1e-9
_NO_MOVEMENT = 1e-12
_LITTLE_PATH = 0.02  # of the weights' norm over the whole run, were all steps in one direction
_FLAT_SHARE = 0.08
_SLOW_SHARE = 0.2  # a fall below this, by weights that hardly moved, is a rate too low as well
_SIGNIFICANT = 3.0
_NEAR_ZERO = 0.05  # nats a target: the right token has 95 % of the probability
_LEAST_STEPS = 30
_LEAST_MARGIN_GAINED = 0.01  # of rewards; DPO at 1e-5 gained 0.03 in 77 steps, KTO 0.04 in 136
_RAISE = 10.0  # times a rate that is too low


def find_no_signal(curve: Curve) -> Diagnosis | None:
    """No gradient reaches the trainable weights, or they do not move although it does."""
    active = (curve.rate > 0) | ~np.isfinite(curve.rate)
    active &= ~curve.is_overflow
    if active.sum() < 5:
        return None
    norms, ratios = curve.grad_norm[active], curve.update_ratio[active]
    if np.isfinite(norms).sum() >= 5 and np.nanmedian(norms) < _NO_GRADIENT:
        why = f"the gradient's norm is {np.nanmedian(norms):.1g}: nothing arrives at the weights that are trained"
    elif np.isfinite(ratios).sum() >= 5 and np.nanmedian(ratios) < _NO_MOVEMENT:
        why = (
            f"a gradient of norm {np.nanmedian(norms):.2g} arrives, but the weights do not move at all: the optimizer steps "
            "others, or they are held"
        )
    else:
        return None
    evidence = {"median_grad_norm": _shown(norms), "median_update_ratio": _shown(ratios)}
    return Diagnosis(
        "no_signal",
        "fault",
        why,
        "this is a bug, not a matter of the rate: look for a detached loss or no_grad, frozen trainable parts (adapter.freeze, "
        "adapter.target_modules), gradient checkpointing without inputs that require gradients, an optimizer made before the "
        "adapter was attached. finetune doctor invariants measures it",
        evidence,
    )


def find_flat(curve: Curve) -> Diagnosis | None:
    """A curve without a fall: rate too low when the weights hardly moved, else the data has nothing (more) to teach."""
    if curve.n < _LEAST_STEPS or not curve.rate_is_up:
        return None
    loss, path = curve.clean, path_of(curve)
    hardly_moved = path is not None and path < _LITTLE_PATH and fallen_share(loss) < _SLOW_SHARE
    if not (hardly_moved or is_flat(curve)) or tells_apart(curve):
        return None
    level, change = float(np.median(loss)), trend(loss)[0]
    evidence: dict[str, float | int | str] = {
        "loss": round(level, 4),
        "change_over_run": round(change, 4),
        "median_update_ratio": _shown(curve.update_ratio),
        "median_grad_norm": _shown(curve.grad_norm),
    }
    if path is not None:
        evidence["path_share_of_weights"] = float(f"{path:.3g}")
    if path is not None and path < _LITTLE_PATH:
        return Diagnosis(
            "rate_too_low",
            "warning",
            f"the loss hardly leaves {level:.3g} and all updates together come to {path:.2g} of the weights' norm, though a gradient of "
            f"norm {_shown(curve.grad_norm):.2g} arrives",
            _higher_rate(curve),
            evidence,
        )
    return find_data(curve, level, evidence)


def _higher_rate(curve: Curve) -> str:
    """What to set the rate to: ten times what it was, within what is usual for this training where that is known."""
    known = curve.rate[np.isfinite(curve.rate)]
    peak = float(known.max()) if len(known) else 0.0
    usual = _usual(curve)
    if usual is None:
        return (
            "raise train.learning_rate 10 times and look again; finetune doctor says what is usual for the recipe's method, "
            "adapter and model"
        )
    if peak >= usual.high:
        return (
            f"train.learning_rate is {peak:.3g} and the usual range ends at {usual.high:g} ({usual.source}): train for more steps, and "
            "check what is trained (adapter.rank, adapter.alpha, adapter.target_modules), before you raise it further"
        )
    target = min(max(_RAISE * peak, usual.low), usual.high)
    return (
        f"raise train.learning_rate from {peak:.3g} to {target:.3g} and look again; usual here are {usual.low:g} to {usual.high:g} "
        f"({usual.source})"
    )


def _usual(curve: Curve) -> UsualRate | None:
    """The usual range for what the run says of itself at its start; None where it does not, or its optimizer has none."""
    method, adapter, optimizer, parameters = (
        curve.setting.get(name) for name in ("method", "adapter", "optimizer", "parameters")
    )
    if not (isinstance(method, str) and isinstance(adapter, str) and isinstance(optimizer, str)):
        return None
    if not isinstance(parameters, int) or not ranges_are_known(optimizer):
        return None
    return usual_rate(method, adapter, parameters)


def find_near_zero(curve: Curve) -> Diagnosis | None:
    """A loss near zero from the first steps on leaves nothing to learn: the answer is in the prompt, or targets are trivial."""
    if curve.n < 10 or curve.setting.get("method") == "distil":  # a student near its teacher begins near zero
        return None
    loss = curve.clean
    first = float(np.median(loss[: curve.spans(0.05, 3)]))
    if (
        abs(first) > 2 * _NEAR_ZERO or abs(float(np.median(loss))) > _NEAR_ZERO
    ):  # preference losses may be negative
        return None
    return Diagnosis(
        "near_zero_loss",
        "fault",
        f"the loss is {first:.2g}{curve.unit} at the first steps, before anything could be learned",
        "read some pairs: something trivial, such as length or an ending, tells chosen from rejected, or the model has learned "
        "from these very pairs before. If all is right, it prefers the better answers already"
        if curve.is_of_preferences
        else "look at the targets (finetune data show, the token view): the answer stands in the prompt, only end or padding tokens "
        "are targets, or labels are shifted. If all is right, the model knows the task and needs no tuning",
        {"first_loss": float(f"{first:.3g}"), "median_loss": float(f"{float(np.median(loss)):.3g}")},
        (int(curve.step[0]),),
    )


def is_flat(curve: Curve) -> bool:
    """Whether neither a line through the losses nor the difference of the ends is a fall beyond noise and 8 %."""
    loss = curve.clean
    change, t = trend(loss)
    level = float(np.median(loss))
    ends = curve.spans(0.1, 5)
    start, end = float(np.mean(loss[:ends])), float(np.mean(loss[-ends:]))
    error = float(np.std(loss)) * np.sqrt(2.0 / ends)
    falls_by_line = change < -_FLAT_SHARE * level and t < -_SIGNIFICANT
    falls_by_ends = end < start - max(_FLAT_SHARE * level, _SIGNIFICANT * error)
    first = float(np.mean(loss[:3]))
    falls_at_once = first > level + max(0.15 * level, 5.0 * noise_of(loss))
    rises = change > 0.25 * level and t > _SIGNIFICANT
    return not (falls_by_line or falls_by_ends or falls_at_once or rises)


def tells_apart(curve: Curve) -> bool:
    """Whether chosen and rejected answers come apart over a run that learns from preferences, which has to be neither a
    fall of the loss by much nor a long way of the weights: its rates are a tenth of those that answers are learnt with, and
    what separates two answers is little of the whole. False for other runs.

    Steps of answers that are judged one by one often hold wanted ones alone or unwanted ones alone, and have no margin: with
    few margins the two rewards are followed each by itself.
    """
    if not curve.is_of_preferences:
        return False
    margin, wanted, unwanted = (
        rewards[np.isfinite(rewards)] for rewards in (curve.margin, curve.wanted, curve.unwanted)
    )
    if len(margin) >= _LEAST_STEPS:
        gained, t = trend(margin)
    elif min(len(wanted), len(unwanted)) >= _LEAST_STEPS // 2:
        gained, t = _gap(trend(wanted), trend(unwanted))
    else:
        return False
    return gained > _LEAST_MARGIN_GAINED and t > _SIGNIFICANT


def _gap(one: tuple[float, float], other: tuple[float, float]) -> tuple[float, float]:
    """By how much more one line rises than another one, and the t statistic of that; both as `trend` gives them."""
    first, second = (change / t if math.isfinite(t) and t else 0.0 for change, t in (one, other))
    gained, error = one[0] - other[0], math.hypot(first, second)
    if error:
        return gained, gained / error
    return gained, math.copysign(math.inf, gained) if gained else 0.0


def fallen_share(loss: FloatArray) -> float:
    """How far the last tenth lies below the first one, as a share of the first."""
    ends = max(len(loss) // 10, 5)
    start = float(np.mean(loss[:ends]))
    return (start - float(np.mean(loss[-ends:]))) / start if start > 0 else 0.0


def path_of(curve: Curve) -> float | None:
    """Sum of the update ratios over the whole run, the steps to come counted like those past; None where they are unknown."""
    known = curve.update_ratio[np.isfinite(curve.update_ratio)]
    if not len(known):
        return None
    total = max(curve.total_steps or curve.n, curve.n)
    return float(known.sum() + np.median(known[-20:]) * (total - curve.n))


def find_plateau(curve: Curve) -> Diagnosis | None:
    """A flat first quarter or more, then a fall by a third: normal where a skill is learned as a whole, or a long warm-up."""
    if curve.n < _LEAST_STEPS:
        return None
    loss = curve.clean
    level = running_median(loss, min(max(curve.n // 12, 5), 31) // 2 * 2 + 1)
    skip = curve.spans(0.04, 3)
    start = float(np.median(loss[skip : skip + curve.spans(0.1, 5)]))
    end = float(np.median(loss[-curve.spans(0.1, 5) :]))
    if end > 0.9 * start:
        return None
    limit = start - max(0.35 * (start - end), 0.05 * start, 2.0 * noise_of(loss))
    below = np.flatnonzero(level[skip:] < limit)
    length = int(below[0]) + skip if len(below) else curve.n
    if length < 0.25 * curve.n:
        return None
    return Diagnosis(
        "plateau_then_fall",
        "note",
        f"the loss stays near {start:.3g} until step {curve.step[min(length, curve.n - 1)]}, then falls to {end:.3g}",
        "nothing: do not stop a run in its plateau while gradients arrive. If the warm-up is the plateau, shorten "
        "train.warmup_share",
        {"plateau_loss": round(start, 4), "plateau_steps": length, "last_loss": round(end, 4)},
        (int(curve.step[min(length, curve.n - 1)]),),
    )


def _shown(values: FloatArray) -> float:
    known = values[np.isfinite(values)]
    return float(f"{float(np.median(known)):.3g}") if len(known) else 0.0
