"""Follow the event log of a run that another process writes: new lines as they come. Only the file is read."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from finetune.errors import UserError

EVENTS = "events.jsonl"
_POLL_SECONDS = 0.5


def follow_events(
    folder: Path,
    *,
    is_alive: Callable[[Path], bool],
    wait: Callable[[float], None] = time.sleep,
) -> Iterator[list[dict[str, Any]]]:
    """Every event of the run, in batches as they are found: first all that is there, then what is added; empty ones while
    nothing is. Ends when `is_alive(folder)` is false and all that was written before was given.

    A line that is not whole yet waits for its end; one that will never be is passed over.
    """
    path = folder / EVENTS
    offset, rest = 0, b""
    while True:
        alive = is_alive(folder)  # before reading: what it wrote before it ended is read below
        lines, offset, rest = _new_lines(path, offset, rest)
        yield [event for line in lines if (event := _event(line)) is not None]
        if not alive:
            return
        wait(_POLL_SECONDS)


def _new_lines(path: Path, offset: int, rest: bytes) -> tuple[list[bytes], int, bytes]:
    """Whole lines behind `offset`, the new offset, and the beginning of a line that is still being written."""
    try:
        with path.open("rb") as stream:
            stream.seek(offset)
            added = stream.read()
    except FileNotFoundError:
        return [], offset, rest
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}", fix="mend its permissions") from None
    *lines, rest = (rest + added).split(b"\n")
    return lines, offset + len(added), rest


def _event(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line, parse_constant=str)  # NaN is no JSON, and an answer in JSON may not hold it
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and isinstance(record.get("event"), str) else None
