"""Numbers as the page prints them. None means 'not recorded': nothing here turns a missing value into a zero."""

from __future__ import annotations

import math
from dataclasses import dataclass

from finetune.units import format_points

NBSP = "\u00a0"
_MINUS = "\u2212"
_OPEN_ENDED = ("loss", "nll", "perplexity", "kl", "bits", "chrf", "bleu", "seconds", "tokens")


def finite(value: object) -> float | None:
    """`value` as a float, or None when it is absent, not a number, a truth value, NaN or infinite."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def whole(value: object) -> int | None:
    """`value` as an int, or None when it is absent or not a finite number."""
    number = finite(value)
    return None if number is None else round(number)


def grouped(value: object) -> str | None:
    """12345 -> '12,345'."""
    number = whole(value)
    return None if number is None else minus(f"{number:,}")


def minus(text: str) -> str:
    """ASCII hyphens of a formatted number become minus signs, as wide as the plus sign."""
    return text.replace("-", _MINUS)


def significant(value: object, digits: int = 3) -> str | None:
    """A bare number with `digits` significant digits: 0.00021 -> '2.1e−4', 1234.5 -> '1,230'."""
    number = finite(value)
    if number is None:
        return None
    if number == 0:
        return "0"
    exponent = math.floor(math.log10(abs(number)))
    if exponent < -3 or exponent >= 9:
        mantissa, power = f"{number:.{digits - 1}e}".split("e")
        mantissa = mantissa.rstrip("0").rstrip(".") if "." in mantissa else mantissa
        return minus(f"{mantissa}e{int(power)}")
    if exponent >= digits - 1:
        return minus(f"{round(number, digits - 1 - exponent):,.0f}")
    return minus(f"{number:.{digits - 1 - exponent}f}")


def share(value: object, digits: int = 1) -> str | None:
    """0.734 -> '73.4 %'."""
    number = finite(value)
    return None if number is None else minus(f"{number * 100:.{digits}f}{NBSP}%")


def ratio(value: object) -> str | None:
    """0.31 -> '0.31×'."""
    number = finite(value)
    return None if number is None else f"{_ratio_digits(number)}×"


def ratio_range(low: object, high: object) -> str | None:
    """Two ends of a ratio: '0.29–0.33×'. Small ratios keep two digits that count."""
    ends = [finite(low), finite(high)]
    if ends[0] is None or ends[1] is None:
        return None
    return "–".join(_ratio_digits(end) for end in (ends[0], ends[1])) + "×"


def _ratio_digits(value: float) -> str:
    return f"{value:.2f}" if value >= 0.1 or value == 0 else f"{value:.2g}"


def p_value(value: object) -> str | None:
    """A p-value is never printed as zero: below 0.001 the bound is printed."""
    number = finite(value)
    if number is None:
        return None
    if number < 0.001:
        return f"p{NBSP}<{NBSP}0.001"
    return f"p{NBSP}={NBSP}{min(number, 1.0):.3f}"


def confidence_name(value: object) -> str:
    """0.95 -> '95 % interval'; unknown confidence -> 'interval'."""
    number = finite(value)
    return "interval" if number is None else f"{number * 100:g}{NBSP}% interval"


@dataclass(frozen=True, slots=True)
class Unit:
    """How one metric is printed: shares as percent and points, anything else as a bare number."""

    is_share: bool
    decimals: int | None = None  # of a bare number, the same for a value and the ends of its interval

    def value(self, number: object) -> str | None:
        if self.is_share:
            return share(number)
        known = finite(number)
        if known is None or self.decimals is None:
            return significant(known)
        text = f"{known:,.{self.decimals}f}"
        return minus(text.removeprefix("-") if not any(digit in text for digit in "123456789") else text)

    def difference(self, number: object) -> str | None:
        """Signed, with its unit: '+30.4 points' or '+0.021'."""
        known = finite(number)
        if known is None:
            return None
        if known == 0:
            return f"0.0{NBSP}points" if self.is_share else self.value(0.0)
        if self.is_share:
            return minus(format_points(known)).replace(" ", NBSP)
        text = self.value(known) or "0"
        return text if text.startswith(_MINUS) else f"+{text}"

    def bare_difference(self, number: object) -> str | None:
        """Signed, without the unit's word, for the ends of an interval."""
        text = self.difference(number)
        return None if text is None else text.removesuffix(f"{NBSP}points")

    def size(self, number: object) -> str | None:
        """Without sign, for a margin or 'rose by …'."""
        text = self.difference(None if finite(number) is None else abs(finite(number) or 0.0))
        return None if text is None else text.removeprefix("+")

    def interval(self, low: object, high: object) -> str | None:
        """Two ends of a difference: '+53.9 to +68.2'. None unless both are known."""
        ends = (self.bare_difference(low), self.bare_difference(high))
        return None if None in ends else f"{ends[0]} to {ends[1]}"

    def range(self, low: object, high: object) -> str | None:
        """Two ends of a level: '67.1–79.2 %' or '0.40–0.52'."""
        ends = (self.value(low), self.value(high))
        if ends[0] is None or ends[1] is None:
            return None
        return f"{ends[0].removesuffix(f'{NBSP}%') if self.is_share else ends[0]}–{ends[1]}"


def unit_of(metric: str, values: list[object]) -> Unit:
    """Shares lie in [-1, 1] and their metric has no open-ended name; everything else is printed bare."""
    known = [abs(number) for number in map(finite, values) if number is not None]
    named_open = any(word in _OPEN_ENDED for word in metric.lower().replace("-", "_").split("_"))
    if not named_open and all(number <= 1.0 for number in known):
        return Unit(is_share=True)
    largest = max(known, default=0.0)
    if not 1e-4 <= largest < 1e9:
        return Unit(is_share=False)
    return Unit(is_share=False, decimals=max(0, 2 - math.floor(math.log10(largest))))


def words(name: str) -> str:
    """'exact_match' -> 'exact match', for names that become prose."""
    return name.replace("_", " ").strip() or "unnamed"


def sentence_case(text: str) -> str:
    """The first letter large, every other as it is ('GB' stays 'GB')."""
    return text[:1].upper() + text[1:]


_ARMS = {
    "zero_shot": "base, zero-shot",
    "few_shot": "base, few-shot",
    "start": "start",
    "teacher": "teacher",
    "tuned": "tuned",
}
_ARMS_IN_PROSE = {
    "zero_shot": "the zero-shot base model",
    "few_shot": "the few-shot base model",
    "start": "the model it started from",
    "teacher": "the teacher",
    "tuned": "the tuned model",
}


def arm_name(arm: str) -> str:
    """An arm in a column header."""
    return _ARMS.get(arm, words(arm))


def arm_in_prose(arm: str) -> str:
    """An arm in a sentence."""
    return _ARMS_IN_PROSE.get(arm, f"the arm '{words(arm)}'")
