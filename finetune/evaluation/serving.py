"""A model server as a process of ours: started on a free port, waited for, and ended whatever happens."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.errors import UserError
from finetune.paths import disk_faults

START_TIMEOUT_SECONDS = 900.0
_POLL_SECONDS = 0.25
_STOP_SECONDS = 15.0
_LOG_LINES_SHOWN = 12
_HOST = "127.0.0.1"
# The ranks that vLLM reserves memory for; the next one above the adapter's is asked for.
_VLLM_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


@dataclass(frozen=True)
class VllmModel:
    """What a vLLM server serves: the model of a folder as `base`, and an adapter over it as `tuned`, where there is one.

    name: under which the model of the folder is served. dtype: `fp32` or `bf16`. more: further arguments of `vllm serve`.
    """

    folder: Path
    name: str
    dtype: str
    adapter: Path | None = None
    adapter_name: str = "tuned"
    adapter_rank: int = 16
    more: tuple[str, ...] = ()

    def command(self, port: int) -> list[str]:
        """The command line. Sampling defaults of the model's own `generation_config` are left out: a repetition penalty
        there would change greedy answers."""
        found = [
            *find_vllm(), "serve", str(self.folder), "--host", _HOST, "--port", str(port),
            "--served-model-name", self.name, "--dtype", {"fp32": "float32", "bf16": "bfloat16"}[self.dtype],
            "--generation-config", "vllm",
        ]  # fmt: skip
        if self.adapter is not None:
            rank = next((rank for rank in _VLLM_LORA_RANKS if rank >= self.adapter_rank), self.adapter_rank)
            found += ["--enable-lora", "--lora-modules", f"{self.adapter_name}={self.adapter}"]
            found += ["--max-lora-rank", str(rank)]
        return [*found, *self.more]


def find_vllm() -> list[str]:
    """The `vllm` command, on PATH or beside this Python. Raises UserError when it is not installed."""
    beside = Path(sys.executable).parent / "vllm"
    found = shutil.which("vllm") or (str(beside) if beside.is_file() else None)
    if found is None:
        raise UserError(
            "vllm is not installed",
            where="--serve vllm",
            fix="install it in an environment of its own (it pins its own torch) and put that environment's `vllm` on "
            "PATH; or start any OpenAI-compatible server yourself and name it with --server",
        )
    return [found]


@contextlib.contextmanager
def running_server(
    command: Callable[[int], Sequence[str]],
    log: Path,
    *,
    timeout_seconds: float = START_TIMEOUT_SECONDS,
    say: Callable[[str], None] = lambda line: None,
) -> Iterator[str]:
    """Start `command(port)` and yield its URL, ending in `/v1`, once it lists its models; end it afterwards.

    Its output goes to `log`. Raises UserError with the last lines of that when it ends by itself or is not ready in
    time. The process and its children are ended also on Ctrl-C and SIGTERM.
    """
    port = free_port()
    url = f"http://{_HOST}:{port}/v1"
    with disk_faults(log):
        log.parent.mkdir(parents=True, exist_ok=True)
        stream = log.open("wb")
    started = list(command(port))
    say(f"serve: {' '.join(started)}")
    say(f"serve: its log is {log}")
    with stream, _ended_on_sigterm():
        try:
            process = subprocess.Popen(
                started,
                stdout=stream,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            raise UserError(f"cannot start {started[0]}: {error}", where="--serve") from None
        try:
            _await_models(process, url, log, timeout_seconds, say)
            yield url
        finally:
            _end(process)


def free_port() -> int:
    """A port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        return int(probe.getsockname()[1])


def _await_models(
    process: subprocess.Popen[bytes], url: str, log: Path, timeout_seconds: float, say: Callable[[str], None]
) -> None:
    started = time.monotonic()
    told = started
    while True:
        if process.poll() is not None:
            raise _not_ready(f"the server ended with exit code {process.returncode} before it was ready", log)
        if _lists_models(url):
            say(f"serve: ready after {time.monotonic() - started:.0f} s")
            return
        now = time.monotonic()
        if now - started > timeout_seconds:
            raise _not_ready(f"the server was not ready after {timeout_seconds:g} s", log)
        if now - told > 30.0:
            told = now
            say(f"serve: loading for {now - started:.0f} s")
        time.sleep(_POLL_SECONDS)


def _lists_models(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/models", timeout=5.0) as response:
            return bool(response.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def _not_ready(what: str, log: Path) -> UserError:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LOG_LINES_SHOWN:]
    shown = "\n".join(f"    {line[:300]}" for line in lines) or "    (nothing)"
    return UserError(
        f"{what}; the last lines of its log:\n{shown}",
        where=str(log),
        fix="mend what the log says, e.g. with --serve-argument, or start the server yourself and use --server",
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM to the process and its children, and SIGKILL to those that stay."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, sign)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=_STOP_SECONDS)
    process.wait()


@contextlib.contextmanager
def _ended_on_sigterm() -> Iterator[None]:
    """SIGTERM ends this process through its `finally` blocks, so that no server is left behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, frame: Any) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
