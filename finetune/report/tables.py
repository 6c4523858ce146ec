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
    ratio_range,
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
    remark: str | None = None


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
    """One row of the cost table: how to read it from an arm, the name of its paired ratio, and, where no ratio is
    recorded, the key of an item that gives one."""

    name: str
    read: Callable[[Arm], str | None]
    ratio: str | None = None
    item_key: str | None = None


def read_costs(run: RunFiles, declared: str) -> tuple[Table, ...]:
    """One table a suite: tokens, seconds and price of every arm, and the tuned arm beside its baseline as paired ratios."""
    tables = []
    for suite in run.suites:
        against = as_text(as_dict(run.suite_records.get(suite)).get("against")) or declared
        arms = run.arms_of(suite)
        baseline, tuned = run.arm(suite, against), run.arm(suite, "tuned")
        pair = (baseline, tuned) if baseline and tuned else None
        cost = run.cost(suite) if pair else {}
        columns = [arm_name(arm.name) for arm in arms] + ([f"tuned / {arm_name(against)}"] if pair else [])
        rows = [
            (
                Cell(measure.name),
                tuple(Cell(measure.read(arm)) for arm in arms)
                + ((_paired(measure, cost, *pair),) if pair else ()),
            )
            for measure in _MEASURES
        ]
        rows += _price_row(cost, arms, against)
        remark = None if run.guards(suite) else _break_even(cost)
        tables.append(Table(suite, tuple(columns), tuple(rows), remark))
    return tuple(tables)


def _price_row(cost: Record, arms: Sequence[Arm], against: str) -> list[tuple[Cell, tuple[Cell, ...]]]:
    """The price of a query in both compared arms; no row without prices."""
    prices = {
        against: finite(as_dict(cost.get("baseline")).get("price_per_query")),
        "tuned": finite(as_dict(cost.get("arm")).get("price_per_query")),
    }
    if None in prices.values():
        return []
    cells = [Cell(significant(prices[arm.name]) if arm.name in prices else "") for arm in arms]
    return [(Cell("price of a query"), (*cells, _recorded_ratio(cost, "price") or Cell(None)))]


def _break_even(cost: Record) -> str | None:
    even = as_dict(cost.get("break_even"))
    tuning, months = finite(even.get("tuning_cost")), finite(even.get("months"))
    if tuning is None or months is None:
        return None
    paid = f"{significant(tuning) or 0} for the tuning over {months:g} months"
    queries = finite(even.get("queries_per_month"))
    if queries is None:
        return f"The tuned model saves nothing on a query, so no volume pays for it ({paid})."
    return f"The tuned model is cheaper from {queries:,.0f} queries a month ({paid})."


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


def _own_speed(arm: Arm) -> str | None:
    """Median over the items of output tokens over latency."""
    pairs = [
        (finite(item.get("output_tokens")), finite(item.get("latency_seconds")))
        for item in arm.items.values()
    ]
    speeds = [tokens / seconds for tokens, seconds in pairs if tokens is not None and seconds]
    return significant(statistics.median(speeds)) if speeds else None


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
        "prompt_tokens",
    ),
    _Measure(
        "output tokens a query",
        lambda arm: significant(_mean_of_items(arm, "output_tokens")),
        "output_tokens",
        "output_tokens",
    ),
    _Measure("latency, median", lambda arm: _latency(arm, "p50"), "latency_seconds_p50", "latency_seconds"),
    _Measure("latency, 95th percentile", lambda arm: _latency(arm, "p95"), "latency_seconds_p95"),
    _Measure("output tokens a second, one query", _own_speed, "output_tokens_per_second"),
    _Measure("output tokens a second, all together", _tokens_per_second),
    _Measure("answers cut at the length limit", _cut_answers),
    _Measure("time for the suite", _seconds),
)


def _recorded_ratio(cost: Record, name: str | None) -> Cell | None:
    """A ratio of the comparison with its interval; None where it has none."""
    found = as_dict(as_dict(cost.get("ratios")).get(name or ""))
    if finite(found.get("ratio")) is None:
        return None
    ends = ratio_range(found.get("low"), found.get("high"))
    left_out = whole(found.get("left_out"))
    below = [ends or "no interval", f"{left_out:,} items left out" if left_out else ""]
    return Cell(ratio(found.get("ratio")), ", ".join(part for part in below if part))


def _paired(measure: _Measure, cost: Record, baseline: Arm, tuned: Arm) -> Cell:
    """Tuned / baseline over the same items: as the comparison recorded it, with interval; for runs without such a record
    the median of the items' ratios, and between which the middle half lies."""
    recorded = _recorded_ratio(cost, measure.ratio)
    if recorded is not None:
        return recorded
    key = measure.item_key
    if key is None or cost:
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
