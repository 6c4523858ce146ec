"""Scorers for short written answers: match after normalising, a pattern, a number."""

from __future__ import annotations

import re
import string
import unicodedata
from collections.abc import Callable
from decimal import Decimal, InvalidOperation

Compare = Callable[[str, str], float]
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans(dict.fromkeys(string.punctuation + "“”‘’«»…", " "))
# A thousands comma joins digits; a sign, a decimal part and an exponent belong to the number.
_NUMBER = re.compile(r"(?<![\w.])[-+−]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:[eE][-+]?\d+)?")


def normalise(text: str) -> str:
    """Case folded, NFKC, without punctuation and English articles, white space collapsed (as in SQuAD's scorer)."""
    folded = unicodedata.normalize("NFKC", text).casefold().translate(_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", folded).split())


def text_match(output: str, reference: str) -> float:
    """1.0 when the answer is the reference, character by character, but for white space around it."""
    return float(output.strip() == reference.strip())


def normalised_match(output: str, reference: str) -> float:
    """1.0 when answer and reference are the same words: case, punctuation and articles do not matter."""
    return float(normalise(output) == normalise(reference))


def make_contains(*, whole_words: bool = True) -> Compare:
    """1.0 when the reference, normalised, occurs in the answer; as whole words unless told otherwise."""

    def contains(output: str, reference: str) -> float:
        return float(holds_phrase(output, reference, whole_words=whole_words))

    return contains


def holds_phrase(text: str, phrase: str, *, whole_words: bool = True) -> bool:
    """Whether `text` holds `phrase`, both normalised. An empty phrase is held by nothing."""
    wanted, found = normalise(phrase), normalise(text)
    if not wanted:
        return False
    return f" {wanted} " in f" {found} " if whole_words else wanted in found


def make_regex(*, pattern: str, full: bool = False, ignore_case: bool = False) -> Compare:
    """1.0 when the pattern is found in the answer (`full`: is the whole answer). The reference is not used."""
    compiled = re.compile(pattern, re.IGNORECASE if ignore_case else 0)

    def regex(output: str, reference: str) -> float:
        text = output.strip()
        return float((compiled.fullmatch(text) if full else compiled.search(text)) is not None)

    return regex


def make_regex_match(
    *, pattern: str, which: str = "last", ignore_case: bool = False, normalised: bool = True
) -> Compare:
    """1.0 when what the pattern captures in the answer is the reference, e.g. `#### (.+)`.

    The first group is compared, or the whole match without one, of the `last` match in the answer or the `first`.
    normalised: compared as `normalised_match` does, else character by character but for white space around it.
    """
    same = normalised_match if normalised else text_match
    find = _captured(pattern, which, ignore_case)

    def regex_match(output: str, reference: str) -> float:
        found = find(output)
        return 0.0 if found is None else same(found, reference)

    return regex_match


def format_of_regex_match(
    *, pattern: str, which: str = "last", ignore_case: bool = False, normalised: bool = True
) -> Callable[[str], bool]:
    """An answer in which the pattern is not found is off-format."""
    find = _captured(pattern, which, ignore_case)
    return lambda output: find(output) is not None


def _captured(pattern: str, which: str, ignore_case: bool) -> Callable[[str], str | None]:
    if which not in ("last", "first"):
        raise ValueError(f"which: '{which}' is not last or first")
    compiled = re.compile(pattern, re.IGNORECASE if ignore_case else 0)

    def find(output: str) -> str | None:
        matches = list(compiled.finditer(output))
        if not matches:
            return None
        match = matches[-1 if which == "last" else 0]
        return match[1 if compiled.groups else 0]

    return find


def make_numeric(*, tolerance: float = 0.0, relative: float = 0.0, which: str = "last") -> Compare:
    """1.0 when a number of the answer is the reference's, within `tolerance` or `relative` · |reference|.

    which: the `last` number of the answer (after any working), the `first`, or the `only` one (an answer with two
    different numbers is wrong). An answer without a number is wrong. Decimal arithmetic: 0.3 is 0.1 + 0.2.
    """
    if which not in ("last", "first", "only"):
        raise ValueError(f"which: '{which}' is not last, first or only")
    if tolerance < 0 or relative < 0:
        raise ValueError("tolerance and relative must not be negative")

    def numeric(output: str, reference: str) -> float:
        wanted = numbers_in(reference)
        if len(wanted) != 1:
            raise ValueError(f"the reference does not hold exactly one number: {reference[:80]!r}")
        found = numbers_in(output)
        if not found or (which == "only" and len(set(found)) > 1):
            return 0.0
        value = found[0] if which == "first" else found[-1]
        allowed = max(Decimal(str(tolerance)), Decimal(str(relative)) * abs(wanted[0]))
        return float(abs(value - wanted[0]) <= allowed)

    return numeric


def format_of_numeric(
    *, tolerance: float = 0.0, relative: float = 0.0, which: str = "last"
) -> Callable[[str], bool]:
    """An answer without a number is off-format; with `only`, also one with two different numbers."""

    def well_formed(output: str) -> bool:
        found = set(numbers_in(output))
        return len(found) == 1 if which == "only" else bool(found)

    return well_formed


def numbers_in(text: str) -> list[Decimal]:
    """Every number of a text in order, thousands commas removed."""
    found = []
    for match in _NUMBER.finditer(text):
        try:
            found.append(Decimal(match[0].replace(",", "").replace("−", "-")))
        except InvalidOperation:
            continue
    return found
