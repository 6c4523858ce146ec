"""Scorers from outside: a Python function of the user's, or a metric of the `evaluate` library.

What they load is code of the user's choice. It is named in the suite, hashed into the suite's digest where it is a file
(or pinned by its revision where it is not), and never fetched from a network without being named with a revision.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from finetune.errors import UserError

Compare = Callable[[str, str], float]
Whole = Callable[[str, str, Any], float]


def make_python(
    *, function: str, arguments: Mapping[str, Any] | None = None, higher_is_better: bool = True
) -> Whole:
    """A function of your own, 'package.module:function', that gives a number for (output, reference).

    With a third positional parameter it is given the item's `check` too. arguments: passed on by keyword.
    """
    module_name, _, name = function.partition(":")
    try:
        with redirect_stdout(sys.stderr):
            found = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(
            f"there is no function '{function}': {error}",
            fix="write it as package.module:function, of a package that this environment can import",
        ) from None
    except (Exception, SystemExit) as error:  # whatever a stranger's module does while it is loaded
        raise UserError(
            f"the module of '{function}' cannot be loaded: {type(error).__name__}: {error}", fix="mend it"
        ) from error
    return call_function(found, function, arguments or {})


def call_function(function: Callable[..., Any], name: str, arguments: Mapping[str, Any]) -> Whole:
    """The user's function as a scorer; whatever goes wrong inside it is a user error that names it.

    Raises ValueError when it cannot take (output, reference) and `arguments`.
    """
    taken = [
        one
        for one in inspect.signature(function).parameters.values()
        if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD) and one.name not in arguments
    ]
    wants_check = len([one for one in taken if one.default is one.empty]) > 2
    try:
        inspect.signature(function).bind(*["", "", None][: 3 if wants_check else 2], **arguments)
    except TypeError as error:
        raise ValueError(f"{name} cannot be called with (output, reference): {error}") from None

    def python(output: str, reference: str, check: Any) -> float:
        given = (output, reference, check) if wants_check else (output, reference)
        try:
            with redirect_stdout(sys.stderr):  # what it prints must not mix with a command's answer
                return float(function(*given, **arguments))
        except (Exception, SystemExit) as error:  # whatever a stranger's code raises
            raise UserError(
                f"the scorer function {name} gave no number: {type(error).__name__}: {error}",
                fix="mend the function: it must return a number for every answer",
            ) from error

    return python


def make_evaluate_metric(
    *,
    path: str,
    key: str,
    revision: str | None = None,
    arguments: Mapping[str, Any] | None = None,
    higher_is_better: bool = True,
) -> Compare:
    """One value of a metric of the `evaluate` library, computed for each answer by itself.

    path: a folder or file with the metric's script, or the hub id of a metric together with `revision`, the commit or tag
    to take. key: which value of the metric's result. Metrics that mean something only over a whole set (corpus scores)
    are not for this.
    """
    metric = _load_metric(path, revision)
    options = dict(arguments or {})

    def evaluate_metric(output: str, reference: str) -> float:
        try:
            with redirect_stdout(sys.stderr):
                found = metric.compute(predictions=[output], references=[reference], **options)
            value = found.get(key)
            one = value[0] if isinstance(value, list) and len(value) == 1 else value
            if one is not None:
                return float(one)
        except Exception as error:  # whatever a stranger's code raises
            raise UserError(
                f"the metric '{path}' gave no number: {type(error).__name__}: {error}",
                fix="mend its script or `arguments`",
            ) from error
        raise UserError(f"the metric gives no '{key}'", fix=f"one of: {', '.join(found)}")

    return evaluate_metric


def _load_metric(path: str, revision: str | None) -> Any:
    local = Path(path).expanduser()
    if not local.exists() and revision is None:
        raise UserError(
            f"no metric script at '{path}', and no revision to fetch one by",
            why="a metric from the hub is code that runs here, and without a revision it can change from day to day",
            fix="give the folder of the metric's script, or add `revision` with a commit or tag",
        )
    import evaluate

    try:
        if local.exists():
            return evaluate.load(str(local), keep_in_memory=True)
        return evaluate.load(path, revision=revision, module_type="metric", keep_in_memory=True)
    except ImportError as error:
        raise UserError(
            f"the metric '{path}' cannot be loaded: {error}", fix="install what it names"
        ) from None
    except (OSError, ValueError) as error:
        raise UserError(
            f"the metric '{path}' at revision {revision} cannot be loaded: {error}",
            why="it is fetched from the hub unless it is in the cache of `evaluate`",
            fix="check name and revision, and that HF_HUB_OFFLINE is not set; offline, give the folder of its script",
        ) from None
