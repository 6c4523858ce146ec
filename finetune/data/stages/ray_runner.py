"""Pieces of the input on a Ray cluster, by Ray Data: the same parts as on one machine, wherever each is read.

Needs the extra `[cluster]`, this package on every node, and a file system that all of them share: the files of the spec
and the folder of builds are opened by the same paths everywhere.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from finetune.data.stages.runner import Result, Task
from finetune.errors import UserError


class RayRunner:
    """address: of a running cluster, `auto` for the one this machine belongs to, or `local` for one of its own.

    Use as a context: a cluster that was started here ends with it. Raises UserError when Ray is not installed or the
    cluster cannot be reached.
    """

    def __init__(self, address: str = "auto") -> None:
        self._address = address
        self._ray: Any = None
        self._started = False

    def __enter__(self) -> RayRunner:
        try:
            import ray
            import ray.data
        except ImportError as error:
            raise UserError(
                f"Ray is not installed: {error}",
                where="--cluster",
                fix="pip install 'finetune-pipeline[cluster]'",
            ) from error
        self._ray = ray
        if not ray.is_initialized():
            try:
                ray.init(address=self._address, log_to_driver=False, include_dashboard=False)
            except (ConnectionError, ValueError) as error:
                raise UserError(
                    f"no Ray cluster at '{self._address}': {error}",
                    where="--cluster",
                    fix="start one with `ray start --head`, or give `local`",
                ) from error
            self._started = True
        ray.data.DataContext.get_current().enable_progress_bars = False
        return self

    def __exit__(self, *_: object) -> None:
        if self._started:
            self._ray.shutdown()

    def map(
        self, work: Callable[[Task], Result], tasks: Sequence[Task], sizes: Sequence[int]
    ) -> Iterator[tuple[int, Result]]:
        """A task a block, results as they come; a single task is done here. `sizes` are not looked at."""
        if len(tasks) < 2:
            yield from ((index, work(task)) for index, task in enumerate(tasks))
            return
        rows = [{"index": index, "task": pickle.dumps(task)} for index, task in enumerate(tasks)]
        data = self._ray.data.from_items(rows, override_num_blocks=len(rows))
        for done in data.map(_Doing(work)).iter_rows():
            result = pickle.loads(done["result"])
            if isinstance(result, UserError):
                raise result
            yield int(done["index"]), result


class _Doing:
    """`work` as Ray Data calls it. What a user can mend is handed back, for Ray would wrap an exception in its own."""

    def __init__(self, work: Callable[[Any], Any]) -> None:
        self._work = work

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        try:
            result: Any = self._work(pickle.loads(row["task"]))
        except UserError as error:
            result = error
        return {"index": row["index"], "result": pickle.dumps(result)}
