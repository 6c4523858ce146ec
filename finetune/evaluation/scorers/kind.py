"""What a scorer is: a function from an answer to a number, its parameters, and what its number means."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, get_type_hints

from pydantic import TypeAdapter, ValidationError

from finetune.digest import digest_file

Check = Mapping[str, Any] | None
Score = Callable[[str, str, Check], float]
WellFormed = Callable[[str], bool]
Takes = Literal["reference", "check", "both"]
_PACKAGE = "finetune.evaluation.scorers"
_SENTENCE_END = re.compile(r"(?<!e\.g)(?<!i\.e)\.\s")


@dataclass(frozen=True)
class ScorerKind:
    """A scorer before its parameters are known. `make(**parameters)` gives the function (output, reference) -> score.

    takes: `check`: (output, check) -> score, where the check is the item's own; `both`: (output, reference, check).
    format_of: with the same parameters, gives the function that says whether an answer has the form that the scorer
    needs at all, so that a format failure is told from a wrong answer; None for scorers that take any text.
    Higher scores are better, unless `higher_is_better` says otherwise.
    """

    name: str
    make: Callable[..., Callable[..., float]]
    summary: str
    module: ModuleType | None
    task: str = "generate"
    higher_is_better: bool = True
    takes: Takes = "reference"
    per_token: bool = False  # only arms with one tokenizer can be compared by it
    open_ended: bool = False  # in nats or bits, never a share, even where the numbers are small
    asks_a_model: bool = False  # scored after the answers are saved, by a judge; a score may be missing
    format_of: Callable[..., WellFormed] | None = None
    parameters: tuple[str, ...] = ()
    types: Mapping[str, Any] = field(default_factory=dict)  # of the parameters, where they are known

    @property
    def code_digest(self) -> str:
        """Changes with the source of the scorer's module or of any scorer module that it uses."""
        if self.module is None:
            return ""
        return "-".join(digest_file(path)[:16] for path in sorted(_sources(self.module)))

    def bound(self, parameters: Mapping[str, Any]) -> ScorerKind:
        """The kind as these parameters make it: some scorers are told which way is better."""
        if "higher_is_better" not in self.parameters or "higher_is_better" not in parameters:
            return self
        return replace(self, higher_is_better=bool(parameters["higher_is_better"]))

    def misfit(self, parameters: Mapping[str, Any]) -> str:
        """Which parameter has a value of the wrong type, and what it should be; empty when none has.

        Nothing is converted: 'no' is text, which Python would take for true.
        """
        for name, value in parameters.items():
            try:
                TypeAdapter(self.types.get(name, Any)).validate_python(value, strict=True)
            except ValidationError as error:
                wanted = error.errors()[0]["msg"].replace("Input should be ", "should be ")
                return f"parameter '{name}' {wanted}, not {value!r:.80}"
        return ""

    def score(self, parameters: Mapping[str, Any]) -> Score:
        """The function (output, reference, check) -> score. Raises what `make` raises for parameters that do not fit."""
        function = self.make(**parameters)
        if self.takes == "both":
            return function
        if self.takes == "check":
            return lambda output, reference, check: function(output, check or {})
        return lambda output, reference, check: function(output, reference)

    def well_formed(self, parameters: Mapping[str, Any]) -> WellFormed | None:
        return self.format_of(**parameters) if self.format_of is not None else None


def plain(function: Callable[[str, str], float], **traits: Any) -> ScorerKind:
    """A scorer without parameters."""
    return _kind(function.__name__, lambda: function, function, **traits)


def made(make: Callable[..., Callable[..., float]], **traits: Any) -> ScorerKind:
    """A scorer with parameters, made by `make_<name>`."""
    names = tuple(inspect.signature(make).parameters)
    types = get_type_hints(make)
    return _kind(make.__name__.removeprefix("make_"), make, make, parameters=names, types=types, **traits)


def _kind(name: str, make: Callable[..., Any], described: Callable[..., Any], **traits: Any) -> ScorerKind:
    return ScorerKind(name, make, summary_of(described), inspect.getmodule(described), **traits)


def summary_of(described: Callable[..., Any]) -> str:
    """The first sentence of a docstring."""
    first = (described.__doc__ or "").split("\n\n")[0]
    first = _SENTENCE_END.split(first)[0].strip().rstrip(".")
    return " ".join(first.split())


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
