"""What long work shows on a terminal: a bar or a line, with the time that is left."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def progress_bar(label: str) -> Iterator[Callable[[float], None]]:
    """A context that yields a callback for the share that is done; the bar is on standard error, and leaves nothing."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=1.0)
        yield lambda share: bar.update(task, completed=share)


def begin(label: str, total: int, unit: str) -> Callable[[int], None]:
    """A line on standard error for counted work: returns what is told how many more units are done."""
    from finetune.telemetry.progress import Progress

    line = Progress(label, total, unit)

    def advance(n: int) -> None:
        line.advance(n)
        if line.done >= total:
            line.__exit__(None, None, None)

    return advance
