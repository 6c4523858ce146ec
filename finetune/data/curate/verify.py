"""Exact Jaccard similarities of proposed pairs of rows, with bounded memory however many there are."""

from __future__ import annotations

from dataclasses import dataclass

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
Similarities = npt.NDArray[np.float64]

CROWD = 100  # a bucket of more rows is not compared all with all
_VAIN_PIVOTS = 20
_BLOCK_HASHES = 1 << 24  # n-grams held while pairs are verified: 128 MB
_PAIR_BITS = 12
_PAIRS_AT_ONCE = 1 << _PAIR_BITS
_HASH_BITS = np.uint64(64 - _PAIR_BITS)
_HASH = (np.uint64(1) << _HASH_BITS) - np.uint64(1)


def pack_pairs(one: Rows, other: Rows) -> Hashes:
    """Pairs as single numbers, the lower row first: sorted as the pairs are, and one number whatever the order."""
    low, high = np.minimum(one, other), np.maximum(one, other)
    return (low.astype(np.uint64) << np.uint64(32)) | high.astype(np.uint64)


def unpack_pairs(pairs: Hashes) -> tuple[Rows, Rows]:
    """The inverse: lower rows, higher rows."""
    return (pairs >> np.uint64(32)).astype(np.int64), (pairs & np.uint64(0xFFFFFFFF)).astype(np.int64)


class Verifier:
    """Computes exact Jaccard similarities of proposed pairs and collects those that reach the threshold."""

    def __init__(
        self, texts: Texts, ngram: int, threshold: float, n_ngrams: Rows, workers: int | None
    ) -> None:
        self._texts, self._ngram, self._threshold = texts, ngram, threshold
        self._n_ngrams, self._workers = n_ngrams, workers
        self._pairs: list[Hashes] = []
        self._jaccard: list[Similarities] = []
        self.n_verified = 0

    def link_equal_sets(self, rows: Rows, whole: Hashes) -> npt.NDArray[np.bool_]:
        """Link rows with equal sets to the first of them; False for those that are linked and need no more comparing.

        Equal signatures propose, the exact comparison decides, as everywhere.
        """
        order = np.argsort(whole, kind="stable")
        is_first = np.concatenate([[True], whole[order][1:] != whole[order][:-1]])[: len(order)]
        leaders = order[np.maximum.accumulate(np.where(is_first, np.arange(len(order)), 0))]
        followers = order[~is_first]
        jaccard = self.check(rows[leaders[~is_first]], rows[followers])
        stays = np.ones(len(rows), bool)
        stays[followers[jaccard == 1.0]] = False
        return stays

    def check(self, left: Rows, right: Rows) -> Similarities:
        """Jaccard of each pair (left[k], right[k]); pairs at or above the threshold are kept for the result."""
        jaccard = np.empty(len(left), np.float64)
        load = np.cumsum(self._n_ngrams[left] + self._n_ngrams[right])
        cuts = np.searchsorted(load, np.arange(_BLOCK_HASHES, load[-1] if len(load) else 0, _BLOCK_HASHES))
        for block in np.split(np.arange(len(left)), np.unique(cuts)):
            jaccard[block] = self._measure(left[block], right[block])
        found = (jaccard >= self._threshold) & (left != right)
        self._pairs.append(pack_pairs(left[found], right[found]))
        self._jaccard.append(jaccard[found])
        self.n_verified += len(left)
        return jaccard

    def check_crowd(self, rows: Rows, may_lead: npt.NDArray[np.bool_]) -> Rows:
        """Compare a crowd of rows around pivots; returns the rows that none took and that were left unpaired.

        The first row that `may_lead` is compared with all others, and those near to it leave the crowd; then the next.
        It ends when few enough are left to compare all with all, or after 20 pivots that were near to hardly any row.
        """
        vain = 0
        while len(rows) > CROWD and may_lead.any() and vain < _VAIN_PIVOTS:
            pivot = int(np.argmax(may_lead))
            jaccard = self.check(
                np.full(len(rows), rows[pivot]), rows
            )  # its pair with itself is left out of the result
            vain += int(np.count_nonzero(jaccard >= self._threshold) <= 0.01 * len(rows))
            stays = jaccard < self._threshold
            rows, may_lead = rows[stays], may_lead[stays]
        if len(rows) <= CROWD:
            one, other = np.triu_indices(len(rows), 1)
            self.check(rows[one], rows[other])
            return rows[:0]
        return rows[may_lead]

    def found(self) -> tuple[Hashes, Similarities]:
        """The packed pairs that reached the threshold, sorted, each once, and their similarities."""
        pairs, where = np.unique(np.concatenate([np.empty(0, np.uint64), *self._pairs]), return_index=True)
        return pairs, np.concatenate([np.empty(0), *self._jaccard])[where]

    def _measure(self, left: Rows, right: Rows) -> Similarities:
        rows, places = np.unique(np.concatenate([left, right]), return_inverse=True)
        sets = self._sets(rows)
        at_left, at_right = places[: len(left)], places[len(left) :]
        parts = range(0, len(left), _PAIRS_AT_ONCE)
        jaccards = map_ordered(
            lambda start: _jaccard(
                sets, at_left[start : start + _PAIRS_AT_ONCE], at_right[start : start + _PAIRS_AT_ONCE]
            ),
            parts,
            self._workers,
        )
        return np.concatenate([np.empty(0), *jaccards])

    def _sets(self, rows: Rows) -> TokenHashes:
        """The distinct n-grams of each row, sorted, as 52-bit hashes."""
        chosen = _Chosen(self._texts, rows.tolist())
        parts = list(
            map_ordered(
                lambda batch: _distinct_sorted(ngrams(hash_tokens(batch[1]), self._ngram)),
                batches(chosen),
                self._workers,
            )
        )
        counts = np.concatenate([np.zeros(1, np.int64), *(part.counts for part in parts)])
        hashes = np.concatenate([np.empty(0, np.uint64), *(part.hashes for part in parts)])
        return TokenHashes(hashes, np.cumsum(counts))


@dataclass(frozen=True, slots=True)
class _Chosen:
    """Some of the texts, fetched when asked for."""

    texts: Texts
    rows: list[int]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int, /) -> str:
        return self.texts[self.rows[index]]


def _distinct_sorted(grams: TokenHashes) -> TokenHashes:
    """Each row's hashes cut to 52 bits, sorted, repeats left out; at most 4,096 rows."""
    shift = np.uint64(_PAIR_BITS)
    row_of = np.repeat(np.arange(len(grams), dtype=np.uint64), grams.counts) << _HASH_BITS
    packed = np.sort(row_of | (grams.hashes >> shift))
    packed = packed[np.concatenate([[True], packed[1:] != packed[:-1]])[: len(packed)]]
    counts = np.bincount((packed >> _HASH_BITS).astype(np.int64), minlength=len(grams))
    return TokenHashes(packed & _HASH, np.concatenate([[0], np.cumsum(counts)]).astype(np.int64))


def _jaccard(sets: TokenHashes, left: Rows, right: Rows) -> Similarities:
    """Exact similarities of at most 4,096 pairs of sets: both sets of a pair are sorted together, equals are common."""
    sizes = sets.counts
    n_left, n_right = sizes[left], sizes[right]
    pair_of = np.concatenate(
        [np.repeat(np.arange(len(left)), n_left), np.repeat(np.arange(len(left)), n_right)]
    )
    places = np.concatenate(
        [gather_ranges(sets.offsets[left], n_left), gather_ranges(sets.offsets[right], n_right)]
    )
    packed = np.sort((pair_of.astype(np.uint64) << _HASH_BITS) | sets.hashes[places])
    common_of = packed[1:][packed[1:] == packed[:-1]] >> _HASH_BITS
    common = np.bincount(common_of.astype(np.int64), minlength=len(left))
    similarities: Similarities = common / np.maximum(n_left + n_right - common, 1)
    return similarities
