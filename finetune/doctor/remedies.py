"""Writing what mends a recipe into its file: only the keys that change, comments and order kept."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from io import StringIO
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap

from finetune.errors import UserError
from finetune.paths import write_atomic
from finetune.recipe.schema import Recipe
from finetune.recipe.yaml_loader import Loaded

_WIDTH = 10_000  # no line of the file is folded


def mend_recipe(loaded: Loaded[Recipe], changes: Mapping[str, Any]) -> str:
    """Write `changes` (dotted key -> value) into the recipe's own file; returns the difference as a patch.

    A value that a profile gives is changed there. Keys that a base recipe gives are written into this file, which goes before
    it. Raises UserError for a value that a `--set` flag gives: the flag would win over the file.
    """
    path = loaded.path
    before = path.read_text(encoding="utf-8")
    mended = mended_text(before, {_place(loaded, key): value for key, value in changes.items()})
    if mended != before:
        write_atomic(path, mended)
    lines = difflib.unified_diff(
        before.splitlines(keepends=True), mended.splitlines(keepends=True), str(path), f"{path} (mended)"
    )
    return "".join(lines)


def mended_text(text: str, changes: Mapping[tuple[str, ...], Any]) -> str:
    """The YAML text with values at paths of keys replaced or added; a section that is not there is added at the end."""
    writer = YAML()
    writer.preserve_quotes = True
    writer.width = _WIDTH
    writer.indent(mapping=2, sequence=4, offset=2)
    root = writer.load(text)
    if root is None:
        root = CommentedMap()
    for keys, value in changes.items():
        node = root
        for key in keys[:-1]:
            if not isinstance(node.get(key), Mapping):
                node[key] = CommentedMap()
            node = node[key]
        node[keys[-1]] = value
    stream = StringIO()
    writer.dump(root, stream)
    return stream.getvalue()


def _place(loaded: Loaded[Recipe], key: str) -> tuple[str, ...]:
    """Where in the file the value of a key is written; keys of a profile are dotted there."""
    origin = loaded.origins.get(key)
    if origin is not None and origin.source == "set":
        raise UserError(
            f"{key} comes from the command line, so the file cannot mend it",
            where=origin.label,
            fix=f"leave out {origin.label}",
        )
    if (
        origin is not None
        and origin.source == "profile"
        and Path(origin.label).resolve() == loaded.path.resolve()
    ):
        return ("profiles", origin.profile, key)
    return tuple(key.split("."))
