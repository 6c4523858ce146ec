"""The comparisons drawn: a forest plot on shared axes, and the two-by-two table of items."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from finetune.report.comparison import CELLS, Comparison
from finetune.report.numbers import share, whole
from finetune.report.scale import Scale, tick_labels
from finetune.report.svg import forest_axis, interval_mark

_POINTS = "percentage points"


@dataclass(frozen=True, slots=True)
class ForestRow:
    comparison: Comparison
    mark: Markup
    is_primary: bool


@dataclass(frozen=True, slots=True)
class ForestGroup:
    """Rows of one unit on one axis."""

    unit: str
    rows: tuple[ForestRow, ...]
    axis: Markup


@dataclass(frozen=True, slots=True)
class Forest:
    """A forest plot: all rows under one another, each unit on an axis of its own."""

    groups: tuple[ForestGroup, ...]
    has_margin: bool


@dataclass(frozen=True, slots=True)
class Forests:
    """What each suite says by the metric that decides it, and everything else that was compared."""

    suites: Forest | None
    others: Forest | None


@dataclass(frozen=True, slots=True)
class FourCells:
    """The two-by-two table of one comparison: counts and shares, and whether they add up to n."""

    comparison: Comparison
    counts: dict[str, str | None]
    shares: dict[str, str | None]
    disagreement: str | None


def read_forests(comparisons: Sequence[Comparison], primary: Comparison | None) -> Forests:
    """One plot of all suites, one row each, and one of the other metrics and baselines."""
    suites = [one for one in comparisons if one.decides_suite or one is primary]
    others = [one for one in comparisons if not (one.decides_suite or one is primary)]
    return Forests(_forest(suites, primary), _forest(others, primary))


def _forest(members: Sequence[Comparison], primary: Comparison | None) -> Forest | None:
    if not members:
        return None
    units: dict[str, list[Comparison]] = {}
    for one in members:
        units.setdefault(_POINTS if one.unit.is_share else one.metric, []).append(one)
    groups = tuple(_group(unit, rows, primary) for unit, rows in units.items())
    return Forest(groups, any(one.margin_at is not None for one in members))


def _group(unit: str, members: Sequence[Comparison], primary: Comparison | None) -> ForestGroup:
    values = [0.0]
    for one in members:
        ends = [one.number(key) for key in ("difference", "low", "high")]
        values += [number for number in (*ends, one.margin_at) if number is not None]
    scale = Scale.covering(values, share_of_margin=0.05)
    rows = tuple(ForestRow(one, _mark(scale, one), one is primary) for one in members)
    ticks = scale.ticks(5)
    times = 100.0 if members[0].unit.is_share else 1.0
    labels = [
        (tick, f"+{text}" if tick > 0 else text)
        for tick, text in zip(ticks, tick_labels([round(tick * times, 9) for tick in ticks]), strict=True)
    ]
    return ForestGroup(unit, rows, forest_axis(scale, labels))


def _mark(scale: Scale, one: Comparison) -> Markup:
    return interval_mark(
        scale,
        difference=one.number("difference"),
        low=one.number("low"),
        high=one.number("high"),
        margin=one.margin_at,
        style=one.judged.style,
        label=f"{one.difference or 'no difference recorded'}, {one.in_brackets()}",
    )


def four_cells(one: Comparison) -> FourCells | None:
    """The two-by-two table, or None when the comparison has no such counts (a metric that is not right or wrong)."""
    if not one.has_cells:
        return None
    counts = {name: whole(one.record.get(name)) for name in CELLS}
    n = whole(one.record.get("n"))
    shares = {name: share(count / n) if count is not None and n else None for name, count in counts.items()}
    known = [count for count in counts.values() if count is not None]
    disagreement = None
    if n is not None and len(known) == len(CELLS) and sum(known) != n:
        disagreement = f"The four counts add up to {sum(known):,}, not to the {n:,} items of the comparison."
    return FourCells(one, one.cells, shares, disagreement)
