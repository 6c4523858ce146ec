"""Near duplicates: MinHash-LSH proposes pairs of rows, exact Jaccard decides; nothing unverified is ever reported.

J(a, b) = |A ∩ B| / |A ∪ B| over the sets of word n-grams. With p hash functions in b bands of r = p / b rows, a pair is
proposed with chance 1 - (1 - J^r)^b (Leskovec, Rajaraman, Ullman: Mining of Massive Datasets, 3.4).
A 64-bit hash stands for each n-gram; 52 bits of it are compared, so that an exact count is wrong once in some 10^11 pairs.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from finetune.data.curate.links import components, connected, links, representatives
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
from finetune.data.curate.verify import CROWD, Rows, Verifier, pack_pairs, unpack_pairs
from finetune.errors import UserError

__all__ = ["NearDuplicates", "components", "find_near_duplicates", "representatives"]

Progress = Callable[[float], None]

_STEP = np.uint64(0x9E3779B97F4A7C15)
_PAIRS_HELD = 1 << 24  # proposals held before repeats are left out: 128 MB
_MIN_RECALL = 0.95  # at the threshold itself; above it, recall is higher


@dataclass(frozen=True, slots=True)
class NearDuplicates:
    """Verified pairs: row `first[k]` < row `second[k]` with exact Jaccard `similarity[k]` >= the threshold, in order.

    Rows with equal sets of n-grams are linked to the first of them only: what is near to one is as near to the others.
    `empty` are rows without any word, which are near to nothing. `n_verified` is the number of pairs looked at. In a
    crowd of more than 100 rows that all may be alike, pairs are looked at around pivots, so that not each is listed;
    `unchecked` are the rows of a crowd too diverse for that, mostly texts that share a long instruction.
    """

    first: Rows
    second: Rows
    similarity: npt.NDArray[np.float64]
    empty: Rows
    unchecked: Rows
    n_verified: int

    def __len__(self) -> int:
        return len(self.first)

    def __iter__(self) -> Iterator[tuple[int, int, float]]:
        return zip(self.first.tolist(), self.second.tolist(), self.similarity.tolist(), strict=True)


def find_near_duplicates(
    texts: Texts,
    *,
    threshold: float = 0.6,
    ngram: int = 3,
    permutations: int = 96,
    seed: int = 1,
    workers: int | None = None,
    on_progress: Progress = lambda share: None,
) -> NearDuplicates:
    """All pairs of texts whose n-gram sets have a Jaccard similarity of at least `threshold`, each verified.

    Words are those of `tokens.hash_tokens`: case, spaces and sentence punctuation do not count; in scripts without
    spaces the n-grams are of characters. Recall is at least 0.95 at the threshold and tends to 1 above it. Texts are
    fetched in order, then once more where a pair is to be verified. Rows that stand first are the ones that others are
    linked to: give them in the order in which you would keep them. Leave text that all rows share, e.g. a system
    prompt, out of `texts`: it would make all rows alike. `workers` threads, by default one a core.

    Raises UserError when the threshold is not in (0, 1] or there are too few permutations to reach that recall.
    """
    bands = bands_for(threshold, permutations)
    sketches = _sketch_all(texts, ngram, permutations, bands, seed, workers, on_progress)
    verify = Verifier(texts, ngram, threshold, sketches.n_ngrams, workers)
    active = np.flatnonzero(sketches.n_ngrams > 0)
    active = active[verify.link_equal_sets(active, sketches.whole[active])]
    crowds: list[Rows] = []
    proposed: list[Hashes] = []
    for keys in sketches.by_band:
        pairs, crowded = _pairs_in_buckets(keys, active)
        proposed.append(pairs)
        crowds += crowded
        if sum(map(len, proposed)) > _PAIRS_HELD:
            proposed = [_each_once(proposed)]
    verify.check(*unpack_pairs(_each_once(proposed)))
    unchecked = _check_crowds(crowds, verify, len(texts))
    on_progress(1.0)
    found, jaccard = verify.found()
    empty = np.flatnonzero(sketches.n_ngrams == 0)
    return NearDuplicates(*unpack_pairs(found), jaccard, empty, unchecked, verify.n_verified)


def bands_for(threshold: float, permutations: int) -> int:
    """The fewest bands, i.e. the fewest false proposals, with a recall of at least 0.95 at the threshold."""
    if not 0 < threshold <= 1:
        raise UserError(f"the similarity threshold is {threshold:g}", fix="choose one above 0, at most 1")
    for bands in (bands for bands in range(1, permutations + 1) if permutations % bands == 0):
        if 1 - (1 - threshold ** (permutations // bands)) ** bands >= _MIN_RECALL:
            return bands
    raise UserError(
        f"{permutations} permutations cannot find pairs of similarity {threshold:g} with 95 % recall",
        fix="use more permutations, e.g. 256, or a higher threshold",
    )


@dataclass(frozen=True, slots=True)
class _Sketches:
    """by_band: bucket keys, shape [bands, rows]. whole: one key of the whole signature. n_ngrams: repeats included."""

    by_band: Hashes
    whole: Hashes
    n_ngrams: Rows


def _sketch_all(
    texts: Texts,
    ngram: int,
    permutations: int,
    bands: int,
    seed: int,
    workers: int | None,
    on_progress: Progress,
) -> _Sketches:
    n = len(texts)
    sketches = _Sketches(np.zeros((bands, n), np.uint64), np.zeros(n, np.uint64), np.zeros(n, np.int64))

    def sketch(batch: tuple[int, list[str]]) -> int:
        first, rows = batch
        grams = ngrams(hash_tokens(rows), ngram)
        keys = _band_keys(_signatures(grams, permutations, seed), bands)
        here = slice(first, first + len(rows))
        sketches.by_band[:, here] = keys
        sketches.whole[here] = _fold_columns(keys)
        sketches.n_ngrams[here] = grams.counts
        return here.stop

    for done in map_ordered(sketch, batches(texts), workers):
        on_progress(0.8 * done / n)
    return sketches


def _signatures(grams: TokenHashes, permutations: int, seed: int) -> npt.NDArray[np.uint32]:
    """MinHash values, shape [rows, permutations], by rensa.

    Batches are small, so that the lists in which rensa hands them over stay in the processor's cache.
    """
    from rensa import RMinHash

    matrix: Any = RMinHash.digest_matrix_from_flat_token_hashes(
        grams.hashes, grams.offsets.astype(np.uint64), permutations, seed
    )
    values = array("I")
    for row in matrix.to_rows():
        values.fromlist(row)
    return np.frombuffer(values, np.uintc).astype(np.uint32, copy=False).reshape(len(grams), permutations)


def _band_keys(signatures: npt.NDArray[np.uint32], bands: int) -> Hashes:
    """One 64-bit key for each band and row, shape [bands, rows]."""
    return _fold_columns(signatures.reshape(len(signatures), bands, -1).transpose(2, 1, 0))


def _fold_columns(values: npt.NDArray[np.unsignedinteger[Any]]) -> Hashes:
    """A hash along the first axis."""
    keys = np.zeros(values.shape[1:], np.uint64)
    for column in values:
        keys = (keys ^ column) * _STEP
        keys ^= keys >> np.uint64(29)
    return keys


def _pairs_in_buckets(keys: Hashes, active: Rows) -> tuple[Hashes, list[Rows]]:
    """Pairs (lower row, higher row), packed, of every bucket of one band, and the buckets too crowded for that."""
    if len(active) < 2:
        return np.empty(0, np.uint64), []
    # Key and place share one number, so that one plain sort does; a key cut short costs some false proposals.
    place_bits = np.uint64(len(active).bit_length())
    places = np.arange(len(active), dtype=np.uint64)
    packed = np.sort((keys[active] >> place_bits << place_bits) | places)
    buckets = packed >> place_bits
    edges = np.flatnonzero(np.concatenate([[True], buckets[1:] != buckets[:-1], [True]]))
    sizes = np.diff(edges)
    rows = active[(packed & ((np.uint64(1) << place_bits) - np.uint64(1))).astype(np.int64)]
    crowds = [
        rows[start : start + size]
        for start, size in zip(edges[:-1][sizes > CROWD], sizes[sizes > CROWD], strict=True)
    ]
    is_small = (sizes > 1) & (sizes <= CROWD)
    starts, sizes = edges[:-1][is_small], sizes[is_small]
    place_of = gather_ranges(starts, sizes)
    left_in_bucket = np.repeat(starts + sizes, sizes) - place_of
    found = [np.empty(0, np.uint64)]
    for step in range(1, int(sizes.max(initial=1))):
        place_of, left_in_bucket = place_of[left_in_bucket > step], left_in_bucket[left_in_bucket > step]
        found.append(pack_pairs(rows[place_of], rows[place_of + step]))
    return np.concatenate(found), crowds


def _each_once(parts: list[Hashes]) -> Hashes:
    """Sorted, without repeats. A plain sort is several times faster than `np.unique`."""
    pairs: Hashes = np.sort(np.concatenate(parts))
    is_new = np.ones(len(pairs), bool)
    is_new[1:] = pairs[1:] != pairs[:-1]
    return pairs[is_new]


def _check_crowds(crowds: list[Rows], verify: Verifier, n_rows: int) -> Rows:
    """Crowds that share a row are one crowd, whose pivots are rows that nothing stands for yet; returns the unchecked."""
    if not crowds:
        return np.empty(0, np.int64)
    leads = np.concatenate([np.full(len(crowd), crowd[0]) for crowd in crowds])
    members = np.concatenate(crowds)
    crowd_of = connected(n_rows, leads, members)
    is_kept = representatives(n_rows, links(*verify.found())) == np.arange(n_rows)
    everyone = np.unique(members)
    order = np.argsort(crowd_of[everyone], kind="stable")
    everyone = everyone[order]
    starts = np.flatnonzero(np.diff(crowd_of[everyone])) + 1
    parts = [verify.check_crowd(crowd, is_kept[crowd]) for crowd in np.split(everyone, starts)]
    return np.sort(np.concatenate(parts))
