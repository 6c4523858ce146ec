"""Scales, ticks and curves."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

from finetune.report.curves import read_curves, smoothed, thinned
from finetune.report.read import read_run
from finetune.report.scale import Scale, tick_labels
from finetune.report.svg import Series, interval_mark, line_plot


@pytest.mark.parametrize(
    ("low", "high"), [(0.0, 1.0), (-0.02, 0.8), (1e-7, 3e-7), (0.0, 5e-4), (12, 123456), (-5, -4.9), (3, 3)]
)
def test_ticks_are_round_inside_the_scale_and_told_apart(low: float, high: float) -> None:
    scale = Scale.covering([low, high])
    ticks = scale.ticks()
    assert 2 <= len(ticks) <= 8
    assert all(scale.low <= tick <= scale.high for tick in ticks)
    labels = tick_labels(ticks)
    assert len(set(labels)) == len(ticks)
    for label, tick in zip(labels, ticks, strict=True):
        assert float(label.replace("\u2212", "-").replace(",", "")) == pytest.approx(tick, abs=1e-12)


def test_a_log_scale_has_ticks_and_keeps_order() -> None:
    for low, high in ((1e-5, 1e-1), (0.9, 40), (2.0, 3.0)):
        scale = Scale.covering([low, high], is_log=True)
        assert len(scale.ticks()) >= 2
        assert 0 < scale.position(low) < scale.position(high) < 1
        assert len(set(tick_labels(scale.ticks()))) == len(scale.ticks())


def test_position_is_linear() -> None:
    scale = Scale(0.0, 4.0)
    assert [scale.position(value) for value in (0.0, 1.0, 4.0)] == [0.0, 0.25, 1.0]


def test_thinning_keeps_spikes_gaps_and_order() -> None:
    points: list[tuple[float, float | None]] = [(float(step), 1.0) for step in range(10_000)]
    points[7_777] = (7_777.0, 99.0)
    points[1_234] = (1_234.0, -5.0)
    points[5_000] = (5_000.0, None)
    thin = thinned(points)
    assert len(thin) <= 3 * 300
    assert (7_777.0, 99.0) in thin and (1_234.0, -5.0) in thin and (5_000.0, None) in thin
    assert [x for x, _ in thin] == sorted(x for x, _ in thin)
    assert thinned(points[:500]) == points[:500]


def test_smoothing_weights_by_target_tokens_and_does_not_bridge_missing_losses() -> None:
    events = [
        {"step": 1, "loss": 1.0, "target_tokens": 100},
        {"step": 2, "loss": 4.0, "target_tokens": 400},
        {"step": 3, "loss": "nan", "target_tokens": 500},
    ]
    (_, first), (_, second), (_, third) = smoothed(events, 5)
    weighted = (1.0 * 100 + 4.0 * 300) / 400
    assert first == pytest.approx(weighted) and second == pytest.approx(weighted)
    assert third is None


def test_a_line_has_a_gap_where_nothing_finite_was_recorded() -> None:
    points = [(1.0, 1.0), (2.0, None), (3.0, 2.0), (4.0, 3.0)]
    drawn = str(line_plot([Series("loss", "train", points)], label="loss", height=100))
    path = re.search(r' d="([^"]+)"', drawn)
    assert path is not None and path[1].count("M") == 2 and path[1].count("L") == 1
    ElementTree.fromstring(drawn)  # well-formed


def test_a_plot_of_nothing_is_no_plot() -> None:
    assert line_plot([Series("loss", "train", [(1.0, None)])], label="", height=100) is None
    assert line_plot([], label="", height=100) is None


def test_one_step_is_drawn_as_a_mark() -> None:
    drawn = str(line_plot([Series("loss", "train", [(1.0, 0.5)])], label="loss", height=100))
    assert drawn.count("<circle") == 1
    assert "nan" not in drawn.lower()


def test_text_in_a_plot_is_escaped() -> None:
    drawn = str(line_plot([Series('"<b>', "train", [(1.0, 2.0)])], label='"<script>', height=100))
    assert "<b>" not in drawn and "<script>" not in drawn
    frame = ElementTree.fromstring(drawn)
    assert json.loads(frame.attrib["data-plot"])["series"][0]["name"] == '"<b>'


def test_an_interval_mark_without_interval_has_no_whisker() -> None:
    scale = Scale(-1.0, 1.0)
    mark = interval_mark(scale, difference=0.1, low=None, high=0.2, margin=None, style="good", label="x")
    assert "whisker" not in mark and "estimate" in mark and "margin" not in mark


def test_curves_of_a_run(run_folder: Path) -> None:
    curves = read_curves(read_run(run_folder))
    assert [plot.key for plot in curves.plots] == ["loss", "gradient", "ratio", "rate", "throughput"]
    assert all(plot.drawing for plot in curves.plots)
    facts = dict(curves.facts)
    assert facts["optimizer steps"] == "150"
    assert facts["target tokens"] == "46,500"
    assert facts["training time"] == "6 min 43 s since the last resume"
    assert "No finite loss in 1 of 150 steps; the curve has gaps there." in curves.remarks
    assert "The run was resumed once (dotted lines)." in curves.remarks


def test_steps_replayed_after_a_resume_count_once(factory: ModuleType, tmp_path: Path) -> None:
    lost = [{"event": "step", "step": step, "loss": 9.0} for step in range(1, 8)]
    again = [{"event": "step", "step": step, "loss": 1.0} for step in range(6, 9)]
    rows = [*lost, {"event": "resume", "step": 5}, *again]
    factory.rewrite_lines(tmp_path / "events.jsonl", rows)
    curves = read_curves(read_run(tmp_path))
    assert curves.n_steps == 8
    loss = json.loads(
        re.search(r'data-plot="([^"]+)"', str(curves.plots[0].drawing))[1].replace("&#34;", '"')
    )
    assert [point[1] for point in loss["series"][0]["at"]] == [9.0] * 5 + [1.0] * 3


def test_a_wide_range_of_gradients_gets_a_log_axis(factory: ModuleType, tmp_path: Path) -> None:
    rows = [{"event": "step", "step": step, "grad_norm": math.exp(step)} for step in range(1, 9)]
    factory.rewrite_lines(tmp_path / "events.jsonl", rows)
    gradient = read_curves(read_run(tmp_path)).plots[1]
    assert gradient.unit.endswith("log scale")
