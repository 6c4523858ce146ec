"""The files that a recipe names: whether they exist, before anything is built or loaded."""

from __future__ import annotations

from dataclasses import replace

from finetune.errors import Fault, UserError
from finetune.paths import find_declarative
from finetune.recipe.schema import Recipe
from finetune.recipe.yaml_loader import Loaded


def missing_files(loaded: Loaded[Recipe]) -> list[Fault]:
    """A fault for each dataset spec and suite that cannot be found, placed where the recipe names it."""
    recipe = loaded.value
    named = [("data", "data.spec", recipe.data.spec)]
    named += [("eval", "eval.suites", suite) for suite in recipe.eval.suites]
    faults: list[Fault] = []
    for kind, key, name in named:
        try:
            find_declarative(kind, name, relative_to=loaded.path.parent)
        except UserError as error:
            faults += [replace(fault, where=loaded.where(key)) for fault in error.faults]
    return faults
