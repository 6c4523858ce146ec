"""A few threads over batches: numpy lets go of the interpreter lock, and no process has to be started or fed."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Given = TypeVar("Given")
Made = TypeVar("Made")


def map_ordered(
    work: Callable[[Given], Made], items: Iterable[Given], workers: int | None = None
) -> Iterator[Made]:
    """work(item) of each item, in order. Items are drawn in the calling thread, no more than a few ahead of the results.

    By default as many threads as this process may use cores.
    """
    count = workers if workers is not None else _cores()
    if count <= 1:
        yield from map(work, items)
        return
    with ThreadPoolExecutor(count) as pool:
        waiting: deque[Future[Made]] = deque()
        for item in items:
            waiting.append(pool.submit(work, item))
            if len(waiting) > 2 * count:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
