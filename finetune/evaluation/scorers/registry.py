"""Every scorer by name, with its parameters, and a digest of its code so that a changed scorer is never unnoticed."""

from __future__ import annotations

import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from finetune.digest import digest_file
from finetune.errors import UserError, did_you_mean
from finetune.evaluation.scorers import (
    checks,
    choice_letter,
    code,
    extension,
    json_object,
    json_schema,
    judged,
    measured,
    overlap,
    task_metric,
    text,
)
from finetune.evaluation.scorers.kind import Score, ScorerKind, WellFormed, made, plain, summary_of

PLUGINS = "finetune.scorers"  # entry points of other packages: name = package.module:function


def _texts(function: Callable[[str, str], float], *, per_token: bool) -> ScorerKind:
    return plain(function, task="text", higher_is_better=False, per_token=per_token, open_ended=True)


def _object(function: Callable[[str, str], float]) -> ScorerKind:
    return plain(function, format_of=lambda: json_object.is_object)


SCORERS: dict[str, ScorerKind] = {
    kind.name: kind
    for kind in (
        _object(json_object.exact_match),
        plain(json_object.valid_json),
        _object(json_object.intent_accuracy),
        _object(json_object.slot_f1),
        made(json_object.make_field_f1, format_of=json_object.format_of_field_f1),
        made(json_schema.make_json_schema, format_of=json_schema.format_of_json_schema),
        plain(text.text_match),
        plain(text.normalised_match),
        made(text.make_contains),
        made(text.make_regex),
        made(text.make_regex_match, format_of=text.format_of_regex_match),
        made(text.make_numeric, format_of=text.format_of_numeric),
        made(choice_letter.make_choice_letter, format_of=choice_letter.format_of_choice_letter),
        made(checks.make_check, takes="check"),
        made(overlap.make_chrf),
        made(overlap.make_bleu),
        made(overlap.make_rouge),
        made(extension.make_python, takes="both"),
        made(extension.make_evaluate_metric),
        made(task_metric.make_lm_eval, task="lm_eval", takes="check"),
        made(code.make_runs_code, takes="check", format_of=code.format_of_runs_code),
        made(judged.make_judge, takes="both", asks_a_model=True),
        plain(measured.choice_accuracy, task="choice"),
        plain(measured.choice_accuracy_per_token, task="choice"),
        plain(measured.choice_accuracy_per_byte, task="choice"),
        _texts(measured.nll_per_token, per_token=True),
        _texts(measured.bits_per_byte, per_token=False),
        _texts(measured.kl_per_token, per_token=True),
    )
}


def scorer_names() -> list[str]:
    """The scorers of this package, then those of installed packages."""
    return [*SCORERS, *sorted({point.name for point in _points()} - set(SCORERS))]


def find_scorer(name: str, where: str = "") -> ScorerKind:
    """The scorer of that name; an unknown one is a user error with the nearest known name."""
    found = SCORERS.get(name) or _plugin(name)
    if found is None:
        raise UserError(f"no scorer '{name}'", where=where, fix=did_you_mean(name, scorer_names()))
    return found


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
    misfit = kind.misfit(parameters)
    if misfit:
        raise UserError(
            f"scorer '{name}': {misfit}", where=where, fix="write it as `finetune eval scorers` says"
        )
    try:
        return kind.score(parameters)
    except (TypeError, ValueError, re.error) as error:
        raise UserError(f"scorer '{name}' cannot be made: {error}", where=where) from error


def make_format(name: str, parameters: Mapping[str, Any]) -> WellFormed | None:
    """Whether an answer has the form that the scorer needs; None for a scorer that takes any text."""
    return find_scorer(name).well_formed(parameters)


def scorer_digest(name: str, parameters: Mapping[str, Any]) -> str:
    """Of the scorer's code; for a Python function or a metric script, of that file too."""
    kind = find_scorer(name)
    if name == "python":
        files = _module_files(str(parameters.get("function", "")).partition(":")[0])
    elif name == "evaluate_metric":
        path = Path(str(parameters.get("path", ""))).expanduser()
        files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
    elif name not in SCORERS:
        files = _module_files(next(point.module for point in _points() if point.name == name))
    else:
        files = []
    return "-".join([kind.code_digest, *(digest_file(path)[:16] for path in files if path.is_file())])


def _module_files(module: str) -> list[Path]:
    loaded = sys.modules.get(module)
    origin = getattr(loaded, "__file__", None)
    if loaded is None:
        spec = importlib.util.find_spec(module)
        origin = spec.origin if spec is not None else None
    return [Path(origin)] if origin else []


def _points() -> tuple[EntryPoint, ...]:
    return tuple(entry_points(group=PLUGINS))


def _plugin(name: str) -> ScorerKind | None:
    """A function (output, reference[, check], *, parameters) of an installed package, by its entry point.

    An attribute `higher_is_better = False` of the function turns its scores around.
    """
    point = next((point for point in _points() if point.name == name), None)
    if point is None:
        return None
    try:
        function = point.load()
    except (ImportError, AttributeError) as error:
        raise UserError(
            f"the scorer '{name}' of the package {point.dist.name if point.dist else point.module} cannot be loaded: {error}",
            fix="mend or uninstall that package",
        ) from None
    keywords = tuple(
        one.name for one in inspect.signature(function).parameters.values() if one.kind is one.KEYWORD_ONLY
    )
    return ScorerKind(
        name,
        partial(_call_plugin, function, point.value),
        summary_of(function) or point.value,
        None,
        higher_is_better=bool(getattr(function, "higher_is_better", True)),
        takes="both",
        parameters=keywords,
    )


def _call_plugin(function: Callable[..., Any], called: str, **parameters: Any) -> Callable[..., float]:
    return extension.call_function(function, called, parameters)
