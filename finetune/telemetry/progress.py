"""One progress line with an estimate, for any work over two seconds: overwritten on a terminal, sparse in a log."""

from __future__ import annotations

import os
import sys
import time
from types import TracebackType
from typing import TextIO

from finetune.telemetry.sparkline import can_draw, can_redraw
from finetune.units import format_duration

_QUIET_SECONDS = 2.0
_TERMINAL_INTERVAL_SECONDS = 0.5
_LOG_INTERVAL_SECONDS = 15.0


class Progress:
    """Counts done units and prints share, rate and time left on standard error.

    `unit` names what is counted, in the plural ('items', 'steps'). Nothing is printed before two seconds have passed, nor
    by other processes of a run than the first.
    `draws` tells whether the stream's encoding has the characters of a sparkline.
    """

    def __init__(self, label: str, total: int, unit: str, *, stream: TextIO | None = None) -> None:
        self.label, self.total, self.unit = label, total, unit
        self.done = 0
        self._stream = stream or sys.stderr
        self._is_terminal = can_redraw(self._stream)
        self.draws = can_draw(self._stream)
        self._start = time.monotonic()
        self._started_at = 0
        self._last_print = self._start
        self._printed = False
        self._silent = os.environ.get("RANK", "0") != "0"

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._printed:
            self._print(end=True)

    def skip(self, done: int) -> None:
        """Work that was complete before this process began: counted as done, not in the rate."""
        self.done = self._started_at = done

    def advance(self, n: int = 1, detail: str = "") -> None:
        """`n` more units are done; `detail` is shown behind the estimate."""
        self.done += n
        if self._silent:
            return
        now = time.monotonic()
        interval = _TERMINAL_INTERVAL_SECONDS if self._is_terminal else _LOG_INTERVAL_SECONDS
        first = not self._printed and now - self._start >= _QUIET_SECONDS
        if first or (self._printed and now - self._last_print >= interval):
            self._last_print = now
            self._print(detail=detail)

    def _print(self, *, detail: str = "", end: bool = False) -> None:
        elapsed = time.monotonic() - self._start
        rate = (self.done - self._started_at) / elapsed if elapsed > 0 else 0.0
        parts = [f"{self.label}: {self.done}/{self.total} {self.unit}"]
        if end:
            parts.append(f"in {format_duration(elapsed)}")
        elif rate > 0:
            parts.append(f"{format_duration((self.total - self.done) / rate)} left")
        if detail:
            parts.append(detail)
        line = ", ".join(parts)
        if self._is_terminal:
            print(f"\r\x1b[K{line}", end="\n" if end else "", file=self._stream, flush=True)
        else:
            print(line, file=self._stream, flush=True)
        self._printed = True
