"""Where a build that is not finished keeps what it has: one folder a dataset, locked while it is worked on."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from filelock import FileLock

from finetune.data.rows import Progress
from finetune.paths import disk_faults

Arrays = dict[str, npt.NDArray[Any]]


class WorkFolder:
    """`parts/` of the read stage, results of later stages, and `out/`, the build in the making."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.parts = folder / "parts"
        self.results = folder / "results"  # see `prepare`
        self.out = folder / "out"

    def prepare(self, keys: set[str], digest: str) -> None:
        """Make the folders, and remove what belongs to other inputs or was left behind by an interrupted process.

        keys: of the parts that are of use. digest: of the build, which decides the results of the later stages.
        """
        self.results = self.folder / f"results-{digest[:16]}"
        with disk_faults(self.folder):
            for folder in (self.parts, self.results):
                folder.mkdir(parents=True, exist_ok=True)
            for left in (*self.parts.iterdir(), *self.folder.iterdir()):
                if left.name not in keys and left not in (self.parts, self.results):
                    shutil.rmtree(left, ignore_errors=True)
            self.out.mkdir(exist_ok=True)

    def remembered(self, key: str, make: Callable[[], Arrays]) -> Arrays:
        """The arrays of `make()`, which an earlier process may have made already. `key` names them."""
        path = self.results / f"{key}.npz"
        if path.is_file():
            with np.load(path, allow_pickle=False) as held:
                return dict(held)
        made = make()
        with disk_faults(path):
            handle, aside = tempfile.mkstemp(dir=self.results, prefix=".result-")
            with os.fdopen(handle, "wb") as stream:
                np.savez(stream, allow_pickle=False, **made)
                stream.flush()
                os.fsync(stream.fileno())
            Path(aside).replace(path)
        return made

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def part_of(on_progress: Progress, low: float, high: float) -> Progress:
    """Progress of a part of some work, told as progress of the whole."""
    return lambda share: on_progress(low + share * (high - low))


@contextlib.contextmanager
def locked_work(builds_root: Path, name: str) -> Iterator[WorkFolder]:
    """The work folder of a dataset, for this process alone: another one that builds the same name waits."""
    with disk_faults(builds_root):
        builds_root.mkdir(parents=True, exist_ok=True)
        lock = FileLock(builds_root / f".{name}.lock", mode=0o644)
        with lock:
            yield WorkFolder(builds_root / f".{name}.work")
