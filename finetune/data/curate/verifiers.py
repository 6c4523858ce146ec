"""Quality filters and verifiers: any function, command or judge that says of a row whether it is to be kept, and why.

A verifier is a function from a row, as a dictionary, to a Verdict. What users write may answer in shorter forms: true or
false, a score (kept from a threshold on), or an object with `keep`, `score` and `reason`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.data.curate.functions import load_function
from finetune.data.curate.parallel import map_ordered
from finetune.errors import UserError

RowDict = Mapping[str, Any]
_LONGEST_REASON = 300
FAILED = "verifier failed"  # the beginning of the reason of a row that could not be judged


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a row is kept, its score if one was given, and why. `failed`: the verifier gave no answer to this row."""

    keep: bool
    reason: str = ""
    score: float | None = None
    failed: bool = False

    def to_dict(self) -> dict[str, Any]:
        return {"keep": self.keep, "reason": self.reason, "score": self.score, "failed": self.failed}


Verifier = Callable[[RowDict], Verdict]


def failure(why: str) -> Verdict:
    """The verdict on a row that could not be judged: it is not kept, and says so."""
    return Verdict(False, f"{FAILED}: {why}"[:_LONGEST_REASON], None, True)


def as_verdict(answer: Any, *, threshold: float = 0.5) -> Verdict:
    """A user's answer as a verdict: bool; number (kept when >= threshold); (keep, reason); or {keep, score, reason}.

    Of an object, `keep` decides where it is there, else `score` does. Any other answer, NaN too, is a failure.
    """
    if isinstance(answer, Verdict):
        return answer
    if isinstance(answer, bool):
        return Verdict(answer, "" if answer else "rejected")
    if isinstance(answer, int | float):
        return _scored(float(answer), threshold, "")
    if isinstance(answer, tuple | list) and len(answer) == 2 and isinstance(answer[0], bool):
        return Verdict(answer[0], str(answer[1])[:_LONGEST_REASON])
    if isinstance(answer, Mapping):
        keep, score, reason = answer.get("keep"), answer.get("score"), str(answer.get("reason") or "")
        is_score = isinstance(score, int | float) and not isinstance(score, bool)
        if isinstance(keep, bool):
            return Verdict(
                keep, reason[:_LONGEST_REASON] or ("" if keep else "rejected"), score if is_score else None
            )
        if keep is None and is_score:
            return _scored(float(score), threshold, reason)  # type: ignore[arg-type]
    return failure(
        f"it answered {str(answer)[:80]!r}, not true, false, a score, or an object with keep or score"
    )


def _scored(score: float, threshold: float, reason: str) -> Verdict:
    if math.isnan(score):
        return failure("it answered NaN")
    low = f"score {score:g} is below {threshold:g}" + (f": {reason}" if reason else "")
    return Verdict(score >= threshold, (reason if score >= threshold else low)[:_LONGEST_REASON], score)


def verifier_of(function: Callable[[RowDict], Any], *, threshold: float = 0.5) -> Verifier:
    """A user's function, or a judge that answers with a score, as a verifier. An exception in it fails that row only."""

    def verify(row: RowDict) -> Verdict:
        try:
            answer = function(row)
        except Exception as error:
            return failure(f"{type(error).__name__}: {error}")
        return as_verdict(answer, threshold=threshold)

    return verify


def load_verifier(
    name: str, *, folder: Path | None = None, threshold: float = 0.5, where: str = ""
) -> Verifier:
    """The verifier of a function's name, `package.module:function` or `file.py:function`. It is given a row as stored."""
    return verifier_of(load_function(name, folder=folder, where=where), threshold=threshold)


def verify_rows(
    rows: Iterable[RowDict],
    verifier: Verifier,
    *,
    workers: int = 1,
    max_failed_share: float = 0.1,
    where: str = "",
) -> Iterator[Verdict]:
    """The verdict on each row, in order. `workers` threads, for a verifier that waits for something else.

    Raises UserError once more than `max_failed_share` of the rows could not be judged, from the 20th row on, or at the end
    when that is so: a broken verifier must not empty a data set without a word.
    """
    n = n_failed = 0
    last = ""
    for verdict in map_ordered(verifier, rows, workers):
        n += 1
        if verdict.failed:
            n_failed, last = n_failed + 1, verdict.reason
            if n >= 20:
                _require_working(n_failed, n, max_failed_share, last, where)
        yield verdict
    _require_working(n_failed, n, max_failed_share, last, where)


def _require_working(n_failed: int, n: int, most: float, last: str, where: str) -> None:
    if n and n_failed > most * n:
        raise UserError(
            f"the verifier failed on {n_failed} of {n} rows",
            where=where,
            why=last,
            fix="mend the verifier, or raise max_failed_share",
        )
