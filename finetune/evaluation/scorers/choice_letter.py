"""Multiple choice answered in writing: which letter did the answer settle on?"""

from __future__ import annotations

import re
from collections.abc import Callable

_WRAPPING = " \t\r\n\"'`*_([{<"
_CLOSING = " \t\r\n\"'`*_)]}>.:,;"


def make_choice_letter(*, letters: str = "ABCD") -> Callable[[str, str], float]:
    """1.0 when the answer settles on the reference's letter.

    Read in this order: the answer is the letter alone, whatever its case, brackets or full stop; it names one behind
    "answer", "option" or "choice" (the last such); it begins with a letter and a mark, as in "B) Paris"; it holds
    bracketed letters, all the same. "A cat sat" names none: a letter that could be a word does not count.
    """
    if len(letters) < 2 or len(set(letters.upper())) != len(letters) or not letters.isalnum():
        raise ValueError(f"letters: '{letters}' must be two or more different letters or digits")

    def choice_letter(output: str, reference: str) -> float:
        wanted = letter_in(reference, letters)
        if wanted is None:
            raise ValueError(f"the reference names none of {letters}: {reference[:80]!r}")
        return float(letter_in(output, letters) == wanted)

    return choice_letter


def format_of_choice_letter(*, letters: str = "ABCD") -> Callable[[str], bool]:
    """An answer that settles on no letter is off-format."""
    return lambda output: letter_in(output, letters) is not None


def letter_in(text: str, letters: str) -> str | None:
    """The letter that an answer settles on, in upper case; None when it names none, or several at once."""
    alone = text.lstrip(_WRAPPING).rstrip(_CLOSING)
    if len(alone) == 1 and alone.upper() in letters.upper():
        return alone.upper()
    known = re.escape(letters.upper())
    undecided = rf"(?![)\].:]*\s*(?:or|and|/|,)\s*[(\[]?[{known}]\b)"  # "A or B" settles on neither
    cue = rf"\b(?i:answer|option|choice)\b[\s:=*_]*(?i:is\b)?[\s:=*_]*[(\[]?([{known}])(?![\w'’]){undecided}"
    named = re.findall(cue, text)
    if named:
        return str(named[-1])
    start = re.match(rf"[{re.escape(_WRAPPING)}]*([{known}])(?=[)\].:]){undecided}", text)
    if start:
        return start[1]
    bracketed = set(re.findall(rf"[(\[]([{known}])[)\]]", text))
    return bracketed.pop() if len(bracketed) == 1 else None
