"""Answers that are no single run's, kept by digest under `runs/baselines`: those of untuned models, shared by all runs.

An arm's folder is named by everything that decides its answers, so two recipes that would ask a base model the same
things find one folder. A run gets a copy and stays complete by itself. One process at a time works in a folder; another
one that wants the same answers waits for them.
"""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from finetune.evaluation.records import (
    ArmSummary,
    partial_path,
    read_summary,
    records_path,
    summary_path,
)
from finetune.evaluation.run import ArmJob
from finetune.paths import disk_faults, runs_root, write_atomic

_LOCK = ".lock"
_MODEL_DIGITS, _ANSWER_DIGITS = 8, 16


def store_root() -> Path:
    return runs_root() / "baselines"


def fetch_baseline(
    job: ArmJob,
    target: Path,
    *,
    model_key: str,
    model: Callable[[], Any],
    batch_size: int,
    say: Callable[[str], None],
) -> ArmSummary:
    """Put an untuned arm into the run folder `target`: copied from the store, where it is answered first if need be.

    model_key: the digest of the model that went into the job's keys. model: loads it; called only when answers are missing.
    Answers that the run folder, or the store for other items of the suite, has already are used.
    """
    saved = job.saved(target)
    if saved is not None:
        return saved
    return _copy_arm(
        answer_in_store(
            job, model_key=model_key, model=model, batch_size=batch_size, reuse=[target], say=say
        ),
        target,
        job.arm,
    )


def answer_in_store(
    job: ArmJob,
    *,
    model_key: str,
    model: Callable[[], Any],
    batch_size: int,
    reuse: Sequence[Path] = (),
    adapter_sha256: str | None = None,
    say: Callable[[str], None],
) -> Path:
    """The store's folder with the arm's answers, given by `model()` where they are missing. reuse: other folders that may
    have some of them."""
    family = f"{job.suite.name}-{job.arm}-{model_key[:_MODEL_DIGITS]}-"
    store = store_root() / f"{family}{job.key[:_ANSWER_DIGITS]}"
    with _only_process(
        store, lambda: say(f"another process answers {job.suite.name}, {job.arm}; waiting for it")
    ):
        if job.saved(store) is None:
            others = [folder for folder in sorted(store_root().glob(f"{family}*")) if folder != store]
            job.evaluate(
                model(), store, batch_size=batch_size, adapter_sha256=adapter_sha256, reuse=[*reuse, *others]
            )
    return store


def _copy_arm(store: Path, target: Path, arm: str) -> ArmSummary:
    """Summary last, as everywhere: one that exists describes records that are there."""
    summary_path(target, arm).unlink(missing_ok=True)
    for path in (records_path, summary_path):
        write_atomic(path(target, arm), path(store, arm).read_bytes())
    partial_path(target, arm).unlink(missing_ok=True)
    return read_summary(target, arm)


@contextmanager
def _only_process(folder: Path, say_waiting: Callable[[], None]) -> Iterator[None]:
    """Hold the folder's lock, after whoever holds it now; a process that dies lets go of it."""
    with disk_faults(folder):
        folder.mkdir(parents=True, exist_ok=True)
        stream = (folder / _LOCK).open("w")
    with stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say_waiting()
            fcntl.flock(stream, fcntl.LOCK_EX)
        yield
