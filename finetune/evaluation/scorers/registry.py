"""Every scorer by name, with its parameters, and a digest of its code so that a changed scorer is never unnoticed."""

from __future__ import annotations

import importlib.util
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from finetune.digest import digest_file
from finetune.errors import UserError, did_you_mean
from finetune.evaluation.scorers import checks, extension, json_object, measured, optional, text

Compare = Callable[[str, str], float]
Check = Mapping[str, Any] | None
Score = Callable[[str, str, Check], float]
_PACKAGE = "finetune.evaluation.scorers"


@dataclass(frozen=True)
class ScorerKind:
    """A scorer before its parameters are known. `make(**parameters)` gives the function (output, reference) -> score;
    with `by_item`, `make` gives (output, check) -> score, where the check is the item's own.

    Scores lie in [0, 1] and higher is better, unless `higher_is_better` says otherwise.
    """

    name: str
    make: Callable[..., Callable[[str, Any], float]]
    summary: str
    module: ModuleType
    task: str = "generate"
    higher_is_better: bool = True
    by_item: bool = False
    per_token: bool = False  # only arms with one tokenizer can be compared by it

    @property
    def parameters(self) -> tuple[str, ...]:
        return tuple(inspect.signature(self.make).parameters)

    @property
    def code_digest(self) -> str:
        """Changes with the source of the scorer's module or of any scorer module that it uses."""
        return "-".join(digest_file(path)[:16] for path in sorted(_sources(self.module)))


def _kind(name: str, make: Callable[..., Any], described: Callable[..., Any], **traits: Any) -> ScorerKind:
    module = inspect.getmodule(described)
    assert module is not None
    summary = (described.__doc__ or "").split("\n\n")[0].split(". ")[0].strip().rstrip(".")
    return ScorerKind(name, make, " ".join(summary.split()), module, **traits)


def _plain(function: Compare, **traits: Any) -> ScorerKind:
    """A scorer without parameters."""
    return _kind(function.__name__, lambda: function, function, **traits)


def _made(make: Callable[..., Callable[[str, Any], float]], **traits: Any) -> ScorerKind:
    """A scorer with parameters, made by `make_<name>`."""
    return _kind(make.__name__.removeprefix("make_"), make, make, **traits)


def _texts(function: Compare, *, per_token: bool) -> ScorerKind:
    return _plain(function, task="text", higher_is_better=False, per_token=per_token)


SCORERS: dict[str, ScorerKind] = {
    kind.name: kind
    for kind in (
        _plain(json_object.exact_match),
        _plain(json_object.valid_json),
        _plain(json_object.intent_accuracy),
        _plain(json_object.slot_f1),
        _plain(text.text_match),
        _plain(text.normalised_match),
        _made(text.make_contains),
        _made(text.make_regex),
        _made(text.make_numeric),
        _kind("check", lambda: checks.meets, checks.meets, by_item=True),
        _made(optional.make_chrf),
        _made(optional.make_bleu),
        _made(optional.make_rouge),
        _made(optional.make_json_schema),
        _made(extension.make_python),
        _made(extension.make_evaluate_metric),
        _made(extension.make_runs_code, by_item=True),
        _plain(measured.choice_accuracy, task="choice"),
        _plain(measured.choice_accuracy_per_token, task="choice"),
        _plain(measured.choice_accuracy_per_byte, task="choice"),
        _texts(measured.nll_per_token, per_token=True),
        _texts(measured.bits_per_byte, per_token=False),
        _texts(measured.kl_per_token, per_token=True),
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
        score = kind.make(**parameters)
    except (TypeError, ValueError, re.error) as error:
        raise UserError(f"scorer '{name}' cannot be made: {error}", where=where) from error
    if kind.by_item:
        return lambda output, reference, check: score(output, check or {})
    return lambda output, reference, check: score(output, reference)


def scorer_digest(name: str, parameters: Mapping[str, Any]) -> str:
    """Of the scorer's code; for a Python function or a metric script, of that file too."""
    own = find_scorer(name).code_digest
    if name == "python":
        spec = importlib.util.find_spec(str(parameters.get("function", "")).partition(":")[0])
        files = [Path(spec.origin)] if spec is not None and spec.origin else []
    elif name == "evaluate_metric":
        path = Path(str(parameters.get("path", ""))).expanduser()
        files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
    else:
        files = []
    return "-".join([own, *(digest_file(path)[:16] for path in files if path.is_file())])


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
