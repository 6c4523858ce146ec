"""The event log survives torn lines and tells one story after a resume."""

from __future__ import annotations

import math
from pathlib import Path

from finetune.telemetry.events import EventLog, read_events


def test_a_torn_last_line_is_closed_and_skipped(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    EventLog(path).write("step", step=1, loss=2.0)
    with path.open("ab") as stream:
        stream.write(b'{"event": "step", "st')
    EventLog(path).write("step", step=2, loss=1.5)
    assert [event["step"] for event in read_events(path)] == [1, 2]


def test_a_resume_drops_the_steps_that_were_lost(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    for step in (1, 2, 3, 4):
        log.write("step", step=step, loss=float(step))
    log.write("resume", step=2)
    log.write("step", step=3, loss=30.0)
    steps = [(event["step"], event["loss"]) for event in read_events(log.path) if event["event"] == "step"]
    assert steps == [(1, 1.0), (2, 2.0), (3, 30.0)]


def test_non_finite_numbers_are_written_by_name(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    log.write("step", step=1, loss=math.nan, grad_norm=math.inf)
    assert read_events(log.path)[0]["loss"] == "nan"
    assert read_events(log.path)[0]["grad_norm"] == "inf"


def test_no_path_writes_nothing(tmp_path: Path) -> None:
    EventLog(None).write("step", step=1)
    assert list(tmp_path.iterdir()) == []
    assert read_events(tmp_path / "absent.jsonl") == []


def test_what_was_done_about_a_divergence_stays_in_the_story(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    for step in (1, 2, 3, 4):
        log.write("step", step=step, loss=float(step))
    log.write("rewind", step=4, onset=5, rows=["a"])
    log.write("resume", step=2)  # the checkpoint of step 4 was damaged
    assert [(event["event"], event["step"]) for event in read_events(log.path)] == [
        ("step", 1),
        ("step", 2),
        ("rewind", 4),
        ("resume", 2),
    ]


def test_lines_that_are_no_events_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    lines = [
        b"",
        b"\x00\xff",
        b"[1]",
        b'"step"',
        b'{"event": 3}',
        b'{"event": "resume"}',
        b'{"event": "resume", "step": "x"}',
    ]
    path.write_bytes(
        b"\n".join([*lines, b'{"event": "step", "step": null}', b'{"event": "resume", "step": 1}'])
    )
    assert [event["event"] for event in read_events(path)] == ["resume", "resume", "step", "resume"]
