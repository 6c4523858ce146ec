"""While a run trains, a finding becomes an event and is told once, also across a resume."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from finetune.pipeline.live_diagnosis import LiveDiagnosis
from finetune.telemetry.events import EventLog, read_events


def train(path: Path, said: list[str], first: int, last: int, total: int = 100) -> None:
    """Steps whose gradient never arrives, watched as a trainer does."""
    log, watch = EventLog(path), LiveDiagnosis(path, said.append)
    log.write("start", step=first - 1, total_steps=total)
    for step in range(first, last + 1):
        log.write("step", step=step, loss=2.4, grad_norm=0.0, update_ratio=0.0, learning_rate=1e-3)
        state: Any = SimpleNamespace(global_step=step, max_steps=total, is_world_process_zero=True)
        watch.on_step_end(None, state, None)  # type: ignore[arg-type]


def findings(path: Path) -> list[dict[str, Any]]:
    return [event for event in read_events(path) if event["event"] == "finding"]


def test_it_is_told_at_the_first_look_and_not_again(tmp_path: Path) -> None:
    path, said = tmp_path / "events.jsonl", list[str]()
    train(path, said, 1, 40)
    (finding,) = findings(path)
    assert (finding["shape"], finding["step"], finding["severity"]) == ("no_signal", 10, "fault")
    assert len(said) == 1 and said[0].startswith("step 10: fault   no signal arrives")
    train(path, said, 41, 100)  # another process goes on
    assert len(findings(path)) == len(said) == 1


def test_a_finding_of_lost_steps_is_told_again(tmp_path: Path) -> None:
    path, said = tmp_path / "events.jsonl", list[str]()
    train(path, said, 1, 15)
    EventLog(path).write("resume", step=5)
    assert findings(path) == []
    train(path, said, 6, 30)
    assert len(findings(path)) == 1 and len(said) == 2


def test_a_run_that_went_back_is_looked_at_anew(tmp_path: Path) -> None:
    """The same process goes on from an earlier step, and what was found after it may come again."""
    path, said = tmp_path / "events.jsonl", list[str]()
    log, watch = EventLog(path), LiveDiagnosis(path, said.append)
    log.write("start", step=0, total_steps=200)
    for step in [*range(1, 101), *range(51, 71)]:
        if step == 51 and said:
            log.write("resume", step=50)
        lost = step > 60
        log.write(
            "step",
            step=step,
            loss="nan" if lost else 2.4,
            grad_norm=1.0,
            update_ratio=0.01,
            learning_rate=1e-3,
        )
        state: Any = SimpleNamespace(global_step=step, max_steps=200, is_world_process_zero=True)
        watch.on_step_end(None, state, None)  # type: ignore[arg-type]
    assert len(said) == 2
    assert "divergence" in findings(path)[-1]["shape"]
