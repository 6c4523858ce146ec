"""Scoring written code by running it, within limits, in a process of its own."""

from __future__ import annotations

import ast
import contextlib
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

from finetune.errors import UserError

ALLOW_CODE = "FINETUNE_ALLOW_CODE_EXECUTION"
_FENCE = re.compile(r"```(?:python|py)?\s*\n(.*?)```", re.DOTALL)
# Limits are set inside the child, before it reads a line of what the model wrote.
_GUARD = """\
import os, resource, sys
seconds, megabytes = int(sys.argv[1]), int(sys.argv[2])
if sys.platform == "linux" and os.geteuid() == 0:
    # Linux counts no processes of root: have them counted as another user's, without the capabilities that lift limits.
    import ctypes
    libc, lifting = ctypes.CDLL(None), (21, 24)  # CAP_SYS_ADMIN, CAP_SYS_RESOURCE
    words = ctypes.c_uint32 * 6  # effective, permitted, inheritable; twice 32 capabilities
    header, held = (ctypes.c_uint32 * 2)(0x20080522, 0), words()
    for capability in lifting:
        libc.prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP: nothing that is started gets them back
    os.setresuid(65534, 0, 0)
    libc.capget(header, held)
    for place in range(3):
        held[place] &= ~sum(1 << capability for capability in lifting) & 0xFFFFFFFF
    libc.capset(header, held)
resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
resource.setrlimit(resource.RLIMIT_AS, (megabytes << 20, megabytes << 20))
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
resource.setrlimit(resource.RLIMIT_NOFILE, (16, 16))
resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
exec(compile(sys.stdin.read(), "answer", "exec"), {"__name__": "__main__"})
"""


def make_runs_code(
    *, seconds: int = 5, memory_megabytes: int = 512
) -> Callable[[str, Mapping[str, Any]], float]:
    """1.0 when the answer's Python code, followed by the item's `check.tests`, ends without an error.

    Off unless the environment variable FINETUNE_ALLOW_CODE_EXECUTION is 1. The code runs in a process of its own with
    limits on CPU, memory, file size and open files, without a process of its own, in an empty folder, without this
    environment's variables. These are limits, not a jail: it can read what this user can read and
    reach the network. Use a container for models that you do not trust.
    """
    if os.environ.get(ALLOW_CODE) != "1":
        raise UserError(
            "scoring by running the model's code is off",
            why="it runs what a model wrote",
            fix=f"set {ALLOW_CODE}=1",
        )

    def runs_code(output: str, check: Mapping[str, Any]) -> float:
        tests = check.get("tests")
        if not isinstance(tests, str) or not tests.strip():
            raise ValueError("the item has no check.tests")
        return float(_runs(f"{code_of(output)}\n\n{tests}\n", seconds, memory_megabytes))

    return runs_code


def format_of_runs_code(*, seconds: int = 5, memory_megabytes: int = 512) -> Callable[[str], bool]:
    """An answer whose code is no Python at all is off-format; code that fails its tests is wrong."""

    def parses(output: str) -> bool:
        try:
            ast.parse(code_of(output))
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return False
        return True

    return parses


def code_of(output: str) -> str:
    """The first fenced block of an answer, or the whole answer when there is none."""
    found = _FENCE.search(output)
    return found[1] if found else output


def _runs(program: str, seconds: int, memory_megabytes: int) -> bool:
    """Whether the program reaches its end. A word drawn for this run is printed there: an early exit is no success."""
    word = secrets.token_hex(16)
    with tempfile.TemporaryDirectory(prefix="finetune-code-") as folder, tempfile.TemporaryFile() as said:
        child = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _GUARD, str(seconds), str(memory_megabytes)],
            stdin=subprocess.PIPE,
            cwd=folder,
            env={},
            stdout=said,  # a file, so that the limit on file size bounds what is printed
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            child.communicate(
                f"{program}\nprint({word!r})\n".encode("utf-8", errors="replace"), timeout=seconds + 2
            )
        except subprocess.TimeoutExpired:
            return False
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)  # the child, and whatever it started
            child.wait()
        said.seek(0)
        return child.returncode == 0 and said.read().rstrip().endswith(word.encode())
