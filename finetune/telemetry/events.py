"""The event log of a run: append-only JSON lines that survive kill -9 and tell one story after a resume."""

from __future__ import annotations

import json
import math
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from finetune.paths import disk_faults


def _finite(value: Any) -> Any:
    """JSON has no NaN or infinity: a non-finite number is written as its name, never dropped or zeroed."""
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    return value


class EventLog:
    """Appends typed events to a file, one JSON object a line, flushed line by line.

    A process killed in mid-write leaves a torn last line; opening the log again closes that line, and `read_events`
    skips it. `None` as path makes a log that writes nothing (ranks other than the first).
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        if path is None:
            return
        with disk_faults(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists() and path.stat().st_size and path.read_bytes()[-1:] != b"\n":
                with path.open("ab") as stream:
                    stream.write(b"\n")

    def write(self, event: str, **fields: Any) -> None:
        """Append one event with the current time (UTC, ISO 8601)."""
        if self.path is None:
            return
        record = {"event": event, "time": datetime.now(UTC).isoformat(timespec="milliseconds")}
        record |= {name: _finite(value) for name, value in fields.items()}
        line = json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n"
        with disk_faults(self.path), self.path.open("ab") as stream:
            stream.write(line.encode())  # the system holds it once written: kill -9 loses nothing


def read_events(path: Path) -> list[dict[str, Any]]:
    """Events in order; torn and damaged lines are skipped, and steps that a later resume replayed are dropped.

    After `{"event": "resume", "step": N}` every earlier event of a step beyond N tells of work that was lost with the
    process, so it is left out of the story. A rewind stays: what was done holds for all later steps.
    """
    events: list[dict[str, Any]] = []
    if not path.exists():
        return events
    for line in path.read_bytes().split(b"\n"):
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if not isinstance(record, dict) or not isinstance(record.get("event"), str):
            continue
        if record["event"] == "resume" and isinstance(last := record.get("step"), int):
            events = [event for event in events if event["event"] == "rewind" or not _is_beyond(event, last)]
        events.append(record)
    return events


def _is_beyond(event: dict[str, Any], step: int) -> bool:
    own = event.get("step")
    return isinstance(own, int) and own > step
