"""Profiles: named sets of dotted overrides inside a recipe. The chosen one lies between the file and `--set`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from collections.abc import Mapping as MappingABC

from finetune.errors import Fault, did_you_mean
from finetune.recipe.fit import PlacedFault, fit
from finetune.recipe.nodes import Entry, Mapping, Origin, Scalar, relabel, set_node
from finetune.recipe.schema import RecipeFile

_OUTSIDE = ("extends", "profile", "profiles", "recipe")


def with_dotted_entries(root: Mapping) -> tuple[Mapping, list[PlacedFault]]:
    """`root` with nested entries of profiles (`train: {epochs: 1}`) in their dotted form (`train.epochs: 1`)."""
    placed: list[PlacedFault] = []
    for name in profile_names(root):
        flat: dict[str, Entry] = {}
        for key, entry in _entries(root, name).items():
            for dotted, leaf in _flattened(key, entry):
                if dotted in flat:
                    what = f"profile '{name}' sets '{dotted}' twice"
                    placed.append((leaf.origin, Fault(what, str(leaf.origin), fix="delete one of the two")))
                flat[dotted] = leaf
        section, profile = root.entries["profiles"], _profile(root, name)
        if flat and isinstance(section.node, Mapping) and profile is not None:
            dotted_profile = Entry(Mapping(flat, profile.node.origin), profile.origin)
            profiles = Mapping({**section.node.entries, name: dotted_profile}, section.node.origin)
            root = Mapping({**root.entries, "profiles": Entry(profiles, section.origin)}, root.origin)
    return root, placed


def _flattened(key: str, entry: Entry) -> Iterator[tuple[str, Entry]]:
    if isinstance(entry.node, Mapping) and entry.node.entries:
        for below, inner in entry.node.entries.items():
            yield from _flattened(f"{key}.{below}", inner)
    else:
        yield key, entry


def apply_profile(root: Mapping, name: str) -> Mapping:
    """`root` with the entries of profile `name` set; faults of the entries come out of `profile_faults`."""
    entries = _entries(root, name)
    for key, entry in entries.items():
        path = tuple(key.split("."))
        if path[0] not in _OUTSIDE and all(path):
            origin = Origin("profile", entry.origin.label, entry.origin.line, entry.origin.column, name)
            root = set_node(root, path, relabel(entry.node, name), origin)
    return root


def chosen_profile(root: Mapping) -> tuple[str | None, list[PlacedFault]]:
    """The name under `profile:` (null: none) and, when no profile has it, the fault that lists the known ones."""
    entry = root.entries.get("profile")
    if entry is None or not isinstance(entry.node, Scalar) or entry.node.kind in ("null", "bool"):
        return None, []
    name, known = entry.node.text, profile_names(root)
    if name in known:
        return name, []
    fix = did_you_mean(name, known) if known else "this recipe has no profiles; add one under `profiles:`"
    origin = entry.node.origin
    return None, [(origin, Fault(f"unknown profile '{name}'", str(origin), fix=fix))]


def profile_faults(
    root: Mapping, renamed: MappingABC[str, str], own: Sequence[PlacedFault] = ()
) -> list[PlacedFault]:
    """Every fault that any profile would cause, used or not, so that a smoke profile cannot rot unseen.

    `own` are the faults of the recipe without a profile: a profile is not blamed for one about keys that it does not set.
    """
    known = {fault.what for _, fault in own}
    placed: list[PlacedFault] = []
    for name in profile_names(root):
        for key, entry in _entries(root, name).items():
            if key.split(".")[0] in _OUTSIDE or not all(key.split(".")):
                what = f"a profile cannot set '{key}'"
                placed.append(
                    (entry.origin, Fault(what, str(entry.origin), fix="remove it from the profile"))
                )
        _, found = fit(apply_profile(root, name), RecipeFile, renamed)
        keys = [f"'{key}'" for key in _entries(root, name)]
        placed += [
            (origin, fault)
            for origin, fault in found
            if fault.what not in known or any(key in fault.what for key in keys)
        ]
    return placed


def without_entries(root: Mapping, keep: str | None) -> Mapping:
    """`root` once the profile is applied: `profiles` holds at most the name of the chosen one, with nothing in it."""
    entries = {key: entry for key, entry in root.entries.items() if key != "profiles"}
    present = root.entries.get("profiles")
    if keep is not None and present is not None:
        applied = Mapping({keep: Entry(Mapping({}, present.origin), present.origin)}, present.origin)
        entries["profiles"] = Entry(applied, present.origin)
    return Mapping(entries, root.origin)


def profile_names(root: Mapping) -> list[str]:
    """Names of the profiles of a recipe, in the order written."""
    section = root.entries.get("profiles")
    return list(section.node.entries) if section is not None and isinstance(section.node, Mapping) else []


def _profile(root: Mapping, name: str) -> Entry | None:
    section = root.entries["profiles"].node
    return section.entries[name] if isinstance(section, Mapping) else None


def _entries(root: Mapping, name: str) -> dict[str, Entry]:
    profile = _profile(root, name)
    return profile.node.entries if profile is not None and isinstance(profile.node, Mapping) else {}
