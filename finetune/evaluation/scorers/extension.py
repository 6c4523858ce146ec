"""Scorers from outside: a Python function of the user's, a metric of the `evaluate` library, and running written code.

What they load is code of the user's choice. It is named in the suite, hashed into the suite's digest where it is a file,
and never fetched from a network behind the user's back.
"""

from __future__ import annotations

import importlib
import os
import re
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from finetune.errors import UserError

Compare = Callable[[str, str], float]
ALLOW_CODE = "FINETUNE_ALLOW_CODE_EXECUTION"
_FENCE = re.compile(r"```(?:python|py)?\s*\n(.*?)```", re.DOTALL)
# Limits are set inside the child, before it reads a line of what the model wrote.
_GUARD = """\
import resource, sys
seconds, megabytes = int(sys.argv[1]), int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
resource.setrlimit(resource.RLIMIT_AS, (megabytes << 20, megabytes << 20))
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
resource.setrlimit(resource.RLIMIT_NOFILE, (16, 16))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
exec(compile(sys.stdin.read(), "answer", "exec"), {"__name__": "__main__"})
"""


def make_python(*, function: str) -> Compare:
    """A function (output, reference) -> number of your own, named as 'package.module:function'."""
    module_name, _, name = function.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(
            f"there is no function '{function}': {error}",
            fix="write it as package.module:function, of a package that this environment can import",
        ) from None
    return lambda output, reference: float(found(output, reference))


def make_evaluate_metric(*, path: str, key: str, arguments: dict[str, Any] | None = None) -> Compare:
    """One value of a metric of the `evaluate` library, computed for each answer by itself.

    path: a folder or file with the metric's script; a bare name would be downloaded and is refused. key: which value of
    the metric's result. Metrics that mean something only over a whole set (corpus scores) are not for this.
    """
    if not Path(path).expanduser().exists():
        raise UserError(
            f"no metric script at '{path}'",
            why="a name without a local script would be downloaded",
            fix="give the folder of the metric's script",
        )
    import evaluate

    metric = evaluate.load(str(Path(path).expanduser()))
    options = arguments or {}

    def evaluate_metric(output: str, reference: str) -> float:
        found = metric.compute(predictions=[output], references=[reference], **options)
        if key not in found:
            raise UserError(f"the metric gives no '{key}'", fix=f"one of: {', '.join(found)}")
        return float(found[key])

    return evaluate_metric


def make_runs_code(
    *, seconds: int = 5, memory_megabytes: int = 512
) -> Callable[[str, Mapping[str, Any]], float]:
    """1.0 when the answer's Python code, followed by the item's `check.tests`, ends without an error.

    Off unless the environment variable FINETUNE_ALLOW_CODE_EXECUTION is 1. The code runs in a process of its own with
    limits on CPU, memory, file size and open files, in an empty folder, without this environment's variables. These are
    limits, not a jail: it can read what this user can read. Use a container for models that you do not trust.
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


def code_of(output: str) -> str:
    """The first fenced block of an answer, or the whole answer when there is none."""
    found = _FENCE.search(output)
    return found[1] if found else output


def _runs(program: str, seconds: int, memory_megabytes: int) -> bool:
    """Whether the program reaches its end. A word drawn for this run is printed there: an early exit is no success."""
    word = secrets.token_hex(16)
    with tempfile.TemporaryDirectory(prefix="finetune-code-") as folder, tempfile.TemporaryFile() as said:
        try:
            done = subprocess.run(
                [sys.executable, "-I", "-S", "-c", _GUARD, str(seconds), str(memory_megabytes)],
                input=f"{program}\nprint({word!r})\n".encode("utf-8", errors="replace"),
                cwd=folder,
                env={},
                stdout=said,  # a file, so that the limit on file size bounds what is printed
                stderr=subprocess.DEVNULL,
                timeout=seconds + 2,
                check=False,
                start_new_session=True,
            )
        except subprocess.TimeoutExpired:
            return False
        said.seek(0)
        return done.returncode == 0 and said.read().rstrip().endswith(word.encode())
