"""The progress line: silent on short work, an estimate on long work."""

from __future__ import annotations

import io

import pytest

from finetune.telemetry import progress


def test_short_work_prints_nothing() -> None:
    stream = io.StringIO()
    with progress.Progress("evaluate", 3, "items", stream=stream) as line:
        line.advance(3)
    assert stream.getvalue() == ""


def test_long_work_prints_share_and_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 10.0, 10.0, 40.0, 40.0, 50.0, 50.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    stream = io.StringIO()
    with progress.Progress("train", 100, "steps", stream=stream) as line:
        line.advance(10, "loss 1.0")
        line.advance(30)
    first, second, last = stream.getvalue().splitlines()
    assert first == "train: 10/100 steps, 1 min 30 s left, loss 1.0"
    assert second == "train: 40/100 steps, 1 min 0 s left"
    assert last == "train: 40/100 steps, in 50 s"
