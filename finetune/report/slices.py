"""The deciding metric of a suite in each of its declared slices: the largest losses first, with the declared correction."""

from __future__ import annotations

from dataclasses import dataclass

from markupsafe import Markup

from finetune.report.comparison import Judgement
from finetune.report.numbers import finite, grouped, p_value, unit_of, words
from finetune.report.read import Record, RunFiles, as_dict, as_list, as_text
from finetune.report.scale import Scale, tick_labels
from finetune.report.svg import forest_axis, interval_mark

SHOWN = 12
_CORRECTIONS = {"holm": "Holm", "bh": "Benjamini-Hochberg"}
_BETTER, _WORSE = Judgement("Better", "good", "up"), Judgement("Worse", "bad", "down")
_UNSHOWN = Judgement("Not shown", "neutral", "equal")
_EMPTY = Judgement("No items", "neutral", "pause")


@dataclass(frozen=True, slots=True)
class SliceRow:
    by: str
    value: str
    mark: Markup
    difference: str | None
    interval: str | None
    n: str | None
    cells: str | None
    p_value: str | None
    judged: Judgement


@dataclass(frozen=True, slots=True)
class SliceTable:
    """The slices of one suite: the worst, and the rest that is folded away."""

    suite: str
    metric: str
    correction: str
    worst: tuple[SliceRow, ...]
    rest: tuple[SliceRow, ...]
    axis: Markup


def read_slices(run: RunFiles) -> tuple[SliceTable, ...]:
    """One table a suite, in the order in which the comparison lists them."""
    tables: dict[str, list[Record]] = {}
    comparisons = (run.comparison, *(one.record for one in reversed(run.later) if one.against_base))
    for comparison in comparisons:
        own: dict[str, list[Record]] = {}
        for record in map(as_dict, as_list(comparison.get("slices"))):
            if (suite := as_text(record.get("suite"))) is not None:
                own.setdefault(suite, []).append(record)
        for suite, records in own.items():
            tables.setdefault(suite, records)
    return tuple(_table(run, suite, records) for suite, records in tables.items())


def _table(run: RunFiles, suite: str, records: list[Record]) -> SliceTable:
    metric = as_text(records[0].get("metric")) or run.primary_metric(suite) or ""
    numbers = [record.get(key) for record in records for key in ("difference", "low", "high")]
    unit = unit_of(metric, numbers)
    known = [number for number in map(finite, numbers) if number is not None]
    scale = Scale.covering([0.0, *known], share_of_margin=0.05)
    lower = any(
        one.get("higher_is_better") is False
        for one in map(as_dict, as_list(run.comparison.get("comparisons")))
        if (one.get("suite"), one.get("metric")) == (suite, metric)
    )
    rows = []
    for record in records:
        judged = _judged(record, lower=lower)
        difference = unit.difference(record.get("difference"))
        interval = unit.interval(record.get("low"), record.get("high"))
        fixed, broken = grouped(record.get("fixed")), grouped(record.get("broken"))
        mark = interval_mark(
            scale,
            difference=finite(record.get("difference")),
            low=finite(record.get("low")),
            high=finite(record.get("high")),
            margin=None,
            style=judged.style,
            label=f"{difference or 'no difference'}, interval {interval or 'not recorded'}",
        )
        rows.append(
            SliceRow(
                by=words(as_text(record.get("by")) or ""),
                value=str(record.get("value")),
                mark=mark,
                difference=difference,
                interval=interval,
                n=grouped(record.get("n")),
                cells=f"{fixed} fixed, {broken} broken" if fixed is not None and broken is not None else None,
                p_value=p_value(record.get("p_adjusted")),
                judged=judged,
            )
        )
    times = 100.0 if unit.is_share else 1.0
    ticks = scale.ticks(4)
    labels = tick_labels([round(tick * times, 9) for tick in ticks])
    axis = forest_axis(
        scale, [(tick, f"+{text}" if tick > 0 else text) for tick, text in zip(ticks, labels, strict=True)]
    )
    correction = as_text(records[0].get("correction")) or ""
    return SliceTable(
        suite,
        words(metric),
        _CORRECTIONS.get(correction, correction or "no"),
        tuple(rows[:SHOWN]),
        tuple(rows[SHOWN:]),
        axis,
    )


def _judged(record: Record, *, lower: bool) -> Judgement:
    """Better or worse only where the corrected p-value says so."""
    difference = finite(record.get("difference"))
    if not finite(record.get("n")) or difference is None:
        return _EMPTY
    if not record.get("different"):
        return _UNSHOWN
    return _BETTER if (difference < 0) == lower else _WORSE
