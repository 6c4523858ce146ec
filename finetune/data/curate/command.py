"""A verifier that is a command: it reads one row a line as JSON on its standard input and answers with one line each.

The command is started once and asked row by row, or once for each batch of rows (for commands that answer at the end
only). It runs in a process group of its own, without a shell, with limits on
memory and on the time of each answer; when it is late or dies, the row fails, and the next row starts it anew.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import orjson

from finetune.data.curate.verifiers import RowDict, Verdict, as_verdict, failure
from finetune.errors import UserError

_LONGEST_LINE = 1 << 20
_LINES_OF_COMPLAINT = 5


class CommandVerifier:
    """Use as a context manager, so that the command ends with it. One row at a time: it is not for several threads.

    command: the program and its arguments, a list or one line split as a shell would. folder: where it runs.
    seconds_per_row: how long an answer may take. max_memory_bytes: address space of each of its processes (not on
    Windows); None: no limit. Raises UserError when the program is not there.
    """

    def __init__(
        self,
        command: str | Sequence[str],
        *,
        folder: Path | None = None,
        threshold: float = 0.5,
        seconds_per_row: float = 30.0,
        max_memory_bytes: int | None = 4 << 30,
        where: str = "",
    ) -> None:
        self._command = shlex.split(command) if isinstance(command, str) else list(command)
        self._folder, self._threshold, self._where = folder, threshold, where
        self._seconds, self._max_memory = seconds_per_row, max_memory_bytes
        self._process: subprocess.Popen[bytes] | None = None
        self._answers: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._complaints: deque[str] = deque(maxlen=_LINES_OF_COMPLAINT)

    def __enter__(self) -> CommandVerifier:
        self._start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def __call__(self, row: RowDict) -> Verdict:
        process = self._process if self._process is not None else self._start()
        assert process.stdin is not None
        # A row that does not fit the pipe waits for the command to read, so the clock covers writing as well.
        writing = threading.Thread(
            target=_write, args=(process.stdin, orjson.dumps(row) + b"\n"), daemon=True
        )
        writing.start()
        try:
            line = self._answers.get(timeout=self._seconds)
        except queue.Empty:
            self._stop()
            return failure(
                f"no answer within {self._seconds:g} s (a command must flush its output after each line)"
            )
        if not line.endswith(b"\n"):
            self._stop()
            return failure(
                f"the command ended{self._last_words()}" if not line else "the answer is cut or too long"
            )
        return _read_verdict(line, self._threshold)

    def _start(self) -> subprocess.Popen[bytes]:
        process = _popen(self._command, self._folder, self._max_memory, self._where)
        self._process, self._answers, self._complaints = (
            process,
            queue.SimpleQueue(),
            deque(maxlen=_LINES_OF_COMPLAINT),
        )
        assert process.stdout is not None and process.stderr is not None
        threading.Thread(target=_read, args=(process.stdout, self._answers), daemon=True).start()
        threading.Thread(target=_listen, args=(process.stderr, self._complaints), daemon=True).start()
        return process

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            _end(process)

    def _last_words(self) -> str:
        said = " ".join(self._complaints).strip()
        return f", saying: {said[-200:]}" if said else ""


def verify_batch(
    command: str | Sequence[str],
    rows: Sequence[RowDict],
    *,
    folder: Path | None = None,
    threshold: float = 0.5,
    seconds_per_row: float = 30.0,
    max_memory_bytes: int | None = 4 << 30,
    where: str = "",
) -> list[Verdict]:
    """The verdicts of a command that is started for these rows, reads them all and answers with as many lines.

    When it is late, dies, or gives another number of lines, all rows of the batch fail.
    """
    parts = shlex.split(command) if isinstance(command, str) else list(command)
    process = _popen(parts, folder, max_memory_bytes, where)
    try:
        said, complained = process.communicate(
            b"".join(orjson.dumps(row) + b"\n" for row in rows), timeout=seconds_per_row * max(len(rows), 1)
        )
    except subprocess.TimeoutExpired:
        return [failure(f"no answers within {seconds_per_row * len(rows):g} s")] * len(rows)
    finally:
        _end(process)
    lines = said.splitlines()
    if process.returncode or len(lines) != len(rows):
        complaint = complained.decode(errors="replace").strip()[-200:]
        return [
            failure(f"{len(lines)} answers to {len(rows)} rows, exit {process.returncode}; {complaint}")
        ] * len(rows)
    return [_read_verdict(line, threshold) for line in lines]


def _read_verdict(line: bytes, threshold: float) -> Verdict:
    try:
        answer: Any = json.loads(line)
    except ValueError:
        return failure(f"its answer is no JSON: {line[:80].decode(errors='replace').strip()!r}")
    return as_verdict(answer, threshold=threshold)


def _popen(
    command: list[str], folder: Path | None, max_memory_bytes: int | None, where: str
) -> subprocess.Popen[bytes]:
    program = command[0] if command else ""
    if shutil.which(program) is None and not ((folder or Path()) / program).is_file():
        raise UserError(
            f"there is no program '{program}'",
            where=where,
            fix="give a program of the PATH, or a path relative to the spec",
        )
    return subprocess.Popen(
        _limited(command, max_memory_bytes),
        cwd=folder,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a command and all that it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream is not None:
            with contextlib.suppress(OSError, ValueError):
                stream.close()


def _limited(command: list[str], max_memory_bytes: int | None) -> list[str]:
    """The command behind a small program that sets the limit: code run between fork and exec is not safe with threads."""
    if max_memory_bytes is None or sys.platform == "win32":
        return command
    setter = (
        "import os, resource, sys; n = int(sys.argv[1]); resource.setrlimit(resource.RLIMIT_AS, (n, n)); "
        "os.execvp(sys.argv[2], sys.argv[2:])"
    )
    return [sys.executable, "-S", "-E", "-c", setter, str(max_memory_bytes), *command]


def _write(stream: IO[bytes], line: bytes) -> None:
    with contextlib.suppress(OSError, ValueError):  # the command has ended; the reader says so
        stream.write(line)
        stream.flush()


def _read(stream: IO[bytes], answers: queue.SimpleQueue[bytes]) -> None:
    """Hand on every line; an empty one at the end says that the command has ended."""
    while True:
        line = stream.readline(_LONGEST_LINE)
        answers.put(line)
        if not line.endswith(b"\n"):
            return


def _listen(stream: IO[bytes], complaints: deque[str]) -> None:
    for line in iter(lambda: stream.readline(_LONGEST_LINE), b""):
        complaints.append(line.decode(errors="replace").strip())
