"""Do the answers keep one form? Two forms in one data set spoil a model from a few per cent on: it mixes them up.

Each aspect of an answer (format, language, courtesy, length, opening) is counted over all answers; where a minority
reaches 5 %, the aspect is warned of and rows of both piles are shown.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from finetune.data.curate.formats import format_of, has_courtesy, length_class, opening_words
from finetune.data.curate.language import UNDETERMINED, forget_languages, language_of
from finetune.data.curate.tokens import Texts

WARN_FROM = 0.05
_EXAMPLES = 3
_MOST_VALUES = 30  # openings have a long tail; the rest is one number

_SENTENCE_WORDS = 5


def _language_of_answer(answer: str) -> str:
    """The language of the prose in an answer. A record has keys, names and values, which are of none: only the sentences
    among the strings of a JSON document count.
    """
    if format_of(answer) != "JSON":
        return language_of(answer)
    try:
        return language_of(" ".join(_sentences(orjson.loads(answer))))
    except orjson.JSONDecodeError:  # of more than a megabyte: its form was told from its bracket
        return UNDETERMINED


def _sentences(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        if len(value.split()) >= _SENTENCE_WORDS:
            yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _sentences(part)


# Aspect -> its value for an answer. Lengths and openings differ for good reasons, so they are shown and not warned of.
ASPECTS: dict[str, Callable[[str], str]] = {
    "format": format_of,
    "language": _language_of_answer,
    "courtesy": lambda answer: "opens with a courtesy" if has_courtesy(answer) else "comes to the point",
    "length": length_class,
    "opening": opening_words,
}
_WARNED_OF = ("format", "language", "courtesy")


@dataclass(frozen=True, slots=True)
class Pile:
    """The answers of one value: how many, their share of all, and a few rows drawn at random."""

    value: str
    n: int
    share: float
    rows: tuple[int, ...]

    def to_dict(self) -> dict[str, Any]:
        return {"value": self.value, "n": self.n, "share": self.share, "rows": list(self.rows)}


@dataclass(frozen=True, slots=True)
class Mix:
    """The piles of one aspect, the largest first. `within` is the tag's value whose rows these are, if they were parted.

    minority_share: of the rows that are not in the largest pile, undetermined languages left out.
    """

    aspect: str
    within: str | None
    n: int
    piles: tuple[Pile, ...]
    minority_share: float
    warned: bool

    @property
    def told(self) -> tuple[Pile, ...]:
        """The piles that the minority share is about: without that of answers whose language cannot be told."""
        return tuple(pile for pile in self.piles if not _is_undetermined(self.aspect, pile.value))

    def to_dict(self) -> dict[str, Any]:
        return {
            "aspect": self.aspect,
            "within": self.within,
            "n": self.n,
            "minority_share": self.minority_share,
            "warned": self.warned,
            "piles": [pile.to_dict() for pile in self.piles],
        }


def measure_consistency(
    answers: Texts,
    *,
    within: Sequence[str] | None = None,
    aspects: Sequence[str] = tuple(ASPECTS),
    seed: int = 17,
) -> list[Mix]:
    """The mix of every aspect, over all answers or, when `within` names the part of each row, within each part.

    A data set of several tasks may well have several forms: `within` parts it by a tag, so that only mixtures inside one
    task are warned of. Answers are read one at a time.
    """
    counted: dict[tuple[str | None, str], dict[str, list[int]]] = {}
    draws: dict[tuple[str | None, str, str], random.Random] = {}
    drawn: dict[tuple[str | None, str, str], list[int]] = {}
    for row in range(len(answers)):
        answer = answers[row]
        part = within[row] if within is not None else None
        for aspect in aspects:
            value = ASPECTS[aspect](answer)
            seen = counted.setdefault((part, aspect), {}).setdefault(value, [0])
            seen[0] += 1
            key = part, aspect, value
            _draw(
                row, seen[0], draws.setdefault(key, random.Random(f"{seed}{key}")), drawn.setdefault(key, [])
            )
    forget_languages()  # a run goes on for hours behind its checks
    mixes = [
        _mix(part, aspect, {value: n for value, (n,) in values.items()}, drawn)
        for (part, aspect), values in counted.items()
    ]
    return sorted(mixes, key=lambda mix: (mix.within or "", list(aspects).index(mix.aspect)))


def _draw(row: int, nth: int, draw: random.Random, rows: list[int]) -> None:
    """Keep a uniform sample of the rows seen so far (reservoir sampling)."""
    if len(rows) < _EXAMPLES:
        rows.append(row)
    elif (place := draw.randrange(nth)) < _EXAMPLES:
        rows[place] = row


def _is_undetermined(aspect: str, value: str) -> bool:
    return aspect == "language" and value == UNDETERMINED


def _mix(
    part: str | None, aspect: str, counts: dict[str, int], drawn: dict[tuple[str | None, str, str], list[int]]
) -> Mix:
    n = sum(counts.values())
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    piles = [
        Pile(value, times, times / n, tuple(sorted(drawn[part, aspect, value])))
        for value, times in ordered[:_MOST_VALUES]
    ]
    told = {value: times for value, times in counts.items() if not _is_undetermined(aspect, value)}
    minority = 1 - max(told.values()) / sum(told.values()) if told else 0.0
    warned = aspect in _WARNED_OF and minority >= WARN_FROM
    return Mix(aspect, part, n, tuple(piles), minority, warned)
