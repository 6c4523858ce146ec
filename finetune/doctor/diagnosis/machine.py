"""What the machine does to a run: overflowing fp16 gradients, and speed that leaks away."""

from __future__ import annotations

import numpy as np

from finetune.doctor.diagnosis.curve import Curve, FloatArray
from finetune.doctor.diagnosis.finding import Diagnosis

_SEARCH_STEPS = 7  # of a loss scale that starts at 65,536 and is halved: normal
_MOST_IN_A_ROW = 5
_MOST_SHARE = 0.08
_LEAST_STEPS = 40
_BINS = 8
_LEAST_DECLINE = 0.15
_LEAST_TAU = 0.7
_MOST_IN_ONE_STEP = 0.6
_LEAST_SHARE_OF_A_HALF = (
    0.2  # of the growth of a step's time: what grows with every step grows in both halves
)


def find_overflow(curve: Curve) -> Diagnosis | None:
    """Steps that fp16's loss scale had to throw away, beyond its search at the start and one now and then."""
    if not curve.has_loss_scale or curve.n < 10:
        return None
    overflow = curve.is_overflow
    leading = int(np.argmin(overflow)) if not overflow.all() else curve.n
    rest = overflow[leading:]
    longest = max((len(part) for part in "".join("x" if o else " " for o in rest).split()), default=0)
    scale = curve.loss_scale[np.isfinite(curve.loss_scale)]
    too_many = len(rest) > 0 and rest.sum() > max(_MOST_SHARE * len(rest), 3)
    if leading <= _SEARCH_STEPS and longest <= _MOST_IN_A_ROW and not too_many:
        return None
    places = np.flatnonzero(overflow)
    return Diagnosis(
        "fp16_overflow",
        "fault",
        f"{len(places)} of {curve.n} steps overflowed fp16 and trained nothing; the loss scale fell to {scale.min():.3g}",
        "use model.dtype: bf16, which has the range of fp32; else lower the rate, and look for a loss that is a sum instead of a "
        "mean or for activations that grow",
        {
            "steps_lost": len(places),
            "longest_in_a_row": max(longest, leading),
            "lowest_loss_scale": float(scale.min()),
        },
        tuple(int(curve.step[index]) for index in places[:50]),
    )


def find_leak(curve: Curve) -> Diagnosis | None:
    """Tokens a second that fall slowly and steadily over the whole run: not one slow stretch, which another job explains."""
    speed = curve.speed[3:]
    speed = speed[np.isfinite(speed) & (speed > 0)]
    if len(speed) < _LEAST_STEPS:
        return None
    medians = np.asarray([np.median(part) for part in np.array_split(speed, _BINS)])
    decline = 1.0 - float(medians[-2:].mean() / medians[:2].mean())
    signs = [np.sign(later - earlier) for i, earlier in enumerate(medians) for later in medians[i + 1 :]]
    tau = float(np.mean(signs))
    if decline < _LEAST_DECLINE or tau > -_LEAST_TAU or not _grows_throughout(medians):
        return None
    return Diagnosis(
        "throughput_leak",
        "warning",
        f"speed falls steadily from {medians[0]:,.0f} to {medians[-1]:,.0f} tokens/s ({decline:.0%})",
        "look for what grows with every step: kept losses or outputs with their graph, logs that are read again, caches, memory "
        "near its limit (memory_bytes), a device that throttles from heat",
        {
            "first_tokens_per_second": round(float(medians[0]), 1),
            "last_tokens_per_second": round(float(medians[-1]), 1),
        }
        | {"decline": round(decline, 3)},
    )


def _grows_throughout(speeds: FloatArray) -> bool:
    """Whether the time of a token grows in both halves of the run, and no single step of it makes most of the growth:
    otherwise it is one event, such as another job that began, and not a leak."""
    times = 1.0 / speeds
    growth = float(times[-1] - times[0])
    first, middle, last = (
        float(part.mean()) for part in (times[:2], times[_BINS // 2 - 1 : _BINS // 2 + 1], times[-2:])
    )
    if growth <= 0 or last <= first:
        return False
    is_slow = float(np.diff(times).max()) < _MOST_IN_ONE_STEP * growth
    share = (middle - first) / (last - first)
    return is_slow and _LEAST_SHARE_OF_A_HALF <= share <= 1.0 - _LEAST_SHARE_OF_A_HALF
