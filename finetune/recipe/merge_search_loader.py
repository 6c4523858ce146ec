"""Read a search over merges and write out every candidate, with all faults of all merges told before anything is built."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from finetune.errors import Fault, UserError
from finetune.paths import find_declarative
from finetune.recipe.merge_loader import LoadedMerge, load_merge, method_of
from finetune.recipe.merge_methods import METHOD_RULES
from finetune.recipe.merge_search_section import CandidateSection, MergeSearch
from finetune.recipe.yaml_loader import load_typed, read_tree
from finetune.recipe.yaml_nodes import shown_path

_MANY = 64  # candidates: each costs an evaluation, and a chance of a lucky winner


@dataclass(frozen=True, slots=True)
class Candidate:
    """One merge of a search: a merge recipe with overrides, and a weight for each parent where given."""

    name: str
    path: Path
    overrides: tuple[str, ...]
    weights: tuple[float, ...] | None

    def load(self, base: str, parents: Sequence[str]) -> LoadedMerge:
        """The merge recipe over models of these names. Where a method runs from its base to one model (SLERP), two parents
        are its two ends. Raises UserError with every fault."""
        models, weights = list(parents), self.weights
        rule = METHOD_RULES.get(method_of(read_tree(self.path)[0]))
        if len(models) == 2 and rule is not None and rule.base == "end":
            base, models, weights = models[0], models[1:], weights and weights[1:]
        return load_merge(self.path, overrides=self.overrides, base=base, models=models, weights=weights)


@dataclass(frozen=True, slots=True)
class LoadedSearch:
    """A search that can be done, its file, and its candidates in order."""

    recipe: MergeSearch
    path: Path
    candidates: tuple[Candidate, ...]


def load_search(path: Path, overrides: Sequence[str] = ()) -> LoadedSearch:
    """Read `path`. Raises UserError with every fault of the file, or of the merges that it asks for."""
    loaded = load_typed(path, MergeSearch, overrides=overrides)
    recipe = loaded.value
    parents = [parent.name for parent in recipe.parents]
    faults: list[Fault] = []
    candidates: list[Candidate] = []
    for number, section in enumerate(recipe.candidates):
        where = loaded.where(f"candidates.{number}.merge")
        for weights in section.weights or []:
            if len(weights) != len(parents):
                what = f"{len(weights)} weights {weights} for {len(parents)} parents"
                faults.append(Fault(what, where, fix=f"give one each for {', '.join(parents)}"))
        try:
            candidates += _written_out(section, recipe, loaded.path, where)
        except UserError as error:
            faults += error.faults
    for candidate in () if faults else candidates:
        try:
            merge = candidate.load("base", parents).recipe
            if merge.tokenizer or merge.tokenizer_source or merge.chat_template is not None:
                what = f"{candidate.name} changes the tokenizer or the chat template"
                why = "all models of a search are asked in the same tokens"
                faults.append(
                    Fault(what, shown_path(candidate.path), why, "merge it with finetune merge models")
                )
        except UserError as error:
            faults += [
                Fault(f"{candidate.name}: {one.what}", one.where, one.why, one.fix) for one in error.faults
            ]
    names = [candidate.name for candidate in candidates]
    repeated = sorted({name for name in names if names.count(name) > 1})
    faults += [
        Fault(f"the candidate '{name}' stands in the recipe twice", loaded.where("candidates"))
        for name in repeated
    ]
    if len(candidates) > _MANY:
        faults.append(
            Fault(f"{len(candidates)} candidates, at most {_MANY} are tried", loaded.where("candidates"))
        )
    if faults:
        raise UserError(list(dict.fromkeys(faults)))
    return LoadedSearch(recipe, path, tuple(candidates))


def _written_out(section: CandidateSection, recipe: MergeSearch, path: Path, where: str) -> list[Candidate]:
    """The candidates of one entry: every list of weights with every point of the grid."""
    file = find_declarative("merges", section.merge, relative_to=path.parent, where=where)
    dtype = [] if recipe.dtype is None else [f"dtype={recipe.dtype}"]
    found = []
    lists: Sequence[list[float] | None] = section.weights or [None]
    for weights in lists:
        for values in itertools.product(*section.over.values()):
            grid = list(zip(section.over, values, strict=True))
            told = [file.stem, *([":".join(f"{one:g}" for one in weights)] if weights else [])]
            told += [f"{key.rpartition('.')[2]} {value:g}" for key, value in grid]
            overrides = (*(f"{key}={value!r}" for key, value in grid), *dtype)
            found.append(Candidate(" ".join(told), file, overrides, tuple(weights) if weights else None))
    return found
