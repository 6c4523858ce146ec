"""One tensor of every model, read from disk in chunks on a few threads, and handed out in order.

Each thread runs torch on one core: results do not depend on how many there are, and chunks of a megabyte stay in its
cache. At most a few chunks exist at a time, whatever the size of the tensor.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

from finetune.merge.methods.chunk import Chunk
from finetune.merge.models.inputs import source_name
from finetune.merge.models.plan import MergePlan, OutputTensor, Source
from finetune.model.memory import keep_freed_memory, release_memory

CHUNK_ELEMENTS = 1 << 18
"""Elements of a chunk: 1 MiB in fp32. A longer row is one chunk."""
Result = TypeVar("Result")


class Workers:
    """A pool of `n` threads; `map` keeps the order and at most 2n results waiting."""

    def __init__(self, n: int) -> None:
        self.n = n
        self._pool = ThreadPoolExecutor(
            n, thread_name_prefix="merge", initializer=lambda: torch.set_num_threads(1)
        )

    def map(
        self, work: Callable[[tuple[int, int]], Result], items: list[tuple[int, int]]
    ) -> Iterator[Result]:
        if len(items) == 1:  # small tensors: no thread is worth its hand-over
            yield work(items[0])
            return
        waiting: deque[Future[Result]] = deque()
        try:
            for item in items:
                waiting.append(self._pool.submit(work, item))
                if len(waiting) >= 2 * self.n:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()

    def submit(self, work: Callable[[], Result]) -> Future[Result]:
        return self._pool.submit(work)

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)


@contextmanager
def working(n: int) -> Iterator[Workers]:
    """A pool for the time of a block; torch's own threads are as before afterwards."""
    keep_freed_memory()
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    workers = Workers(n)
    try:
        yield workers
    finally:
        workers.close()
        torch.set_num_threads(before)
        release_memory()


class FileChunks:
    """The sources of one output tensor (`Chunks` of the methods)."""

    def __init__(
        self, plan: MergePlan, tensor: OutputTensor, workers: Workers, chunk_elements: int = CHUNK_ELEMENTS
    ) -> None:
        self.plan, self.tensor, self.workers = plan, tensor, workers
        self.shape = tensor.planned.shape
        self.n_inputs = len(tensor.inputs)
        self.n_rows = self.shape[0] if self.shape else 1
        self.row_elements = math.prod(self.shape[1:])
        step = max(1, chunk_elements // max(self.row_elements, 1))
        self.spans = [(start, min(start + step, self.n_rows)) for start in range(0, self.n_rows, step)] or [
            (0, 0)
        ]

    def map(self, work: Callable[[Chunk], Result]) -> Iterator[Result]:
        return self.workers.map(lambda span: work(self.chunk(*span)), self.spans)

    def chunk(self, start: int, stop: int) -> Chunk:
        """Rows [start, stop) of every source in fp32, in memory of their own."""
        base = self.tensor.base
        return Chunk(
            start * self.row_elements,
            None if base is None else self.rows(base, start, stop),
            [self.rows(source, start, stop) for source in self.tensor.inputs],
        )

    def rows(self, source: Source, start: int, stop: int) -> torch.Tensor:
        if self.tensor.aligned and self.plan.vocabulary is not None:
            return self.plan.vocabulary.read(source.model, start, stop, self._gather)
        return self.plan.models[source.model].files.read(source.tensor, start, stop).float()

    def _gather(self, model: int, rows: torch.Tensor) -> torch.Tensor:
        """Rows of the model's own table, read in as few pieces as they lie in."""
        files = self.plan.models[model].files
        name = next((s.tensor for s in self.tensor.sources if s.model == model), None)
        if name is None:  # a model that gives only its tokens
            name = source_name(self.plan.models[model], self.tensor.planned.name)
        if not len(rows):
            return files.read(name, 0, 0)
        breaks = (rows[1:] != rows[:-1] + 1).nonzero().flatten() + 1
        runs = torch.tensor_split(rows, breaks)
        return torch.cat([files.read(name, int(run[0]), int(run[-1]) + 1) for run in runs])
