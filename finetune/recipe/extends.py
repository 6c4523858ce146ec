"""`extends:`: a recipe starts from another one and holds only what differs. The tree that comes out is whole.

Every file of the chain is read with places, so a value, and a fault in it, still points to the file that wrote it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path

from finetune.errors import Fault, UserError
from finetune.paths import find_declarative
from finetune.recipe.fit import PlacedFault
from finetune.recipe.nodes import Entry, Mapping, Scalar
from finetune.recipe.overrides import Override
from finetune.recipe.profiles import with_dotted_entries
from finetune.recipe.yaml_loader import read_tree
from finetune.recipe.yaml_nodes import shown_path

_KEY = "extends"
_OWN = ("name", "description")  # they tell one recipe from another, so none is taken over


@dataclass(frozen=True)
class Chain:
    """A recipe merged over all that it extends, profiles in dotted form.

    `faults` are those of the texts and of `extends` itself. `whole` is False when a base could not be read: keys that the
    tree lacks are then no fault of the recipe.
    """

    root: Mapping
    faults: list[Fault]
    placed: list[PlacedFault]
    whole: bool


def read_chain(file: Path) -> Chain:
    """Read the recipe at `file` and its bases. Raises UserError when `file` itself holds no mapping."""
    text, faults = read_tree(file)
    root, placed = with_dotted_entries(text)
    root, named = _without_name(root)
    layers, seen, whole = [root], [file.resolve()], True
    while named is not None:
        try:
            base = _base_path(named, seen)
            text, found = read_tree(base)
        except UserError as error:
            faults += [replace(fault, where=fault.where or str(named.origin)) for fault in error.faults]
            whole = False
            break
        root, twice = with_dotted_entries(text)
        root, named = _without_name(_without(root, _OWN))
        faults, placed = faults + found, placed + twice
        layers.append(root)
        seen.append(base)
    return Chain(reduce(_over, reversed(layers)), faults, placed, whole)


def without_extends(overrides: Sequence[Override]) -> tuple[list[Override], list[Fault]]:
    """The overrides that set other keys, and a fault for each that would change the base under a recipe."""
    kept, faults = [], []
    for override in overrides:
        if override.key.split(".")[0].strip() != _KEY:
            kept.append(override)
            continue
        fix = f"write a recipe file with `{_KEY}:`, or set the keys that differ"
        faults.append(Fault(f"--set cannot change '{_KEY}'", str(override.origin), fix=fix))
    return kept, faults


def _without_name(root: Mapping) -> tuple[Mapping, Scalar | None]:
    """The tree without `extends`, and the name under it (null: none). What can be no name stays, for the schema to refuse."""
    entry = root.entries.get(_KEY)
    if entry is None or not isinstance(entry.node, Scalar) or entry.node.kind == "bool":
        return root, None
    return _without(root, (_KEY,)), None if entry.node.kind == "null" else entry.node


def _base_path(named: Scalar, seen: Sequence[Path]) -> Path:
    """The file that `named` means, from the last file of the chain. Raises UserError when it is absent or was seen."""
    where, file = str(named.origin), seen[-1]
    base = find_declarative("recipes", named.text, relative_to=file.parent, where=where, working_folder=False)
    if base not in seen:
        return base
    if base == file:
        fix = f"name another recipe, or delete `{_KEY}`"
        raise UserError("a recipe cannot extend itself", where=where, fix=fix)
    circle = " -> ".join(shown_path(path) for path in (*seen[seen.index(base) :], base))
    fix = f"delete `{_KEY}` in the one that is to be the base of all"
    raise UserError(f"recipes extend one another in a circle: {circle}", where=where, fix=fix)


def _over(below: Mapping, above: Mapping) -> Mapping:
    """`above` merged over `below`: mappings key by key, all else replaces. A section of both stands where `above` has it,
    so what it lacks is to be added there.
    """
    entries = dict(below.entries)
    for key, entry in above.entries.items():
        present = entries.get(key)
        if present is not None and isinstance(present.node, Mapping):
            if isinstance(entry.node, Mapping):
                entry = Entry(_over(present.node, entry.node), entry.origin)
            elif isinstance(entry.node, Scalar) and entry.node.kind == "null" and not entry.node.text:
                continue  # `train:` with nothing below it changes nothing; `train: null` takes the defaults
        entries[key] = entry
    return Mapping(entries, above.origin)


def _without(root: Mapping, keys: Sequence[str]) -> Mapping:
    return Mapping({key: entry for key, entry in root.entries.items() if key not in keys}, root.origin)
