"""The processes of one run: which one works alone, what the others wait for, and which one tells of a failure.

The first process (rank 0) reads, evaluates, saves and reports; all of them train. They meet through the store of torch's
rendezvous, which needs no collective operation: a wait of hours in one of those would run into its timeout.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from finetune.errors import ExitCode, UserError
from finetune.training.sharding import (
    asked_sharding,
    check_sharding,
    check_zero,
    sharding_of,
    zero_of_environment,
)

TRAIN, END = "train", "end"  # what the first process posts: all train from here on; nothing is left to do
FAILURE_FILE = "FINETUNE_FAILURE_FILE"  # environment variable that the launcher sets
_FAILED = "failed"
_EXIT_CODE = "exit code"
_POLL_SECONDS = 0.2
_WATCH_SECONDS = 1.0
_STORE_TIMEOUT = timedelta(minutes=5)
_COLLECTIVE_TIMEOUT = timedelta(minutes=30)  # as transformers' trainer has it


def n_processes() -> int:
    """How many processes were started for this run, as torchrun and accelerate tell it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    """Which of them this one is, from 0."""
    return int(os.environ.get("RANK", "0")) if n_processes() > 1 else 0


class EndedElsewhereError(Exception):
    """Another process failed and has told why. `exit_code` is the one that it ended with."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(f"another process failed with exit code {exit_code}")
        self.exit_code = exit_code


@dataclass(frozen=True)
class Processes:
    """The group that this process is in. `store`: torch's store that all of them share; None for a single process."""

    rank: int = 0
    count: int = 1
    store: Any = None

    @property
    def works_alone(self) -> bool:
        """Whether this process does what is done once: data, evaluation, saving, messages."""
        return self.rank == 0

    def post(self, word: str, content: str = "") -> None:
        """Tell the others that `word` is reached; they get `content` from `await_any`."""
        if self.store is not None:
            self.store.set(word, content)

    def await_any(self, *words: str) -> tuple[str, str]:
        """Wait, for days if need be, until the first process posts one of `words`: that word and its content.

        Raises EndedElsewhereError when a process has failed.
        """
        while True:
            for word in words:
                if self.store.check([word]):
                    return word, self.store.get(word).decode()
            if self.store.check([_EXIT_CODE]):
                raise EndedElsewhereError(int(self.store.get(_EXIT_CODE)))
            time.sleep(_POLL_SECONDS)


_joined: Processes | None = None
_over = threading.Event()  # this process no longer depends on the others, or has failed itself


def join_processes() -> Processes:
    """This process's group; started here when there are several. The same answer every time."""
    global _joined
    if _joined is None:
        _joined = _join() if n_processes() > 1 else Processes()
    return _joined


def _join() -> Processes:
    from accelerate import PartialState

    sharding, on_cuda = asked_sharding()
    check_sharding(sharding, on_cuda)
    if sharding == "deepspeed":
        check_zero(zero_of_environment(os.environ))
    if sharding == "deepspeed" and not on_cuda:
        from finetune.training.zero import leave_exchange_to_gloo

        leave_exchange_to_gloo()
        PartialState(backend="gloo", timeout=_COLLECTIVE_TIMEOUT)
    else:
        PartialState(cpu=not on_cuda, timeout=_COLLECTIVE_TIMEOUT)
    threading.Thread(target=_end_with_others, args=(_open_store(),), daemon=True).start()
    return Processes(rank(), n_processes(), _open_store())


def _open_store() -> Any:
    import torch

    store = torch.distributed.TCPStore(  # type: ignore[attr-defined]
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        wait_for_workers=False,
        timeout=_STORE_TIMEOUT,
    )
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return torch.distributed.PrefixStore(f"finetune/{attempt}", store)  # type: ignore[attr-defined]


def _end_with_others(store: Any) -> None:
    """End this process when another one has failed: it may be in an exchange that will never end, deaf to signals."""
    while not _over.wait(_WATCH_SECONDS):
        try:
            failed = store.check([_EXIT_CODE])
            code = int(store.get(_EXIT_CODE)) if failed else 0
        except RuntimeError:
            return
        if failed and not _over.is_set():
            os._exit(code)


def leave_processes() -> None:
    """Call in all processes when nothing is exchanged any more; the first one goes on alone."""
    import torch

    _over.set()
    if sharding_of(os.environ) == "deepspeed":
        from transformers.integrations import unset_hf_deepspeed_config

        unset_hf_deepspeed_config()  # else the next model would be loaded in parts
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def claim_failure(exit_code: int) -> int | None:
    """None when this process is the first to fail, and so the one that tells; else the exit code to end with in silence.

    The launcher learns of it through the file that FAILURE_FILE names.
    """
    if n_processes() == 1:
        return None
    alone = _over.is_set()
    _over.set()
    told = None if alone and rank() == 0 else _told_elsewhere(exit_code)
    if told is None and (path := os.environ.get(FAILURE_FILE)):
        Path(path).write_text(str(int(exit_code)), encoding="utf-8")
    return told


def _told_elsewhere(exit_code: int) -> int | None:
    if _joined is None or _joined.store is None:  # all fail alike before they meet
        return None if rank() == 0 else exit_code
    store = _joined.store
    try:
        if store.add(_FAILED, 1) == 1:
            store.set(_EXIT_CODE, str(int(exit_code)))
            return None
        return int(store.get(_EXIT_CODE))
    except RuntimeError:  # the process that holds the store is gone: it failed before
        return exit_code


def lost_connection(error: BaseException) -> UserError | None:
    """What a failed exchange with another process means to a user; None when `error` is something else."""
    text = str(error)
    known = type(error).__name__ in ("DistBackendError", "DistNetworkError", "DistStoreError")
    if n_processes() == 1 or not (known or "Connection closed by peer" in text or "gloo" in text):
        return None
    return UserError(
        "the connection to another process of this run is lost",
        why="that process ended without a message: it was killed, or the machine had no memory left",
        fix="run the same command again; training continues from the last checkpoint",
        exit_code=ExitCode.INTERRUPTED,
    )
