"""A small SVG writer for the plots of the page: line plots, interval marks, bars.

Plots stretch to any width without scripts: text, grid and marks are placed in percent of the width and pixels of the
height; curves live in a nested view box that stretches while its strokes keep their width. Colours come from the
style sheet by class, so that a plot follows dark mode and print.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from finetune.report.scale import Scale, tick_labels

_CURVE_WIDTH = 1000  # units of the stretched view box
_PAD = 6  # pixels above and below the plotted range, so that strokes and marks are not cut
_X_AXIS_HEIGHT = 20
_MARKS_UP_TO = 40  # points that are drawn as marks as well as a line


def tag(name: str, content: Markup | str = "", /, **attributes: object) -> Markup:
    """One SVG element; content and attribute values are escaped, `class_` and `stroke_width` become `class` and
    `stroke-width`."""
    filled = Markup("").join(
        Markup(' {}="{}"').format(Markup(key.rstrip("_").replace("_", "-")), value)
        for key, value in attributes.items()
        if value is not None
    )
    return Markup("<{0}{1}>{2}</{0}>").format(Markup(name), filled, content)


def percent(position: float) -> str:
    """0.3333 -> '33.33%'."""
    return f"{position * 100:.2f}%"


@dataclass(frozen=True, slots=True)
class Series:
    """One curve. `points` are (x, y) with y None where nothing finite was recorded: the line has a gap there."""

    name: str
    style: str
    points: Sequence[tuple[float, float | None]]
    always_marks: bool = False

    @property
    def known(self) -> list[tuple[float, float]]:
        return [(x, y) for x, y in self.points if y is not None]


@dataclass(frozen=True, slots=True)
class Guide:
    """A level across the plot, e.g. the clipping threshold; its label shows under the pointer, for in the plot it would lie on
    the curve."""

    value: float
    label: str


def line_plot(
    series: Sequence[Series],
    *,
    label: str,
    height: int,
    x_name: str = "step",
    guides: Sequence[Guide] = (),
    events: Sequence[tuple[float, str]] = (),
    findings: Sequence[tuple[float, str, str]] = (),
    is_log: bool = False,
    from_zero: bool = False,
) -> Markup | None:
    """A stretching line plot, or None when no series has a finite point.

    `label` describes the plot for those who cannot see it; `events` are (x, name) marked by a dotted line,
    `findings` (x, name, style) the same with a dot on it.
    `is_log` asks for a log axis, which is taken only when every value is positive; `from_zero` keeps 0 on a linear one.
    """
    drawn = [one for one in series if one.known]
    if not drawn:
        return None
    xs = [x for one in drawn for x, _ in one.known]
    ys = [y for one in drawn for _, y in one.known]
    is_log = is_log and min(ys) > 0
    x_scale = Scale.covering(xs, share_of_margin=0.0) if max(xs) > min(xs) else Scale.covering(xs)
    levels = (
        ys
        + [0.0] * (from_zero and not is_log)
        + [guide.value for guide in guides if guide.value > 0 or not is_log]
    )
    y_scale = Scale.covering(levels, is_log=is_log)
    frame = _Frame(x_scale, y_scale, height)
    area = [frame.grid(), frame.events(events), frame.guides(guides), frame.curves(drawn), frame.marks(drawn)]
    area.append(frame.findings(findings))
    area.append(tag("g", tag("line", y1=0, y2=height), class_="cursor", visibility="hidden"))
    parts = [
        _svg(frame.y_labels(), "y-axis", width=None, height=height),
        _svg(Markup("").join(area), "area", width="100%", height=height),
        _svg(frame.x_labels(x_name), "x-axis", width="100%", height=_X_AXIS_HEIGHT),
    ]
    hover = frame.hover_data(drawn, x_name)
    body = Markup("").join(parts)
    return tag("div", body, class_="frame", role="img", aria_label=label, tabindex=0, data_plot=hover)


def _svg(content: Markup, style: str, *, width: str | None, height: int) -> Markup:
    return tag("svg", content, class_=style, width=width, height=height, aria_hidden="true")


@dataclass(frozen=True, slots=True)
class _Frame:
    """Placing data in one plot: x in percent of the width, y in pixels from the top."""

    x_scale: Scale
    y_scale: Scale
    height: int

    def y(self, value: float) -> float:
        inner = self.height - 2 * _PAD
        return round(_PAD + (1 - self.y_scale.position(value)) * inner, 1)

    def x(self, value: float) -> str:
        return percent(self.x_scale.position(value))

    def _y_ticks(self) -> list[float]:
        return self.y_scale.ticks(5 if self.height > 180 else 3)

    def grid(self) -> Markup:
        lines = [tag("line", x1="0", x2="100%", y1=self.y(tick), y2=self.y(tick)) for tick in self._y_ticks()]
        return tag("g", Markup("").join(lines), class_="grid")

    def y_labels(self) -> Markup:
        ticks = self._y_ticks()
        return Markup("").join(
            tag("text", text, x="100%", y=self.y(tick), dy="0.32em")
            for tick, text in zip(ticks, tick_labels(ticks), strict=True)
        )

    def x_labels(self, x_name: str) -> Markup:
        ticks = [tick for tick in self.x_scale.ticks(5) if float(tick).is_integer()]
        pieces = []
        for tick, text in zip(ticks, tick_labels(ticks), strict=True):
            at = self.x_scale.position(tick)
            anchor = "start" if at < 0.03 else "end" if at > 0.97 else "middle"
            name = f"{x_name} {text}" if tick == ticks[0] else text
            anchor = "start" if tick == ticks[0] and at < 0.12 else anchor
            pieces.append(tag("text", name, x=percent(at), y=14, class_=f"at-{anchor}"))
        return Markup("").join(pieces)

    def events(self, events: Sequence[tuple[float, str]]) -> Markup:
        inside = [(x, name) for x, name in events if self.x_scale.low <= x <= self.x_scale.high]
        lines = [
            tag("line", tag("title", name), x1=self.x(x), x2=self.x(x), y1=0, y2=self.height)
            for x, name in inside
        ]
        return tag("g", Markup("").join(lines), class_="events")

    def findings(self, findings: Sequence[tuple[float, str, str]]) -> Markup:
        """A line with a dot at its head, whose name shows under the pointer; beyond the plotted range at its edge."""
        pieces = []
        for x, name, style in findings:
            at = percent(min(max(self.x_scale.position(x), 0.0), 1.0))
            pieces.append(tag("line", x1=at, x2=at, y1=5, y2=self.height, class_=style))
            pieces.append(tag("circle", tag("title", name), cx=at, cy=5, r=4, class_=style))
        return tag("g", Markup("").join(pieces), class_="findings")

    def guides(self, guides: Sequence[Guide]) -> Markup:
        pieces = []
        for guide in guides:
            if not self.y_scale.low <= guide.value <= self.y_scale.high:
                continue
            y = self.y(guide.value)
            pieces.append(tag("line", tag("title", guide.label), x1="0", x2="100%", y1=y, y2=y))
        return tag("g", Markup("").join(pieces), class_="guides")

    def curves(self, series: Sequence[Series]) -> Markup:
        paths = [tag("path", d=self._path(one), class_=f"curve {one.style}") for one in series]
        return tag(
            "svg",
            Markup("").join(paths),
            viewBox=f"0 0 {_CURVE_WIDTH} {self.height}",
            preserveAspectRatio="none",
            width="100%",
            height=self.height,
        )

    def _path(self, one: Series) -> str:
        commands: list[str] = []
        pen_is_down = False
        for x, y in one.points:
            if y is None:
                pen_is_down = False
                continue
            at = f"{self.x_scale.position(x) * _CURVE_WIDTH:.1f} {self.y(y):g}"
            commands.append(f"{'L' if pen_is_down else 'M'}{at}")
            pen_is_down = True
        return "".join(commands)

    def marks(self, series: Sequence[Series]) -> Markup:
        """Marks where points are few, and for single points between gaps, which a line cannot show."""
        pieces = []
        for one in series:
            all_marked = one.always_marks or len(one.known) <= _MARKS_UP_TO
            known = [y is not None for _, y in one.points]
            for index, (x, y) in enumerate(one.points):
                alone = not any(known[index - 1 : index] + known[index + 1 : index + 2])
                if y is not None and (all_marked or alone):
                    pieces.append(tag("circle", cx=self.x(x), cy=self.y(y), r=3, class_=f"mark {one.style}"))
        return Markup("").join(pieces)

    def hover_data(self, series: Sequence[Series], x_name: str) -> str:
        """What the script needs to follow the pointer; finite numbers and our own names only."""
        return json.dumps(
            {
                "x": [self.x_scale.low, self.x_scale.high],
                "name": x_name,
                "series": [
                    {
                        "name": one.name,
                        "style": one.style,
                        "at": [
                            [x, float(f"{y:.4g}"), round(self.x_scale.position(x) * 100, 2), self.y(y)]
                            for x, y in one.known
                        ],
                    }
                    for one in series
                ],
            },
            allow_nan=False,
            separators=(",", ":"),
        )


def interval_mark(
    scale: Scale,
    *,
    difference: float | None,
    low: float | None,
    high: float | None,
    margin: float | None,
    style: str,
    label: str,
) -> Markup:
    """One row of a forest plot: zero line, margin, whisker, and the difference as a mark; 30 px high, any width.

    margin: where a loss of the margin lies on the axis.
    """
    height, middle = 30, 15
    pieces = [_vertical(scale, 0.0, height, "zero")]
    if margin is not None:
        pieces.append(_vertical(scale, margin, height, "margin"))
    if low is not None and high is not None:
        ends = (percent(scale.position(low)), percent(scale.position(high)))
        pieces.append(tag("line", x1=ends[0], x2=ends[1], y1=middle, y2=middle, class_="whisker"))
        pieces.extend(
            tag("line", x1=end, x2=end, y1=middle - 4, y2=middle + 4, class_="whisker") for end in ends
        )
    if difference is not None:
        pieces.append(
            tag("circle", cx=percent(scale.position(difference)), cy=middle, r=4.5, class_="estimate")
        )
    body = Markup("").join(pieces)
    return tag(
        "svg", body, class_=f"forest {style}", width="100%", height=height, role="img", aria_label=label
    )


def _vertical(scale: Scale, value: float, height: int, style: str) -> Markup:
    at = percent(scale.position(value))
    return tag("line", x1=at, x2=at, y1=0, y2=height, class_=style)


def forest_axis(scale: Scale, labels: Sequence[tuple[float, str]]) -> Markup:
    """The axis below the rows of a forest plot: ticks with labels, (value, text) each."""
    pieces = []
    for value, text in labels:
        at = scale.position(value)
        anchor = "start" if at < 0.06 else "end" if at > 0.94 else "middle"
        pieces.append(tag("line", x1=percent(at), x2=percent(at), y1=0, y2=5))
        pieces.append(tag("text", text, x=percent(at), y=18, class_=f"at-{anchor}"))
    return tag(
        "svg", Markup("").join(pieces), class_="forest-axis", width="100%", height=24, aria_hidden="true"
    )


def bar(start: float, length: float, style: str) -> Markup:
    """A bar from `start` over `length`, both shares of the full width; 14 px high."""
    box = tag("rect", x=percent(start), width=percent(max(length, 0.002)), y=0, height=14, class_=style)
    return tag("svg", box, class_="bar", width="100%", height=14, aria_hidden="true")
