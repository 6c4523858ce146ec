"""What the machine does to a run: overflowing fp16 gradients, and speed that leaks away."""

from __future__ import annotations

import numpy as np

from finetune.doctor.diagnosis.curve import Curve
from finetune.doctor.diagnosis.finding import Diagnosis

_SEARCH_STEPS = 7  # of a loss scale that starts at 65,536 and is halved: normal
_MOST_IN_A_ROW = 5
_MOST_SHARE = 0.08
_LEAST_STEPS = 40
_BINS = 8
_LEAST_DECLINE = 0.15
_LEAST_TAU = 0.7


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
    speed = speed[np.isfinite(speed)]
    if len(speed) < _LEAST_STEPS:
        return None
    medians = np.asarray([np.median(part) for part in np.array_split(speed, _BINS)])
    decline = 1.0 - float(medians[-2:].mean() / medians[:2].mean())
    signs = [np.sign(later - earlier) for i, earlier in enumerate(medians) for later in medians[i + 1 :]]
    tau = float(np.mean(signs))
    # Half of the decline must lie outside the largest single drop, or it is one event and not a leak.
    drops = -np.diff(medians)
    is_slow = (
        float(drops.max()) < 0.6 * float(medians[0] - medians[-1]) if medians[0] > medians[-1] else False
    )
    if decline < _LEAST_DECLINE or tau > -_LEAST_TAU or not is_slow:
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
