"""User errors: prose that says what is wrong, where, why, and how to fix it. Bugs keep their tracebacks."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum


class ExitCode(IntEnum):
    """What the process tells its caller; the verdict of a run is part of the contract."""

    DONE = 0
    INTERNAL_FAULT = 1
    USER_ERROR = 2
    REGRESSED = 10
    INCONCLUSIVE = 11
    NO_EVIDENCE = 12
    WILL_NOT_FIT = 13
    INTERRUPTED = 130


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong.

    `where` is a file with line and column (1-based), a dotted key, a flag or a row. `fix` is the next thing to type.
    """

    what: str
    where: str = ""
    why: str = ""
    fix: str = ""

    def __str__(self) -> str:
        lines = [f"{self.where}: {self.what}" if self.where else self.what]
        if self.why:
            lines.append(f"  why: {self.why}")
        if self.fix:
            lines.append(f"  fix: {self.fix}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, str]:
        return {"what": self.what, "where": self.where, "why": self.why, "fix": self.fix}


class UserError(Exception):
    """Something the user can mend. Carries one fault or several; the command line prints them all, without traceback."""

    exit_code: ExitCode = ExitCode.USER_ERROR

    def __init__(
        self,
        what: str | Sequence[Fault],
        *,
        where: str = "",
        why: str = "",
        fix: str = "",
        exit_code: ExitCode | None = None,
    ) -> None:
        self.faults: tuple[Fault, ...] = (
            (Fault(what, where, why, fix),) if isinstance(what, str) else tuple(what)
        )
        if exit_code is not None:
            self.exit_code = exit_code
        super().__init__("\n".join(str(fault) for fault in self.faults))


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word closest to `word`, or None when nothing is close enough to be a plausible typing error.

    One that differs in case alone is the closest.
    """
    words = list(known)
    same = [one for one in words if one.casefold() == word.casefold()]
    matches = same or difflib.get_close_matches(word, words, n=1, cutoff=0.6)
    return matches[0] if matches else None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """'did you mean 'x'?' or the list of known words: the tail of every unknown-name message."""
    names = sorted(known)
    match = nearest(word, names)
    return f"did you mean '{match}'?" if match else f"known: {', '.join(names)}"
