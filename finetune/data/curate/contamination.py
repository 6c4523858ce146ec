"""Decontamination: training rows that hold what a suite asks, by word n-grams, with how much of either is covered.

For a row and an item, an n-gram is common when both have it. `row_coverage` is the share of the row's tokens inside
n-grams that any item has; `item_coverage` is the share of the tokens of one item, the one most covered, inside n-grams
that the row has. A row that quotes an item among other things has a small row coverage and an item coverage near 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from finetune.data.curate.parallel import map_ordered
from finetune.data.curate.tokens import (
    Hashes,
    Texts,
    TokenHashes,
    batches,
    gather_ranges,
    hash_tokens,
    ngrams,
)

Rows = npt.NDArray[np.int64]
Shares = npt.NDArray[np.float64]

_FILTER_BITS = 24
_OWN_WORDING_SHARE = 0.1
_OWN_WORDING_ITEMS = 10


@dataclass(frozen=True, slots=True)
class Contamination:
    """One entry a training row. `item` is the item most covered by the row, -1 where no n-gram is common.

    too_short: items with fewer than n words, which only a row of the same words can match. own_wording: n-grams left out
    because more than a tenth of the items (and more than ten) have them: the suite's instruction, not its questions.
    """

    row_coverage: Shares
    item_coverage: Shares
    item: Rows
    too_short: Rows
    own_wording: int


def find_contamination(
    texts: Texts, against: Texts, *, n: int = 13, without_own_wording: bool = True, workers: int | None = None
) -> Contamination:
    """How much of each text and of each item of `against` is in the other, by runs of `n` words.

    Words are folded as for near duplicates; in scripts without spaces the runs are of characters. Usual rules: any common
    13-gram, or an item coverage of at least one half by 8-grams (there a common phrase alone proves nothing).
    `without_own_wording` leaves out n-grams that more than a tenth of the items have, so that the verdict on a row
    depends on the other items too.
    """
    index = _Index(against, n, without_own_wording)
    parts = list(map_ordered(lambda batch: index.look_up(batch[1]), batches(texts), workers))
    empty = np.empty(0)
    return Contamination(
        np.concatenate([empty, *(part[0] for part in parts)]),
        np.concatenate([empty, *(part[1] for part in parts)]),
        np.concatenate([np.empty(0, np.int64), *(part[2] for part in parts)]),
        index.too_short,
        index.own_wording,
    )


class _Index:
    """The n-grams of all items: sorted, each with the items that have it."""

    def __init__(self, items: Texts, n: int, without_own_wording: bool) -> None:
        self._n = n
        grams, item_of, short, tokens = _all_grams(items, n)
        self.too_short = np.flatnonzero(short)
        self._n_tokens = tokens
        order = np.argsort(grams, kind="stable")  # so that the items of each n-gram stay in order
        grams, item_of = grams[order], item_of[order]
        begins = _differs(grams)
        starts = np.flatnonzero(begins)
        lengths = np.diff(starts, append=len(grams))
        is_new_item = (begins | _differs(item_of)).astype(np.int64)
        n_items = np.add.reduceat(is_new_item, starts) if len(starts) else lengths
        is_own = n_items > max(_OWN_WORDING_ITEMS, _OWN_WORDING_SHARE * len(items))
        is_own &= without_own_wording
        self.own_wording = int(is_own.sum())
        self._items = item_of[np.repeat(~is_own, lengths)]
        self._distinct = grams[starts[~is_own]]
        self._ends = np.cumsum(lengths[~is_own])
        self._starts = self._ends - lengths[~is_own]
        self._texts = items
        # One bit of 24 settles most look-ups, since most n-grams of training rows are in no item.
        self._filter = np.zeros(1 << _FILTER_BITS, bool)
        self._filter[self._distinct >> np.uint64(64 - _FILTER_BITS)] = True

    def look_up(self, texts: list[str]) -> tuple[Shares, Shares, Rows]:
        """Row coverage, item coverage and the item, of each text."""
        tokens = hash_tokens(texts)
        grams = ngrams(tokens, self._n)
        row_coverage, item_coverage = np.zeros(len(texts)), np.zeros(len(texts))
        best = np.full(len(texts), -1, np.int64)
        places, at = self._matches(grams.hashes)
        rows = np.searchsorted(grams.offsets, places, side="right") - 1
        for row in np.unique(rows):
            mine = rows == row
            n_tokens = int(tokens.counts[row])
            covered = _covered(places[mine] - grams.offsets[row], min(self._n, n_tokens), n_tokens)
            row_coverage[row] = covered / n_tokens
            best[row], item_coverage[row] = self._best_item(np.unique(at[mine]))
        return row_coverage, item_coverage, best

    def _matches(self, hashes: Hashes) -> tuple[Rows, Rows]:
        """Places of the hashes that are n-grams of items, and where each stands in the index."""
        if not len(self._distinct):
            return np.empty(0, np.int64), np.empty(0, np.int64)
        places = np.flatnonzero(self._filter[hashes >> np.uint64(64 - _FILTER_BITS)])
        at = np.minimum(np.searchsorted(self._distinct, hashes[places]), len(self._distinct) - 1)
        is_match = self._distinct[at] == hashes[places]
        return places[is_match], at[is_match]

    def _best_item(self, at: Rows) -> tuple[int, float]:
        """The item of which most tokens lie in the n-grams `at` of the index, and the share of its tokens."""
        items = self._items[gather_ranges(self._starts[at], self._ends[at] - self._starts[at])]
        candidates, n_common = np.unique(items, return_counts=True)
        # With k common n-grams at most k + n - 1 tokens are covered: only the few most promising are counted out.
        bound = np.minimum(n_common + self._n - 1, self._n_tokens[candidates]) / self._n_tokens[candidates]
        best, coverage = -1, 0.0
        for candidate in candidates[np.argsort(-bound, kind="stable")][:8]:
            n_tokens = int(self._n_tokens[candidate])
            grams = ngrams(hash_tokens([self._texts[int(candidate)]]), self._n)
            places = np.flatnonzero(np.isin(grams.hashes, self._distinct[at]))
            share = _covered(places, min(self._n, n_tokens), n_tokens) / n_tokens
            if share > coverage:
                best, coverage = int(candidate), share
        return best, coverage


def _all_grams(items: Texts, n: int) -> tuple[Hashes, Rows, npt.NDArray[np.bool_], Rows]:
    """The n-grams of all items, the item of each; whether an item is shorter than n; the tokens of each item."""
    hashes: list[Hashes] = [np.empty(0, np.uint64)]
    item_of: list[Rows] = [np.empty(0, np.int64)]
    tokens: list[Rows] = [np.empty(0, np.int64)]
    for first, grams, counts in _gram_batches(items, n):
        hashes.append(grams.hashes)
        item_of.append(first + np.repeat(np.arange(len(grams)), grams.counts))
        tokens.append(counts)
    n_tokens = np.concatenate(tokens)
    return np.concatenate(hashes), np.concatenate(item_of), n_tokens < n, n_tokens


def _gram_batches(items: Texts, n: int) -> Iterator[tuple[int, TokenHashes, Rows]]:
    for first, texts in batches(items):
        tokens = hash_tokens(texts)
        yield first, ngrams(tokens, n), tokens.counts


def _differs(values: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Whether each value is another than the one before it; the first is."""
    differs = np.ones(len(values), bool)
    differs[1:] = values[1:] != values[:-1]
    return differs


def _covered(places: Rows, n: int, n_tokens: int) -> int:
    """How many of `n_tokens` tokens lie in runs of `n` that begin at `places`."""
    edges = np.zeros(n_tokens + 1, np.int64)
    np.add.at(edges, places, 1)
    np.add.at(edges, np.minimum(places + n, n_tokens), -1)
    return int(np.count_nonzero(np.cumsum(edges)[:n_tokens] > 0))
