"""From telemetry events to the training plots: spikes survive thinning, and a value that was not finite stays a gap."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from markupsafe import Markup

from finetune.doctor.diagnosis import Diagnosis, Severity, diagnose
from finetune.report.numbers import finite, grouped, share, significant, whole
from finetune.report.read import Record, RunFiles, as_dict
from finetune.report.svg import Guide, Series, line_plot
from finetune.telemetry.divergence import rewind_sentence
from finetune.units import format_duration

SEVERITY_STYLES: dict[Severity, str] = {"fault": "bad", "warning": "unsure", "note": "good"}
_MARKS_A_FINDING = 20
_MOST_SOURCES = 8
_BUCKETS = 300  # at most two points each are drawn
_LOG_WHEN_RANGE_EXCEEDS = 30.0
_SAME = 1e-5  # the norm after clipping is rounded, and a limit of 1 has a millionth in it
Points = list[tuple[float, float | None]]


@dataclass(frozen=True, slots=True)
class Plot:
    """A figure of the page: `drawing` is None when nothing was recorded, and then `missing` says what."""

    key: str
    title: str
    unit: str
    drawing: Markup | None
    legend: tuple[tuple[str, str], ...]
    missing: str


@dataclass(frozen=True, slots=True)
class Curves:
    """The training section: plots, facts in words, remarks on the events themselves, what was diagnosed, and what the run did about
    a divergence by itself."""

    plots: tuple[Plot, ...]
    facts: tuple[tuple[str, str | None], ...]
    remarks: tuple[str, ...]
    n_steps: int
    findings: tuple[Diagnosis, ...] = ()
    rewinds: tuple[str, ...] = ()


def read_curves(run: RunFiles) -> Curves:
    """Every plot and fact of the training section from events.jsonl."""
    steps, validations = _by_step(run.events, "step"), _by_step(run.events, "validation")
    marks = [
        (float(step), f"resumed after step {step}")
        for event in _resumes(run.events)
        if (step := whole(event.get("step"))) is not None
    ]
    marks += [
        (float(step), f"rewound to step {step}")
        for event in run.events
        if event.get("event") == "rewind" and (step := whole(event.get("step"))) is not None
    ]
    findings = tuple(diagnose(run.events)) if steps else ()
    plots = (
        _loss_plot(steps, validations, marks, _marked(findings)),
        *_preference_plots(steps, marks),
        _gradient_plot(run, steps, marks),
        _plain_plot(
            "ratio",
            "Update / weight",
            "norms over the trained weights",
            "update_ratio",
            steps,
            marks,
            from_zero=True,
        ),
        _plain_plot("rate", "Learning rate", "", "learning_rate", steps, marks, from_zero=True),
        _plain_plot(
            "throughput", "Throughput", "tokens/s", "tokens_per_second", steps, marks, from_zero=True
        ),
    )
    rewinds = tuple(rewind_sentence(event) for event in run.events if event.get("event") == "rewind")
    facts, remarks = _facts(run, steps, validations), tuple(_remarks(run.events, steps))
    return Curves(plots, facts, remarks, len(steps), findings, rewinds)


def _marked(findings: Sequence[Diagnosis]) -> list[tuple[float, str, str]]:
    """Where the loss curve shows what was found: (step, name, style)."""
    return [
        (float(step), one.title, SEVERITY_STYLES[one.severity])
        for one in findings
        for step in one.steps[:_MARKS_A_FINDING]
    ]


def _by_step(events: Sequence[Record], kind: str) -> list[Record]:
    """Events of one kind in step order, one a step: the last writing of a step is the one that counts."""
    found = {
        step: event
        for event in events
        if event.get("event") == kind and (step := whole(event.get("step"))) is not None
    }
    return [found[step] for step in sorted(found)]


def _points(events: Sequence[Record], key: str) -> Points:
    return [(float(event["step"]), finite(event.get(key))) for event in events]


def thinned(points: Points, n_buckets: int = _BUCKETS) -> Points:
    """At most two points and one gap a bucket: the lowest and the highest, in order, so that no spike is lost."""
    if len(points) <= 2 * n_buckets:
        return points
    kept: Points = []
    for index in range(n_buckets):
        bucket = points[index * len(points) // n_buckets : (index + 1) * len(points) // n_buckets]
        known = [(y, x) for x, y in bucket if y is not None]
        extremes = {x: y for y, x in (min(known), max(known))} if known else {}
        gap = next((x for x, y in bucket if y is None), None)
        if gap is not None:
            extremes.setdefault(gap, None)  # type: ignore[arg-type]
        kept.extend(sorted(extremes.items()))
    return kept


def smoothed(events: Sequence[Record], window: int) -> Points:
    """Mean loss of the `window` steps around each step, weighted by their target tokens, so that short steps count for less."""
    weights = _target_tokens_of_each(events)
    losses = [finite(event.get("loss")) for event in events]
    result: Points = []
    for index, event in enumerate(events):
        half = window // 2
        reach = max(
            half // 2, min(half, index, len(events) - 1 - index)
        )  # shorter at the ends, which would lag
        near = slice(max(0, index - reach), index + reach + 1)
        pairs = [
            (loss, weight)
            for loss, weight in zip(losses[near], weights[near], strict=True)
            if loss is not None
        ]
        mean = None
        if losses[index] is not None:
            mean = sum(loss * weight for loss, weight in pairs) / sum(weight for _, weight in pairs)
        result.append((float(event["step"]), mean))
    return result


def _target_tokens_of_each(events: Sequence[Record]) -> list[float]:
    """Target tokens of every step from their running total; 1 for all when any total is missing or falls."""
    totals = [finite(event.get("target_tokens")) for event in events]
    known = [total for total in totals if total is not None]
    if len(known) != len(totals):
        return [1.0] * len(totals)
    steps = [later - earlier for earlier, later in pairwise([0.0, *known])]
    return steps if all(step > 0 for step in steps) else [1.0] * len(totals)


def _loss_plot(
    steps: list[Record],
    validations: list[Record],
    marks: list[tuple[float, str]],
    findings: list[tuple[float, str, str]],
) -> Plot:
    window = min(51, len(steps) // 15) // 2 * 2 + 1  # odd, so that it has a middle
    raw = _points(steps, "loss")
    train = [Series("train", "train" if window == 1 else "raw", thinned(raw))]
    legend = [("train" if window == 1 else "raw", "train, each step" if window > 1 else "train")]
    if window > 1:
        train.append(Series("mean", "train", thinned(smoothed(steps, window))))
        legend.append(("train", f"train, mean of {window} steps"))
    validation = Series("validation", "validation", thinned(_points(validations, "loss")), always_marks=True)
    pairs = any("reward_chosen" in step or "reward_rejected" in step for step in steps)
    if validation.known:
        legend.append(("validation", "validation" if pairs else "validation, token-weighted"))
    series = [*train, validation]
    label = _describe("Loss", [("training", raw), ("validation", _points(validations, "loss"))])
    drawing = line_plot(series, label=label, height=250, events=marks, findings=findings)
    unit = "mean over examples" if pairs else "mean over target tokens, nats"
    return Plot("loss", "Loss", unit, drawing, tuple(legend), "No step has a loss.")


def _preference_plots(steps: list[Record], marks: list[tuple[float, str]]) -> list[Plot]:
    """Rewards of both answers and how far the chosen one is ahead; none for a run that learns from no preferences.

    A rising margin with a falling chosen reward is likelihood displacement, which the margin alone would hide.
    """
    sides = [(name, _points(steps, f"reward_{name}")) for name in ("chosen", "rejected")]
    styles = {"chosen": "train", "rejected": "rejected"}
    if not any(value is not None for _, points in sides for _, value in points):
        return []
    drawing = line_plot(
        [Series(name, styles[name], thinned(points)) for name, points in sides],
        label=_describe("Rewards", sides),
        height=140,
        events=marks,
        from_zero=True,
    )
    legend = tuple((styles[name], name) for name, _ in sides)
    unit = "of both answers, mean of each step"
    return [
        Plot("rewards", "Rewards", unit, drawing, legend, "No step has a reward."),
        _plain_plot(
            "margin", "Margin", "chosen less rejected reward", "reward_margin", steps, marks, from_zero=True
        ),
    ]


def _plain_plot(
    key: str,
    title: str,
    unit: str,
    field: str,
    steps: list[Record],
    marks: list[tuple[float, str]],
    *,
    from_zero: bool = False,
) -> Plot:
    points = _points(steps, field)
    is_log = _spans_decades([y for _, y in points])
    drawing = line_plot(
        [Series(title.lower(), "train", thinned(points))],
        label=_describe(title, [("", points)]),
        height=140,
        events=marks,
        is_log=is_log,
        from_zero=from_zero,
    )
    unit = ", ".join(part for part in (unit, "log scale" if is_log else "") if part)
    return Plot(key, title, unit, drawing, (), f"No step has a {title.lower()}.")


def _gradient_plot(run: RunFiles, steps: list[Record], marks: list[tuple[float, str]]) -> Plot:
    """The gradient's norm before clipping, and after it where any step was clipped."""
    limit = finite(run.recipe_value("train.max_grad_norm"))
    title, guides = "Gradient norm", [Guide(limit, f"clipped at {limit:g}")] if limit else []
    before, after = _points(steps, "grad_norm"), _points(steps, "grad_norm_clipped")
    was_clipped = any(
        low is not None and high is not None and low < high * (1.0 - _SAME)
        for (_, high), (_, low) in zip(before, after, strict=True)
    )
    curves = [("before clipping", "raw", before), ("after clipping", "train", after)]
    if not was_clipped:
        curves = [("gradient norm", "train", before)]
    is_log = _spans_decades([y for _, _, points in curves for _, y in points])
    legend = [(style, name) for name, style, _ in curves] if was_clipped else []
    legend += [("guide", guide.label) for guide in guides]
    drawing = line_plot(
        [Series(name, style, thinned(points)) for name, style, points in curves],
        label=_describe(title, [(name if was_clipped else "", points) for name, _, points in curves]),
        height=140,
        events=marks,
        guides=guides,
        is_log=is_log,
        from_zero=True,
    )
    unit = ", ".join(["before clipping"] * (not was_clipped) + ["log scale"] * is_log)
    return Plot("gradient", title, unit, drawing, tuple(legend), "No step has a gradient norm.")


def _spans_decades(values: Sequence[float | None]) -> bool:
    """Whether a log axis shows them better: all positive, over more than a decade and a half."""
    known = [value for value in values if value is not None]
    return bool(known) and min(known) > 0 and max(known) / min(known) > _LOG_WHEN_RANGE_EXCEEDS


def _resumes(events: Sequence[Record]) -> list[Record]:
    """Resumes of a run that had ended; where it went back by itself after a divergence, it had not."""
    by_itself = {
        id(later)
        for before, later in pairwise(events)
        if before.get("event") == "rewind" and before.get("step") == later.get("step")
    }
    return [event for event in events if event.get("event") == "resume" and id(event) not in by_itself]


def _describe(title: str, curves: Sequence[tuple[str, Points]]) -> str:
    """The plot in words: first, last, lowest and highest value of each curve."""
    parts = []
    for name, points in curves:
        known = [y for _, y in points if y is not None]
        if known:
            first, last, low, high = (
                significant(value) for value in (known[0], known[-1], min(known), max(known))
            )
            parts.append(f"{name} from {first} to {last}, lowest {low}, highest {high}".strip())
    return f"{title}: {'; '.join(parts)}." if parts else f"{title}: nothing recorded."


def _median(events: Sequence[Record], key: str) -> float | None:
    known = [value for event in events if (value := finite(event.get(key))) is not None]
    return statistics.median(known) if known else None


def _last(events: Sequence[Record], key: str) -> float | None:
    return next((value for event in reversed(events) if (value := finite(event.get(key))) is not None), None)


def _facts(
    run: RunFiles, steps: list[Record], validations: list[Record]
) -> tuple[tuple[str, str | None], ...]:
    lowest = min(
        ((loss, event["step"]) for event in validations if (loss := finite(event.get("loss"))) is not None),
        default=None,
    )
    seconds = finite(as_dict(as_dict(run.manifest.get("stages")).get("train")).get("seconds"))
    since = " since the last resume" if _resumes(run.events) else ""
    rate = significant(_median(steps, "tokens_per_second"))
    wanted: list[tuple[str, str | None]] = [
        ("optimizer steps", grouped(steps[-1]["step"]) if steps else None),
        ("epochs", significant(_last(steps, "epoch"))),
        ("tokens seen", grouped(_last(steps, "tokens"))),
        ("target tokens", grouped(_last(steps, "target_tokens"))),
        ("last validation loss", significant(_last(validations, "loss"))),
        ("lowest validation loss", f"{significant(lowest[0])} at step {lowest[1]}" if lowest else None),
        *_losses_by_source(validations),
        ("median throughput", f"{rate} tokens/s" if rate else None),
        ("median share of peak", share(_median(steps, "mfu"))),
        ("training time", f"{format_duration(seconds)}{since}" if seconds is not None else None),
    ]
    return tuple(wanted)


def _losses_by_source(validations: list[Record]) -> list[tuple[str, str | None]]:
    """The last validation's loss of each source, where the rows come from several; of many, those with most targets."""
    sources = as_dict(validations[-1].get("sources")) if validations else {}
    largest = sorted(sources, key=lambda name: -(finite(as_dict(sources[name]).get("target_tokens")) or 0.0))
    return [
        (f"last validation loss, {name}", significant(finite(as_dict(sources[name]).get("loss"))))
        for name in largest[:_MOST_SOURCES]
    ]


def _remarks(events: Sequence[Record], steps: list[Record]) -> list[str]:
    remarks = []
    n_not_finite = sum(finite(event.get("loss")) is None for event in steps)
    if n_not_finite:
        remarks.append(
            f"No finite loss in {n_not_finite:,} of {len(steps):,} steps; the curve has gaps there."
        )
    n_resumes = len(_resumes(events))
    if n_resumes:
        times = "once" if n_resumes == 1 else f"{n_resumes} times"
        remarks.append(f"The run was resumed {times} (dotted lines).")
    if len(steps) > 2 * _BUCKETS:
        remarks.append(
            f"Curves are thinned from {len(steps):,} steps; lowest and highest of each stretch are kept."
        )
    return remarks
