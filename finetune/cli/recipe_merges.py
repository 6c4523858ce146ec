"""`finetune recipe validate` for merges: merge recipes, mergekit's files, and searches over merges."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_MERGEKIT = re.compile(rb"^merge_method:", re.MULTILINE)
_KINDS = ("searches", "merges", "recipes")


def shipped_merges() -> list[str]:
    """Names of the shipped merge recipes and searches."""
    from finetune.paths import shipped_names

    return [*shipped_names("merges"), *shipped_names("searches")]


def kind_of(name: str) -> str:
    """Which of searches, merges and recipes a file is; what cannot be found is left to the reader of recipes to tell."""
    from contextlib import suppress

    from finetune.errors import UserError
    from finetune.paths import find_declarative, version_keys

    if (Path(name) / "recipe.resolved.yaml").is_file():
        return "recipes"
    for kind, key in (("searches", b"merge_search"), ("merges", b"merge")):
        with suppress(UserError):
            path = find_declarative(kind, name)
            keys = version_keys(path)
            if key in keys or (kind == "merges" and not keys and _MERGEKIT.search(path.read_bytes())):
                return kind
    return "recipes"


def valid_merge(name: str, kind: str, overrides: Sequence[str]) -> dict[str, Any]:
    """What a merge recipe or a search does, once it and everything it names is checked. Raises UserError with every fault."""
    from finetune.paths import find_declarative

    path = find_declarative(kind, name)
    return _search(name, path, overrides) if kind == "searches" else _merge(name, path, overrides)


def _merge(name: str, path: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """A recipe that leaves its models to the command line is checked with as many as its method takes."""
    from finetune.recipe.merge_loader import load_merge, stand_ins

    base, models = stand_ins(path, overrides)
    recipe = load_merge(path, overrides=overrides, base=base, models=models).recipe
    sliced = f"{len(recipe.slices)} slices" if recipe.slices else f"{len(recipe.models or ())} models"
    told = "models named when it runs" if models else sliced
    return {
        "recipe": name,
        "name": path.stem,
        "does": f"{recipe.merge_method}, dialect {recipe.spoken}, {told}",
    }


def _search(name: str, path: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """A search with its merge recipes, its suites, and the training recipes of its parents."""
    from finetune.errors import Fault, UserError
    from finetune.evaluation.candidates import suites_to_win
    from finetune.evaluation.merge_claims import standing_claims
    from finetune.evaluation.suite import load_suite
    from finetune.paths import find_declarative
    from finetune.recipe.merge_search_loader import load_search
    from finetune.recipe.resolve import read_recipe

    loaded = load_search(path, overrides)
    faults: list[Fault] = []
    suites = []
    for suite in loaded.recipe.suites:
        try:
            suites.append(load_suite(suite, relative_to=path.parent, where=f"{path}: suites"))
        except UserError as error:
            faults += error.faults
    for parent in loaded.recipe.parents:
        try:
            if parent.recipe is not None:
                where = f"{path}: parents, {parent.name}"
                read_recipe(find_declarative("recipes", parent.recipe, relative_to=path.parent, where=where))
        except UserError as error:
            faults += error.faults
    if faults:
        raise UserError(faults)
    suites_to_win(suites, loaded.recipe.choose)
    standing_claims(suites, loaded.recipe.confirm, {})
    n = len(loaded.candidates)
    return {"recipe": name, "name": loaded.recipe.name, "does": f"search over {n} merge{'s' * (n > 1)}"}
