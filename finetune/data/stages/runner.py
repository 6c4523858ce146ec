"""Where the work of a stage is done: in this process, in a few processes, or wherever a runner of the same shape says.

A task is a small picklable value, and its result is a file that appears whole; so any task may be done again, anywhere.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import Any, Protocol, TypeVar

from finetune.errors import UserError

Task = TypeVar("Task")
Result = TypeVar("Result")
_SMALL_BYTES = 32 << 20  # below this, starting processes costs more than they save


class Runner(Protocol):
    """Does tasks in any order and yields (index of the task, result) as they are done."""

    def map(
        self, work: Callable[[Task], Result], tasks: Sequence[Task], sizes: Sequence[int]
    ) -> Iterator[tuple[int, Result]]:
        """`sizes` are bytes, by which a runner may tell whether a task is worth a process."""
        ...


class LocalRunner:
    """This machine: in the calling process for small work, else one process a core."""

    def __init__(self, workers: int | None = None) -> None:
        self.workers = workers or n_cores()

    def map(
        self, work: Callable[[Task], Result], tasks: Sequence[Task], sizes: Sequence[int]
    ) -> Iterator[tuple[int, Result]]:
        if self.workers == 1 or len(tasks) < 2 or sum(sizes) < _SMALL_BYTES:
            yield from ((index, work(task)) for index, task in enumerate(tasks))
            return
        # Spawned, not forked: the caller may hold threads, and torch.
        context = multiprocessing.get_context("spawn")
        workers = min(self.workers, len(tasks))
        with ProcessPoolExecutor(workers, context, initializer=_prepare_worker) as pool:
            try:
                futures = {pool.submit(work, task): index for index, task in enumerate(tasks)}
                for future in as_completed(futures):
                    yield futures[future], future.result()
            except BrokenProcessPool:
                raise UserError(
                    "a worker process of the dataset build was killed",
                    why="most often the machine had no memory left",
                    fix="run the same command again: it continues with the parts that are complete",
                ) from None
            finally:
                pool.shutdown(wait=True, cancel_futures=True)


def n_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _prepare_worker() -> None:
    """Ctrl-C is the parent's to handle; and a worker whose parent was killed would wait for tasks for ever."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent: Any = multiprocessing.parent_process()

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
