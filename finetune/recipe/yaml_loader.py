"""Load any declarative YAML file (recipe, dataset spec, suite) into its closed pydantic schema, with every fault placed.

loaded = load_typed(path, Suite, overrides=["decoding.max_new_tokens=64"])
loaded.value            # the model
loaded.where("tasks")   # 'suite.yaml:12:3', for faults that are found later
"""

from __future__ import annotations

from collections.abc import Mapping as MappingABC
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

from pydantic import BaseModel

from finetune.errors import Fault, UserError
from finetune.recipe.fit import PlacedFault, fit
from finetune.recipe.nodes import DEFAULT, Entry, Mapping, Origin, Scalar, from_plain, leaves
from finetune.recipe.overrides import apply_overrides, parse_overrides
from finetune.recipe.yaml_nodes import parse_yaml, read_yaml_text, shown_path

Model = TypeVar("Model", bound=BaseModel)


@dataclass(frozen=True)
class Loaded(Generic[Model]):
    """A validated model, the file it came from, and the origin of every value that the file or a flag gave."""

    value: Model
    path: Path
    origins: MappingABC[str, Origin]

    def where(self, key: str) -> str:
        """The place of a dotted key for a later fault: 'file:line:column', '--set …', or the file for a default."""
        origin = self.origins.get(key)
        return shown_path(self.path) if origin is None or origin.source == "default" else str(origin)

    def folder(self, key: str) -> Path:
        """Where relative paths under a dotted key start: beside the file that wrote the value, which may be a base."""
        origin = self.origins.get(key)
        written = origin is not None and origin.source in ("file", "profile")
        return (Path(origin.label) if origin is not None and written else self.path).parent


def load_typed(
    path: Path | str,
    model: type[Model],
    *,
    overrides: Sequence[str] = (),
    defaults: MappingABC[str, Any] | None = None,
    renamed: MappingABC[str, str] | None = None,
) -> Loaded[Model]:
    """Read `path` into `model`, with `--set` overrides on top and `defaults` (top-level keys) below the file.

    `renamed` maps names that users know from other tools to dotted keys, for the remedy of an unknown key.
    Raises UserError with every fault of the file and of the overrides at once.
    """
    file = Path(path)
    root, faults = read_tree(file)
    parsed, override_faults = parse_overrides(overrides)
    faults += override_faults
    root = with_defaults(apply_overrides(root, parsed), defaults or {})
    value, placed = fit(root, model, renamed or {})
    raise_faults(faults, placed)
    return Loaded(cast(Model, value), file, dict(leaves(root)))


def read_tree(path: Path) -> tuple[Mapping, list[Fault]]:
    """The tree of a file and the faults of its text. Raises UserError when there is no mapping to go on with."""
    text = read_yaml_text(path)
    shown = shown_path(path)
    node, faults = parse_yaml(text, lambda line, column: Origin("file", shown, line, column))
    if isinstance(node, Mapping):
        return node, faults
    blank = node is None or (isinstance(node, Scalar) and node.kind == "null" and not node.text)
    if blank and not faults:
        faults = [Fault("the file is empty", f"{shown}:1:1", fix="write at least the required keys")]
    elif node is not None and not blank:
        what = "the file must hold a mapping (`key: value` lines)"
        faults = [*faults, Fault(what, str(node.origin), fix="write `key: value` lines at the top level")]
    raise_faults(faults, [])
    raise AssertionError("a file without a mapping has a fault")


def with_defaults(root: Mapping, defaults: MappingABC[str, Any]) -> Mapping:
    """`root` with the top-level `defaults` that it lacks."""
    lacking = {
        key: Entry(from_plain(v, DEFAULT), DEFAULT) for key, v in defaults.items() if key not in root.entries
    }
    return Mapping({**root.entries, **lacking}, root.origin)


def raise_faults(faults: Sequence[Fault], placed: Sequence[PlacedFault]) -> None:
    """Raise every fault once, each `what` on one line, those of the file in its order; return when there is none."""
    ordered = sorted(placed, key=lambda pair: (pair[0].label, pair[0].line, pair[0].column))
    one_line = [
        replace(fault, what=" ".join(fault.what.split()))
        for fault in (*faults, *(fault for _, fault in ordered))
    ]
    unique = list(dict.fromkeys(one_line))
    if unique:
        raise UserError(unique)
