"""What may not be on two sides although no key shows it: questions that are nearly the same, or are quoted in a row.

Evaluation wins: of two rows on different sides, the one on the side that goes later is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from finetune.data.curate.near import find_near_duplicates
from finetune.data.curate.tokens import hash_tokens, ngrams
from finetune.data.overlap import Overlaps, equal_texts, find_overlaps
from finetune.data.questions import Questions
from finetune.data.rows import SIDES, Progress, Row, Side
from finetune.data.spec_split import GuardSection
from finetune.data.stages.sides import PRECEDENCE, SideCodes
from finetune.data.stages.table import Ints, RowTable
from finetune.data.texts import question_text, whole_text
from finetune.data.wording import SharedWording

NEAR = "near_duplicate_on_other_side"
NGRAM = "quotes_other_side"
IN_FILE = "quotes_evaluation_file"
_MOST_ROUNDS = 20
_SAMPLE_ROWS = 20_000
_NGRAM_OF_NEAR = 3


@dataclass(frozen=True)
class Pairs:
    """Pairs of rows; the first of each goes first by side. `similarity` is Jaccard, or the share that is quoted."""

    first: Ints
    second: Ints
    similarity: npt.NDArray[np.float64]

    def where(self, chosen: npt.NDArray[np.bool_]) -> Pairs:
        return Pairs(self.first[chosen], self.second[chosen], self.similarity[chosen])

    def across(self, side: SideCodes) -> Pairs:
        """The pairs on two sides."""
        return self.where(side[self.first] != side[self.second])


def shared_wording(table: RowTable, rows: Ints) -> SharedWording:
    """What many questions of `rows` have in common, by a sample that does not depend on where rows stood."""
    rows = table.sample(rows, _SAMPLE_ROWS)
    return SharedWording.of(table.texts(rows, question_text))


def near_pairs(
    table: RowTable,
    side: SideCodes,
    rows: Ints,
    threshold: float,
    wording: SharedWording,
    on_progress: Progress = lambda share: None,
) -> Pairs:
    """Verified near duplicates among the questions of `rows`; where wording is shared, without it as well as with it."""
    rows = rows[np.lexsort((table.place[rows], PRECEDENCE[side[rows]]))]

    def search(text_of: Callable[[Row], str], progress: Progress) -> Pairs:
        near = find_near_duplicates(
            table.texts(rows, text_of), threshold=threshold, ngram=_NGRAM_OF_NEAR, on_progress=progress
        )
        return Pairs(rows[near.first], rows[near.second], near.similarity)

    if not wording:
        return search(question_text, on_progress)

    def distinct_text(row: Row) -> str:
        return wording.distinct(question_text(row))

    whole = search(question_text, lambda share: on_progress(share / 2))
    own = search(distinct_text, lambda share: on_progress(0.5 + share / 2))
    both = _union(
        _confirmed(table, whole, distinct_text, threshold), _confirmed(table, own, question_text, threshold)
    )
    on_progress(1.0)
    return both


def _confirmed(table: RowTable, pairs: Pairs, text_of: Callable[[Row], str], threshold: float) -> Pairs:
    """The pairs that are near by another text of theirs too."""
    grams: dict[int, frozenset[int]] = {}

    def of(row: int) -> frozenset[int]:
        if row not in grams:
            grams[row] = frozenset(
                ngrams(hash_tokens([text_of(table.row(row))]), _NGRAM_OF_NEAR).hashes.tolist()
            )
        return grams[row]

    def similarity(first: int, second: int) -> float:
        one, other = of(first), of(second)
        return len(one & other) / len(one | other) if one or other else 0.0

    measured = [
        similarity(first, second)
        for first, second in zip(pairs.first.tolist(), pairs.second.tolist(), strict=True)
    ]
    return pairs.where(np.array(measured, np.float64) >= threshold)


def _union(one: Pairs, other: Pairs) -> Pairs:
    first = np.concatenate([one.first, other.first])
    second = np.concatenate([one.second, other.second])
    _, at = np.unique(np.stack([first, second]), axis=1, return_index=True)
    return Pairs(first[at], second[at], np.concatenate([one.similarity, other.similarity])[at])


def quotes(
    table: RowTable,
    side: SideCodes,
    rows: Ints,
    section: GuardSection,
    wording: SharedWording,
    on_progress: Progress = lambda share: None,
    *,
    of: Sequence[Side] = SIDES,
) -> Pairs:
    """Rows of the sides in `of` that hold what a row of a side before theirs asks, each with one such row."""
    parts: list[Pairs] = []
    for code in [code for code in np.argsort(PRECEDENCE)[1:].tolist() if SIDES[code] in of]:
        own = rows[side[rows] == code]
        before = rows[PRECEDENCE[side[rows]] < PRECEDENCE[code]]
        if not len(own) or not len(before):
            continue
        before = before[np.lexsort((table.place[before], PRECEDENCE[side[before]]))]
        found = find_overlaps(
            table.texts(own, lambda row: wording.own_words(whole_text(row))),
            table.texts(before, lambda row: wording.own_words(question_text(row))),
            section,
            without_own_wording=False,
            on_progress=on_progress,
        )
        parts.append(Pairs(before[found.items], own[found.rows], found.coverage))
    none = np.empty(0, np.int64)
    return Pairs(
        np.concatenate([none, *(part.first for part in parts)]),
        np.concatenate([none, *(part.second for part in parts)]),
        np.concatenate([np.empty(0), *(part.similarity for part in parts)]),
    )


def train_overlaps(
    table: RowTable, rows: Ints, questions: Questions, section: GuardSection, wording: SharedWording
) -> Overlaps:
    """Which of `rows`, by their place there, hold what another evaluation asks, or ask just that."""
    quoting = find_overlaps(
        table.texts(rows, lambda row: wording.own_words(whole_text(row))),
        [wording.own_words(text) for text in questions.texts],
        section,
    )
    same = equal_texts(table.texts(rows, question_text), questions.texts)
    is_new = ~np.isin(same.rows, quoting.rows)
    found = [
        np.concatenate([held, more[is_new]])
        for held, more in zip(vars(quoting).values(), vars(same).values(), strict=True)
    ]
    order = np.argsort(found[0])
    return Overlaps(found[0][order], found[1][order], found[2][order])


@dataclass(frozen=True)
class Lost:
    """Rows to drop, in the order in which that was found, each with the kept row because of which it goes."""

    rows: Ints
    cause: Ints


def lose_near(
    table: RowTable,
    side: SideCodes,
    rows: Ints,
    threshold: float,
    wording: SharedWording,
    on_progress: Progress,
) -> Lost:
    """What must go of `rows` so that no near duplicates are on two sides."""
    lost, causes = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for _ in range(_MOST_ROUNDS):
        if len(np.unique(side[rows])) < 2:
            break
        pairs = near_pairs(table, side, rows, threshold, wording, on_progress)
        found = _losers(pairs.across(side), side, table.place)
        lost.append(found.rows)
        causes.append(found.cause)
        rows = np.setdiff1d(rows, found.rows)
        if not _may_hide_more(pairs, found.rows, side):
            break
    return Lost(np.concatenate(lost), np.concatenate(causes))


def lose_quotes(
    table: RowTable,
    side: SideCodes,
    rows: Ints,
    section: GuardSection,
    wording: SharedWording,
    on_progress: Progress,
    *,
    of: Sequence[Side] = SIDES,
) -> Lost:
    """What must go of `rows` so that no row of the sides in `of` holds what a row of a side before its own asks."""
    lost, causes = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    while True:
        pairs = quotes(table, side, rows, section, wording, on_progress, of=of)
        found = _losers(pairs, side, table.place)
        lost.append(found.rows)
        causes.append(found.cause)
        if len(found.rows) == len(pairs.second):  # none was spared because what it quotes goes itself
            return Lost(np.concatenate(lost), np.concatenate(causes))
        rows = np.setdiff1d(rows, found.rows)


def _losers(leaks: Pairs, side: SideCodes, place: Ints) -> Lost:
    """The later row of each pair, unless the first is itself dropped."""
    order = np.lexsort(
        (place[leaks.first], PRECEDENCE[side[leaks.first]], leaks.second, PRECEDENCE[side[leaks.second]])
    )
    lost: dict[int, int] = {}
    for first, second in zip(leaks.first[order].tolist(), leaks.second[order].tolist(), strict=True):
        if first not in lost:
            lost.setdefault(second, first)
    return Lost(np.array(list(lost), np.int64), np.array(list(lost.values()), np.int64))


def _may_hide_more(pairs: Pairs, lost: Ints, side: SideCodes) -> bool:
    """Whether a dropped row was the link between rows of two sides: such rows are listed with their link only."""
    was_lost = np.isin(np.stack([pairs.first, pairs.second]), lost)
    one_lost = was_lost[0] != was_lost[1]
    link = np.where(was_lost[0], pairs.first, pairs.second)[one_lost]
    kept = np.where(was_lost[0], pairs.second, pairs.first)[one_lost]
    seen = np.unique(np.stack([link, side[kept]], axis=1), axis=0)
    return bool((np.unique(seen[:, 0], return_counts=True)[1] > 1).any())
