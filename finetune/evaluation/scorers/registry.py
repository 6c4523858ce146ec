"""Every scorer by name, with its parameters, and a digest of its code so that a changed scorer is never unnoticed."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from finetune.digest import digest_file
from finetune.errors import UserError, did_you_mean
from finetune.evaluation.scorers import json_object

Score = Callable[[str, str], float]
_PACKAGE = "finetune.evaluation.scorers"


@dataclass(frozen=True)
class ScorerKind:
    """A scorer before its parameters are known. `make(**parameters)` gives the function (output, reference) -> score.

    Scores lie in [0, 1] and higher is better, unless `higher_is_better` says otherwise.
    """

    name: str
    make: Callable[..., Score]
    summary: str
    module: ModuleType
    higher_is_better: bool = True

    @property
    def parameters(self) -> tuple[str, ...]:
        return tuple(inspect.signature(self.make).parameters)

    @property
    def code_digest(self) -> str:
        """Changes with the source of the scorer's module or of any scorer module that it uses."""
        return "-".join(digest_file(path)[:16] for path in sorted(_sources(self.module)))


def _first_sentence(function: Score) -> str:
    return (function.__doc__ or "").split(".")[0].strip().replace("\n", " ")


def _plain(function: Score) -> ScorerKind:
    """A scorer without parameters."""
    module = inspect.getmodule(function)
    assert module is not None
    return ScorerKind(function.__name__, lambda: function, _first_sentence(function), module)


SCORERS: dict[str, ScorerKind] = {
    kind.name: kind
    for kind in (
        _plain(json_object.exact_match),
        _plain(json_object.valid_json),
        _plain(json_object.intent_accuracy),
        _plain(json_object.slot_f1),
    )
}


def find_scorer(name: str, where: str = "") -> ScorerKind:
    """The scorer of that name; an unknown one is a user error with the nearest known name."""
    if name not in SCORERS:
        raise UserError(f"no scorer '{name}'", where=where, fix=did_you_mean(name, SCORERS))
    return SCORERS[name]


def make_scorer(name: str, parameters: Mapping[str, Any], where: str = "") -> Score:
    """Bind a scorer's parameters; unknown, missing and impossible ones are user errors."""
    kind = find_scorer(name, where)
    unknown = sorted(set(parameters) - set(kind.parameters))
    if unknown:
        raise UserError(
            f"scorer '{name}' has no parameter '{unknown[0]}'",
            where=where,
            fix=did_you_mean(unknown[0], kind.parameters) if kind.parameters else "it takes no parameters",
        )
    try:
        return kind.make(**parameters)
    except (TypeError, ValueError) as error:
        raise UserError(f"scorer '{name}' cannot be made: {error}", where=where) from error


def _sources(module: ModuleType, seen: set[Path] | None = None) -> set[Path]:
    seen = set() if seen is None else seen
    path = Path(str(module.__file__))
    if path in seen:
        return seen
    seen.add(path)
    for value in vars(module).values():
        owner = value if isinstance(value, ModuleType) else inspect.getmodule(value)
        if owner is not None and owner.__name__.startswith(f"{_PACKAGE}."):
            _sources(owner, seen)
    return seen
