"""Instruction-following checks: what an answer must hold, how long it may be, which form and language it has.

An item carries its own `check`, a mapping of requirements; the answer is right when it meets all of them. Every
requirement is decided by code alone, so that two runs never disagree about one answer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from finetune.errors import did_you_mean
from finetune.evaluation.scorers.json_object import parse_object
from finetune.evaluation.scorers.language import LANGUAGES, guess_language
from finetune.evaluation.scorers.text import holds_phrase, make_numeric, make_regex, normalise

Requirement = Callable[[str, Any], bool]
# Words of a polite no. Kept short: a long list would also catch answers that help.
_REFUSALS = (
    "i can't", "i cannot", "i can not", "i'm unable", "i am unable", "i won't", "i will not", "i'm not able",
    "i am not able", "i'm sorry", "i am sorry", "not able to help", "can't help", "cannot help", "can't assist",
    "cannot assist", "can't provide", "cannot provide",
)  # fmt: skip


def make_check(*, every: Mapping[str, Any] | None = None) -> Callable[[str, Mapping[str, Any]], float]:
    """1.0 when the answer meets every requirement of the item's `check`, and those of `every`, which all items share."""
    shared = dict(every or {})
    if shared:
        meets("", shared)
    return lambda output, check: meets(output, {**shared, **check})


def meets(output: str, check: Mapping[str, Any]) -> float:
    """1.0 when the answer meets every requirement of `check`. Raises ValueError for an empty or unknown one."""
    if not check:
        raise ValueError("the item has no check")
    unknown = sorted(set(check) - set(REQUIREMENTS))
    if unknown:
        raise ValueError(f"unknown requirement '{unknown[0]}'; {did_you_mean(unknown[0], REQUIREMENTS)}")
    for name, wanted in check.items():
        fits, form = _FORMS.get(name, (_anything, ""))
        if not fits(wanted):
            raise ValueError(f"the requirement '{name}: {wanted}' must be {form}")
    return float(all(_decide(name, output, wanted) for name, wanted in check.items()))


def _decide(name: str, output: str, wanted: Any) -> bool:
    try:
        return REQUIREMENTS[name](output, wanted)
    except (TypeError, KeyError, ValueError, re.error) as error:
        raise ValueError(f"the requirement '{name}: {wanted}' cannot be checked: {error}") from None


def words_in(text: str) -> list[str]:
    return re.findall(r"[^\W_]+(?:['’-][^\W_]+)*", text)


def sentences_in(text: str) -> list[str]:
    """Runs of text that end with a full stop, a question or an exclamation mark, or with the text."""
    return [part for part in re.split(r"(?<=[.!?…])\s+", text.strip()) if words_in(part)]


def lines_in(text: str) -> list[str]:
    return [line for line in text.strip().splitlines() if line.strip()]


def paragraphs_in(text: str) -> list[str]:
    """Blocks between empty lines."""
    return [block for block in re.split(r"\n[ \t]*\n", text.strip()) if block.strip()]


def bullets_in(text: str) -> list[str]:
    """Lines that begin with a bullet or a number: `- a`, `* a`, `• a`, `1. a`, `1) a`."""
    return [line for line in text.splitlines() if re.match(r"\s*(?:[-*•]|\d+[.)])\s+\S", line)]


def _letters(text: str) -> str:
    return "".join(filter(str.isalpha, text))


def _refuses(output: str, wanted: bool) -> bool:
    text = output.casefold().replace("’", "'")
    return any(phrase in text for phrase in _REFUSALS) == wanted


def _number(output: str, wanted: Any) -> bool:
    options = dict(wanted) if isinstance(wanted, Mapping) else {"value": wanted}
    value = options.pop("value")
    return make_numeric(**options)(output, str(value)) == 1.0


def _json_keys(output: str, wanted: list[str]) -> bool:
    found = parse_object(output)
    return found is not None and set(found) == set(wanted)


def _within(count: int, bounds: Any) -> bool:
    """bounds: an exact count, or [least, most]."""
    least, most = bounds if isinstance(bounds, list) else (bounds, bounds)
    return bool(least <= count <= most)


def _anything(wanted: Any) -> bool:
    return True


def _are_phrases(wanted: Any) -> bool:
    """A text in place of a list would be read letter by letter, and a phrase of marks alone is held by nothing."""
    return (
        isinstance(wanted, list)
        and bool(wanted)
        and all(isinstance(phrase, str) and normalise(phrase) for phrase in wanted)
    )


def _are_bounds(wanted: Any) -> bool:
    ends = wanted if isinstance(wanted, list) else [wanted, wanted]
    return len(ends) == 2 and all(type(end) is int for end in ends) and 0 <= ends[0] <= ends[1]


def _is_flag(wanted: Any) -> bool:
    return isinstance(wanted, bool)


def _is_text(wanted: Any) -> bool:
    return isinstance(wanted, str) and bool(wanted)


def _are_names(wanted: Any) -> bool:
    return isinstance(wanted, list) and all(isinstance(name, str) for name in wanted)


def _is_language(wanted: Any) -> bool:
    return isinstance(wanted, str) and wanted in LANGUAGES


REQUIREMENTS: dict[str, Requirement] = {
    "contains_any": lambda output, wanted: any(holds_phrase(output, phrase) for phrase in wanted),
    "contains_all": lambda output, wanted: all(holds_phrase(output, phrase) for phrase in wanted),
    "excludes": lambda output, wanted: not any(holds_phrase(output, phrase) for phrase in wanted),
    "number": _number,
    "regex": lambda output, wanted: make_regex(pattern=wanted)(output, "") == 1.0,
    "full_regex": lambda output, wanted: make_regex(pattern=wanted, full=True)(output, "") == 1.0,
    "words": lambda output, wanted: _within(len(words_in(output)), wanted),
    "sentences": lambda output, wanted: _within(len(sentences_in(output)), wanted),
    "lines": lambda output, wanted: _within(len(lines_in(output)), wanted),
    "paragraphs": lambda output, wanted: _within(len(paragraphs_in(output)), wanted),
    "bullets": lambda output, wanted: _within(len(bullets_in(output)), wanted),
    "characters": lambda output, wanted: _within(len(output.strip()), wanted),
    "starts_with": lambda output, wanted: output.strip().startswith(wanted),
    "ends_with": lambda output, wanted: output.strip().endswith(wanted),
    "upper_case": lambda output, wanted: bool(_letters(output)) and _letters(output).isupper() == wanted,
    "lower_case": lambda output, wanted: bool(_letters(output)) and _letters(output).islower() == wanted,
    "json": lambda output, wanted: (parse_object(output) is not None) == wanted,
    "json_keys": _json_keys,
    "language": lambda output, wanted: guess_language(output) == wanted,
    "refuses": _refuses,
}
# What a requirement must be: one of another form would be met by every answer, or by none.
_FORMS: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(
        ("contains_any", "contains_all", "excludes"),
        (_are_phrases, "a list of texts, each with a word that is no article"),
    ),
    **dict.fromkeys(
        ("words", "sentences", "lines", "paragraphs", "bullets", "characters"),
        (_are_bounds, "a count, or [least, most]"),
    ),
    **dict.fromkeys(("upper_case", "lower_case", "json", "refuses"), (_is_flag, "true or false")),
    **dict.fromkeys(
        ("starts_with", "ends_with", "regex", "full_regex"), (_is_text, "text that is not empty")
    ),
    "json_keys": (_are_names, "a list of keys"),
    "language": (_is_language, f"one of {', '.join(sorted(LANGUAGES))}"),
}
