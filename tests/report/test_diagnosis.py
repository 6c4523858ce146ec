"""The page says what the curve means, marks where, and tells every rewind."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from finetune.report import write_report
from finetune.report.curves import read_curves
from finetune.report.read import read_run
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
            told = {"grad_norm": 1.0, "update_ratio": 1e-3, "learning_rate": 1e-3} | told
            log.write("step", step=step, loss=loss(step), **told)
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
    assert "no spike, rise or stall stands out" in page
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
    assert "<title>rewound to step 50</title>" in page and "Rewound</span>" in page


def test_a_finding_beyond_the_plot_stands_at_its_edge() -> None:
    drawing = line_plot(
        [Series("a", "train", [(1.0, 1.0), (5.0, 2.0)])],
        label="a",
        height=100,
        findings=[(9.0, "stopped", "bad")],
    )
    assert drawing is not None
    assert '<circle cx="100.00%" cy="5" r="4" class="bad"><title>stopped</title></circle>' in drawing


def test_a_note_says_what_to_do_as_well(run_folder: Path, write_curve: Any) -> None:
    write_curve(lambda step: falling(step) + 3.0 * (step == 60), tokens_per_second=lambda step: 1000.0)
    page = write_report(run_folder).read_text()
    assert "A spike</span>" in page
    told = page[page.index("A spike</span>") :]
    assert "Nothing has to be done for one spike" in told[: told.index("</p>")]


def test_the_gradient_is_drawn_before_and_after_clipping(run_folder: Path, write_curve: Any) -> None:
    write_curve(falling, grad_norm_clipped=lambda step: 1.0)
    (plot,) = [one for one in read_curves(read_run(run_folder)).plots if one.key == "gradient"]
    assert plot.unit == "before clipping" and [name for _, name in plot.legend] == ["clipped at 1"]
    write_curve(falling, grad_norm_clipped=lambda step: 0.5 if step > 50 else 1.0)
    (plot,) = [one for one in read_curves(read_run(run_folder)).plots if one.key == "gradient"]
    assert [name for _, name in plot.legend] == ["before clipping", "after clipping", "clipped at 1"]
    drawing = str(plot.drawing)
    assert "after clipping from 1.00 to 0.500" in drawing
    assert "<title>clipped at 1</title>" in drawing and ">clipped at 1</text>" not in drawing


def test_going_back_by_itself_is_no_resume(run_folder: Path, write_curve: Any) -> None:
    log = write_curve(falling)
    log.write("rewind", step=50, onset=51, reason="diverged", rate_factor=0.5, rows=[])
    log.write("resume", step=50)
    page = write_report(run_folder).read_text()
    assert "The run was resumed" not in page and "resumed after step" not in page
    log.write("resume", step=40)
    page = write_report(run_folder).read_text()
    assert "The run was resumed once (dotted lines)." in page and "went back to step 50" in page


@pytest.mark.parametrize(
    ("stop", "words"),
    [
        ({"reason": "diverged", "onset": 91}, "from step 91 on the loss was above where it began"),
        ({"reason": "not_finite", "onset": 101}, "its loss or gradient was not finite"),
    ],
)
def test_a_run_that_stopped_itself_says_so_first(
    run_folder: Path, write_curve: Any, stop: dict[str, Any], words: str
) -> None:
    shutil.rmtree(run_folder / "eval")
    log = write_curve(falling)
    log.write("end", step=100, total_steps=200)
    log.write("stop", step=100, rows=["row-7"], **stop)
    page = write_report(run_folder).read_text()
    assert f"Training stopped at step 100: {words}; the tuned model is not evaluated" in page
    assert "train.on_divergence: rewind" in page and "Rows: row-7." in page
    assert "Type the command of this run again" not in page
