"""Axes of the plots: where a value lies between the ends, which ticks are round, and how they are written."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from finetune.report.numbers import minus


@dataclass(frozen=True, slots=True)
class Scale:
    """Maps data to 0..1, linearly or by the logarithm."""

    low: float
    high: float
    is_log: bool = False

    @classmethod
    def covering(
        cls, values: Sequence[float], *, is_log: bool = False, share_of_margin: float = 0.04
    ) -> Scale:
        """A scale around finite `values` with a little room on both sides; equal values get a span around them."""
        low, high = min(values), max(values)
        if low == 0.0 < high and not is_log:
            return cls(0.0, high * (1 + share_of_margin))
        if is_log:
            room = max((math.log10(high) - math.log10(low)) * share_of_margin, 0.02)
            return cls(low / 10**room, high * 10**room, is_log=True)
        room = (high - low) * share_of_margin or abs(low) * 0.1 or 1.0
        return cls(low - room, high + room)

    def position(self, value: float) -> float:
        if self.is_log:
            span = math.log(self.high / self.low)
            return math.log(value / self.low) / span
        return (value - self.low) / (self.high - self.low)

    def ticks(self, about: int = 4) -> list[float]:
        """Round values inside the scale: steps of 1, 2 or 5 times a power of ten; decades on a long log scale."""
        if self.is_log:
            return self._log_ticks(about)
        raw = (self.high - self.low) / max(about, 1)
        power = 10.0 ** math.floor(math.log10(raw))
        step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * 0.999)
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [index * step for index in range(first, last + 1)]

    def _log_ticks(self, about: int) -> list[float]:
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        for factors in ((1,), (1, 3), (1, 2, 5)):
            values = [factor * 10.0**power for power in range(first, last + 1) for factor in factors]
            inside = [value for value in values if self.low <= value <= self.high]
            if len(inside) >= min(about, 3):
                return inside
        linear = Scale(self.low, self.high).ticks(about)
        return [value for value in linear if value > 0]


def tick_labels(ticks: Sequence[float]) -> list[str]:
    """Labels with just enough digits to tell neighbouring ticks apart."""
    if not ticks:
        return []
    largest = max(abs(tick) for tick in ticks)
    if largest and (largest < 1e-2 or largest >= 1e6):
        power = math.floor(math.log10(largest))
        if min(abs(tick) for tick in ticks if tick) < 10.0 ** (power - 1):
            return [
                "0" if not tick else minus(f"{tick:.0e}").replace("e\u22120", "e\u2212") for tick in ticks
            ]
        return [minus(f"{tick / 10.0**power:g}e{power}") if tick else "0" for tick in ticks]
    for digits in range(7):
        labels = [f"{tick:,.{digits}f}" for tick in ticks]
        if all(
            math.isclose(float(label.replace(",", "")), tick, abs_tol=1e-12)
            for label, tick in zip(labels, ticks, strict=True)
        ):
            break
    return ["0" if not float(label.replace(",", "")) else minus(label) for label in labels]
