"""A curve in one line of text."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import TextIO

_BARS = "▁▂▃▄▅▆▇█"
_GAP = "·"


def sparkline(values: Sequence[float | None], width: int = 16) -> str:
    """The values from first to last in at most `width` characters, the lowest as ▁ and the highest as █.

    Neighbours are averaged where there are more values than characters. What is missing or not finite is a dot; values
    that are all alike are drawn low.
    """
    known = [v if v is not None and math.isfinite(v) else None for v in values]
    n_bars = min(width, len(known))
    parts = [_mean(known[i * len(known) // n_bars : (i + 1) * len(known) // n_bars]) for i in range(n_bars)]
    heights = [part for part in parts if part is not None]
    if not heights:
        return _GAP * n_bars
    low, span = min(heights), max(heights) - min(heights)
    top = len(_BARS) - 1
    return "".join(
        _GAP if part is None else _BARS[round(top * (part - low) / span) if span > 0 else 0] for part in parts
    )


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def can_redraw(stream: TextIO) -> bool:
    """Whether lines that were printed can be drawn over: on a terminal that moves its cursor."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def can_draw(stream: TextIO) -> bool:
    """Whether a stream's encoding has the characters of a sparkline."""
    try:
        _BARS.encode(getattr(stream, "encoding", None) or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return False
    return True
