"""The page says what the curve means, marks where, and tells every rewind."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from finetune.report import write_report
from finetune.report.svg import Series, line_plot
from finetune.telemetry.events import EventLog


@pytest.fixture
def write_curve(run_folder: Path) -> Any:
    """Replaces the events of a run: write_curve(loss, **fields of the steps)."""

    def write(loss: Any, **fields: Any) -> EventLog:
        path = run_folder / "events.jsonl"
        path.unlink()
        log = EventLog(path)
        for step in range(1, 101):
            told = {name: value(step) for name, value in fields.items()}
            log.write(
                "step",
                step=step,
                loss=loss(step),
                grad_norm=1.0,
                update_ratio=1e-3,
                learning_rate=1e-3,
                **told,
            )
        return log

    return write


def falling(step: int) -> float:
    return 0.4 + 2.5 * math.exp(-step / 30) + 0.01 * (step % 5)


def test_spikes_are_named_and_marked_with_their_rows(run_folder: Path, write_curve: Any) -> None:
    bad = (40, 70)
    write_curve(
        lambda step: falling(step) + 2.0 * (step in bad),
        worst_row=lambda step: "row <b>13</b>" if step in bad else f"row-{step}",
        worst_row_loss=lambda step: 9.0 if step in bad else 3.0,
    )
    page = write_report(run_folder).read_text()
    assert "Spikes that come back with the same rows" in page
    assert "Rows: row &lt;b&gt;13&lt;/b&gt;." in page
    assert page.count("<title>spikes that come back with the same rows</title>") == 2


def test_a_healthy_run_says_so_without_a_mark(run_folder: Path, write_curve: Any) -> None:
    write_curve(falling)
    page = write_report(run_folder).read_text()
    assert "without spikes, rises or stalls" in page
    assert '<g class="findings"></g>' in page


def test_every_rewind_is_told(run_folder: Path, write_curve: Any) -> None:
    log = write_curve(falling)
    act = {
        "from_step": 60,
        "onset": 51,
        "reason": "diverged",
        "remedy": "halve_rate",
        "rate_factor": 0.5,
        "rows": [],
    }
    log.write("rewind", step=50, attempt=1, **act)
    page = write_report(run_folder).read_text()
    assert "After divergence at step 51 the run went back to step 50 and on with 0.5 of the rate." in page
    assert "<title>rewound to step 50</title>" in page


def test_a_finding_beyond_the_plot_stands_at_its_edge() -> None:
    drawing = line_plot(
        [Series("a", "train", [(1.0, 1.0), (5.0, 2.0)])], label="a", height=100, findings=[(9.0, "stopped")]
    )
    assert drawing is not None
    assert '<circle cx="100.00%" cy="5" r="4"><title>stopped</title></circle>' in drawing
