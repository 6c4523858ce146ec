"""What the machine does to a run: overflowing fp16 gradients, and speed that leaks away."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from finetune.doctor.diagnosis.curve import Curve, FloatArray, spread
from finetune.doctor.diagnosis.finding import Diagnosis

_SEARCH_STEPS = 7  # of a loss scale that starts at 65,536 and is halved: normal
_MOST_IN_A_ROW = 5
_MOST_SHARE = 0.08
_LEAST_STEPS = 40
_BLOCK_STEPS, _FEWEST_BLOCKS, _MOST_BLOCKS = 5, 8, 16
_LEAST_DECLINE = 0.15  # of the speed, from the first to the last block
_LEAST_DECLINE_BY_INTERVAL = 0.05
_NORMAL_99 = 2.576
_MOST_IN_ONE_STEP = 0.6
_TYPICAL_DEPARTURE, _LARGEST_DEPARTURE = 0.1, 0.35  # from the straight line, of the whole growth
_TYPICAL_ERRORS, _LARGEST_ERRORS = 1.0, 3.0  # or this many standard errors of a block's median
_ERROR_OF_MEDIAN = 1.2533  # standard errors of the mean of as many normal values
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
    """Tokens a second that fall steadily over the whole run.

    A `warning` where the time of a token grows along a straight line, as work does that every step adds to: by a robust slope
    whose 99 % interval excludes a level speed, in both halves of the run, and with small departures from the line. Where the
    slope is as clear and the rest is not, another job on the machine explains it as well, and it is a `note`.
    """
    speed = curve.speed[3:]
    speed = speed[np.isfinite(speed) & (speed > 0)]
    if len(speed) < _LEAST_STEPS:
        return None
    n_blocks = min(max(len(speed) // _BLOCK_STEPS, _FEWEST_BLOCKS), _MOST_BLOCKS)
    blocks = np.array_split(1.0 / speed, n_blocks)
    times = np.asarray([np.median(block) for block in blocks])
    line = fit_line(times)
    if line.first <= 0 or line.decline < _LEAST_DECLINE or line.least_decline < _LEAST_DECLINE_BY_INTERVAL:
        return None
    before, after = 1.0 / line.first, 1.0 / line.last
    is_leak = line.is_straight(_error_of_medians(blocks)) and _grows_throughout(times)
    growing = "kept losses or outputs with their graph, logs that are read again, caches, memory near its limit (memory_bytes)"
    return Diagnosis(
        "throughput_leak",
        "warning" if is_leak else "note",
        f"speed falls from about {before:,.0f} to {after:,.0f} tokens/s ({line.decline:.0%}), "
        + (
            "along a straight line over the whole run"
            if is_leak
            else "but not steadily: other jobs on this machine explain it as well as a leak does"
        ),
        f"look for what grows with every step: {growing}, a device that throttles from heat"
        if is_leak
        else "two causes cannot be told apart here: another job on the machine (look at its load, or train again on an idle one), or "
        f"something that grows with every step: {growing}. If it is there again on an idle machine, it is a leak",
        {
            "first_tokens_per_second": round(before, 1),
            "last_tokens_per_second": round(after, 1),
            "decline": round(line.decline, 3),
            "decline_at_least": round(line.least_decline, 3),
            "largest_departure_of_growth": round(line.largest_departure, 3),
        },
    )


@dataclass(frozen=True, slots=True)
class Line:
    """A straight line through the times of a token of B blocks: what it is at the `first` and `last` block, the share of the
    speed that is lost between them with the low end of its interval, and departures from the line as shares of its rise."""

    first: float
    last: float
    decline: float
    least_decline: float
    typical_departure: float
    largest_departure: float

    def is_straight(self, error: float) -> bool:
        """Whether departures are small beside the rise, or no larger than the standard `error` of a block explains."""
        errors = error / max(abs(self.last - self.first), 1e-300)
        return self.typical_departure <= max(
            _TYPICAL_DEPARTURE, _TYPICAL_ERRORS * errors
        ) and self.largest_departure <= max(_LARGEST_DEPARTURE, _LARGEST_ERRORS * errors)


def _error_of_medians(blocks: Sequence[FloatArray]) -> float:
    """The standard error of a block's median by the noise within blocks, which a trend or another job hardly touches."""
    within = spread(np.concatenate([block - np.median(block) for block in blocks]))
    return float(_ERROR_OF_MEDIAN * within / np.sqrt(np.mean([len(block) for block in blocks])))


def fit_line(times: FloatArray) -> Line:
    """The slope of Theil and Sen, the median of those between all pairs of blocks, with Sen's interval of 99 % from ranks.

    P. K. Sen 1968, Journal of the American Statistical Association 63:1379-1389. It takes a block's noise to be its own;
    jobs that come and go make that of neighbours alike, hence the demands on straightness beside it.
    """
    n = len(times)
    slopes = np.sort([(times[j] - times[i]) / (j - i) for i, j in combinations(range(n), 2)])
    slope = float(np.median(slopes))
    first = float(np.median(times - slope * np.arange(n)))
    spread_of_ranks = _NORMAL_99 * np.sqrt(n * (n - 1) * (2 * n + 5) / 18.0)
    lowest = float(slopes[max(int((len(slopes) - spread_of_ranks) / 2.0), 0)])
    rise = slope * (n - 1)
    departures = np.abs(times - first - slope * np.arange(n)) / max(abs(rise), 1e-300)
    return Line(
        first,
        first + rise,
        _decline(first, rise),
        _decline(first, lowest * (n - 1)),
        float(np.median(departures)),
        float(departures.max()),
    )


def _decline(first: float, rise: float) -> float:
    """The share of the speed that is lost when the time of a token rises from `first`."""
    return rise / (first + rise) if first > 0 and first + rise > 0 else 0.0


def _grows_throughout(times: FloatArray) -> bool:
    """Whether the time of a token grows in both halves of the run, and no single step of it makes most of the growth:
    otherwise it is one event, such as another job that began, and not a leak."""
    growth = float(times[-1] - times[0])
    middle_block = len(times) // 2
    first, middle, last = (
        float(part.mean()) for part in (times[:2], times[middle_block - 1 : middle_block + 1], times[-2:])
    )
    if growth <= 0 or last <= first:
        return False
    is_slow = float(np.diff(times).max()) < _MOST_IN_ONE_STEP * growth
    share = (middle - first) / (last - first)
    return is_slow and _LEAST_SHARE_OF_A_HALF <= share <= 1.0 - _LEAST_SHARE_OF_A_HALF
