"""Functions of the user's own, by name: `package.module:function`, or `file.py:function` beside the spec."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from finetune.digest import digest_file
from finetune.errors import UserError, did_you_mean


def load_function(name: str, *, folder: Path | None = None, where: str = "") -> Callable[..., Any]:
    """The function that `name` says; files are looked for in `folder`. The code of a spec's author runs here.

    Raises UserError when the name is not of that form, or the module or the function is not there or fails to load.
    """
    place, _, attribute = name.rpartition(":")
    if not place or not attribute.isidentifier():
        raise UserError(
            f"'{name}' names no function",
            where=where,
            fix="write package.module:function, or file.py:function",
        )
    module = _load_file((folder or Path()) / place, where) if place.endswith(".py") else _import(place, where)
    found = getattr(module, attribute, None)
    if not callable(found):
        known = [
            known for known in vars(module) if not known.startswith("_") and callable(vars(module)[known])
        ]
        raise UserError(
            f"{place} has no function '{attribute}'",
            where=where,
            fix=did_you_mean(attribute, known or ["none"]),
        )
    return found  # type: ignore[no-any-return]


def function_digest(name: str, *, folder: Path | None = None) -> str:
    """What a build's key must hold for the function: the digest of its file, or the name when it is in a package."""
    place = name.rpartition(":")[0]
    path = (folder or Path()) / place
    return f"{name}@{digest_file(path)}" if place.endswith(".py") and path.is_file() else name


def _import(module: str, where: str) -> Any:
    try:
        return importlib.import_module(module)
    except Exception as error:
        raise UserError(
            f"the module {module} cannot be imported: {type(error).__name__}: {error}",
            where=where,
            fix="install it into this environment, or give the path of a file: file.py:function",
        ) from error


def _load_file(path: Path, where: str) -> Any:
    if not path.is_file():
        raise UserError(f"there is no file {path}", where=where, fix="paths are relative to the spec")
    name = f"_finetune_user_{digest_file(path)[:16]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise UserError(
            f"{path} cannot be loaded: {type(error).__name__}: {error}", where=where, fix="mend the file"
        ) from error
    return module
