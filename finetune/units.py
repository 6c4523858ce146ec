"""Formatting of quantities for people. Sizes are decimal (GB = 1e9 bytes), as memory vendors and papers use them."""

from __future__ import annotations

import re

from finetune.errors import UserError

_SIZE_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_SIZE_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*")


def format_bytes(n_bytes: float) -> str:
    """1_234_000_000 -> '1.23 GB'."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(n_bytes) >= scale:
            return f"{n_bytes / scale:.3g} {unit}"
    return f"{n_bytes:.0f} B"


def parse_bytes(text: str, *, where: str = "") -> int:
    """'24GB' -> 24_000_000_000; GiB and friends are binary. A bare number is bytes. Raises UserError, at `where`."""
    match = _SIZE.fullmatch(text)
    if match is None or match[2].lower() not in _SIZE_UNITS:
        raise UserError(f"'{text}' is not a size", where=where, fix="write it like 24GB, 500MB or 16GiB")
    return int(float(match[1]) * _SIZE_UNITS[match[2].lower()])


def format_duration(seconds: float) -> str:
    """75 -> '1 min 15 s'."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    hours, rest = divmod(whole, 3600)
    minutes, secs = divmod(rest, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {secs} s" if minutes else f"{secs} s"


def format_count(n: int) -> str:
    """134_515_008 -> '134.5M'."""
    for suffix, scale in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if abs(n) >= scale:
            return f"{n / scale:.1f}{suffix}"
    return str(n)


def format_amount(amount: float) -> str:
    """One decimal, of small amounts as many as three digits need: 1234.56 -> '1,234.6', 0.0417 -> '0.0417'."""
    return f"{amount:,.1f}" if amount == 0 or abs(amount) >= 10 else f"{amount:.3g}"


def format_points(share: float) -> str:
    """A difference of shares as signed percentage points: 0.304 -> '+30.4 points'."""
    return f"{points(share)} points"


def points(share: float) -> str:
    """The same without its unit, for the ends of an interval: 0.304 -> '+30.4'; what rounds to nothing is '+0.0'."""
    return f"{round(share * 100, 1) + 0.0:+.1f}"
