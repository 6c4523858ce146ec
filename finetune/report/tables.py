"""What every arm scored and what its answers cost: one table a suite each."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from finetune.report.numbers import (
    NBSP,
    arm_name,
    finite,
    grouped,
    ratio,
    significant,
    unit_of,
    whole,
    words,
)
from finetune.report.read import Arm, Record, RunFiles, as_dict, as_text
from finetune.units import format_duration


@dataclass(frozen=True, slots=True)
class Cell:
    """A value with what goes below it in smaller type; None prints as not recorded."""

    value: str | None
    below: str | None = None


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of cells under column names; the first column of `rows` is the row's header."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, tuple[Cell, ...]], ...]


def read_metrics(run: RunFiles) -> tuple[Table, ...]:
    """One table a suite: every metric of every arm, with its interval, n and method."""
    tables = []
    for suite in run.suites:
        arms = [arm for arm in run.arms_of(suite) if arm.summary]
        names = list(dict.fromkeys(name for arm in arms for name in as_dict(arm.summary.get("metrics"))))
        rows = tuple(_metric_row(arms, name) for name in names)
        if rows:
            tables.append(Table(suite, tuple(arm_name(arm.name) for arm in arms), rows))
    return tuple(tables)


def _metric_row(arms: Sequence[Arm], name: str) -> tuple[Cell, tuple[Cell, ...]]:
    """n and method stand once, below the metric's name, when every arm that has the metric has the same."""
    held = [arm.metric(name) for arm in arms]
    unit = unit_of(name, [one.get(key) for one in held for key in ("mean", "low", "high")])
    how = [_how(one) for one in held]
    shared = {text for one, text in zip(held, how, strict=True) if one}
    common = shared.pop() if len(shared) == 1 else ""
    cells = []
    for one, text in zip(held, how, strict=True):
        spread = unit.range(one.get("low"), one.get("high")) or ("no interval recorded" if one else "")
        below = ", ".join(part for part in (spread, "" if common else text) if part)
        cells.append(Cell(unit.value(one.get("mean")), below or None))
    return Cell(words(name), common or None), tuple(cells)


def _how(held: Record) -> str:
    n, method = grouped(held.get("n")), as_text(held.get("method"))
    return ", ".join(part for part in (f"n{NBSP}{n}" if n else None, method) if part)


@dataclass(frozen=True, slots=True)
class _Measure:
    """One row of the cost table: how to read it from an arm, and from one item when it can be paired."""

    name: str
    read: Callable[[Arm], str | None]
    item_key: str | None = None


def read_costs(run: RunFiles, against: str) -> tuple[Table, ...]:
    """One table a suite: tokens and seconds of every arm, and the tuned arm beside `against`, item by item."""
    tables = []
    for suite in run.suites:
        arms = run.arms_of(suite)
        baseline, tuned = run.arm(suite, against), run.arm(suite, "tuned")
        pair = (baseline, tuned) if baseline and tuned else None
        columns = [arm_name(arm.name) for arm in arms] + ([f"tuned / {arm_name(against)}"] if pair else [])
        rows = tuple(
            (
                Cell(measure.name),
                tuple(Cell(measure.read(arm)) for arm in arms) + ((_paired(measure, *pair),) if pair else ()),
            )
            for measure in _MEASURES
        )
        tables.append(Table(suite, tuple(columns), rows))
    return tuple(tables)


def _mean_of_items(arm: Arm, key: str) -> float | None:
    known = [number for item in arm.items.values() if (number := finite(item.get(key))) is not None]
    return statistics.fmean(known) if known else None


def _latency(arm: Arm, key: str) -> str | None:
    seconds = finite(as_dict(arm.summary.get("latency_seconds")).get(key))
    if seconds is None:
        return None
    return f"{significant(seconds * 1000)}{NBSP}ms" if seconds < 1 else f"{significant(seconds)}{NBSP}s"


def _tokens_per_second(arm: Arm) -> str | None:
    tokens, seconds = finite(arm.summary.get("output_tokens")), finite(arm.summary.get("seconds"))
    return significant(tokens / seconds) if tokens is not None and seconds else None


def _cut_answers(arm: Arm) -> str | None:
    reasons = as_dict(arm.summary.get("finish_reasons"))
    if not reasons:
        return None
    n_cut, n = whole(reasons.get("length")) or 0, sum(whole(count) or 0 for count in reasons.values())
    return f"{n_cut:,} of {n:,}"


def _seconds(arm: Arm) -> str | None:
    seconds = finite(arm.summary.get("seconds"))
    return None if seconds is None else format_duration(seconds)


_MEASURES = (
    _Measure(
        "prompt tokens a query",
        lambda arm: significant(_mean_of_items(arm, "prompt_tokens")),
        "prompt_tokens",
    ),
    _Measure(
        "output tokens a query",
        lambda arm: significant(_mean_of_items(arm, "output_tokens")),
        "output_tokens",
    ),
    _Measure("latency, median", lambda arm: _latency(arm, "p50"), "latency_seconds"),
    _Measure("latency, 95th percentile", lambda arm: _latency(arm, "p95")),
    _Measure("output tokens a second", _tokens_per_second),
    _Measure("answers cut at the length limit", _cut_answers),
    _Measure("time for the suite", _seconds),
)


def _paired(measure: _Measure, baseline: Arm, tuned: Arm) -> Cell:
    """Median over the items of tuned / baseline, and between which ratios the middle half of the items lies."""
    key = measure.item_key
    if key is None:
        return Cell("")
    ratios = []
    for name, item in tuned.items.items():
        after, before = finite(item.get(key)), finite(as_dict(baseline.items.get(name)).get(key))
        if after is not None and before:
            ratios.append(after / before)
    if not ratios:
        return Cell(None)
    if len(ratios) < 4:
        return Cell(ratio(statistics.median(ratios)), f"{len(ratios)} items")
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return Cell(ratio(middle), f"middle half {low:.2f}–{high:.2f}, n{NBSP}{len(ratios):,}")
