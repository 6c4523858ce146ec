"""Wording that many questions share: an instruction, a prompt template. It says nothing about whether two are the same.

"Classify this ticket as billing, shipping or other: …" in front of every question makes all of them near duplicates, and
puts a run of thirteen equal words into each. So what is shared is found first, and left out where questions are compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.data.curate.tokens import Texts, fold
from finetune.errors import UserError
from finetune.paths import read_json, write_json

_RUN_WORDS = 4
_LEAST_ROWS, _LEAST_SHARE = 20, 0.005
_MOST_RUNS = 50_000
_DOMINATED = 0.5


@dataclass(frozen=True)
class SharedWording:
    """Runs of four words that at least twenty questions, and one in two hundred, have."""

    runs: frozenset[tuple[str, ...]]

    def __bool__(self) -> bool:
        return bool(self.runs)

    @classmethod
    def of(cls, texts: Texts) -> SharedWording:
        """The shared wording of a set of questions; a sample of some ten thousand is enough."""
        rows_with: Counter[tuple[str, ...]] = Counter()
        for index in range(len(texts)):
            rows_with.update(set(_runs(_words(texts[index]))))
        least = max(_LEAST_ROWS, _LEAST_SHARE * len(texts))
        shared = [(run, n) for run, n in rows_with.items() if n >= least]
        shared.sort(key=lambda found: (-found[1], found[0]))
        return cls(frozenset(run for run, _ in shared[:_MOST_RUNS]))

    def own_words(self, text: str) -> str:
        """The words of a question outside shared runs, folded."""
        if not self.runs:
            return text
        words = _words(text)
        covered = self._covered(words)
        return " ".join(word for word, is_shared in zip(words, covered, strict=True) if not is_shared)

    def distinct(self, text: str) -> str:
        """The question itself, or its own words where shared ones are half of it or more."""
        if not self.runs:
            return text
        words = _words(text)
        covered = self._covered(words)
        if sum(covered) < _DOMINATED * len(words):
            return text
        return " ".join(word for word, is_shared in zip(words, covered, strict=True) if not is_shared)

    def write(self, path: Path) -> None:
        write_json(path, sorted(" ".join(run) for run in self.runs))

    @classmethod
    def read(cls, path: Path) -> SharedWording:
        """What `write` wrote; none where there is no file. Raises UserError for a file that it did not write."""
        runs: Any = read_json(path) if path.is_file() else []
        if not (isinstance(runs, list) and all(isinstance(run, str) for run in runs)):
            raise UserError(f"{path} is no list of runs of words", fix="delete the folder and build it again")
        return cls(frozenset(tuple(run.split(" ")) for run in runs))

    def _covered(self, words: list[str]) -> list[bool]:
        covered = [False] * len(words)
        for place, run in enumerate(_runs(words)):
            if run in self.runs:
                covered[place : place + _RUN_WORDS] = [True] * _RUN_WORDS
        return covered


NO_WORDING = SharedWording(frozenset())


def _words(text: str) -> list[str]:
    return fold(text).split()


def _runs(words: list[str]) -> Iterator[tuple[str, ...]]:
    return zip(*(words[place:] for place in range(_RUN_WORDS)), strict=False)
