"""Which training rows hold what an evaluation asks: runs of words that both have, counted by `curate.contamination`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from finetune.data.curate.contamination import find_contamination
from finetune.data.curate.tokens import Texts
from finetune.data.fold import fold_text
from finetune.data.rows import Progress
from finetune.data.spec_split import GuardSection

Indices = npt.NDArray[np.int64]
_ITEMS_AT_ONCE = 100_000  # bounds the memory of the index, some 4 kB a question of fifty words


@dataclass(frozen=True)
class Overlaps:
    """Row rows[k] holds what item items[k] asks; each row once. `coverage` is the share of the item's words in it."""

    rows: Indices
    items: Indices
    coverage: npt.NDArray[np.float64]


@dataclass(frozen=True)
class _Slice:
    texts: Texts
    indices: Indices

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int, /) -> str:
        return self.texts[int(self.indices[index])]


def find_overlaps(
    texts: Texts,
    items: Texts,
    section: GuardSection,
    *,
    without_own_wording: bool = True,
    on_progress: Progress = lambda share: None,
) -> Overlaps:
    """Rows that share a run of `any_ngram` words with an item, or whose runs of `ngram` words cover enough of one.

    Leave wording that many rows share out of both: see `finetune.data.wording`. `without_own_wording` also leaves out
    what many of the items share, an evaluation's instruction.
    """
    coverage = np.zeros(len(texts))
    found = np.full(len(texts), -1, np.int64)
    starts = range(0, len(items), _ITEMS_AT_ONCE) if len(texts) else range(0)
    for start in starts:
        block = _Slice(items, np.arange(start, min(start + _ITEMS_AT_ONCE, len(items))))
        rows, item, covered = _overlaps_in_block(texts, block, section, without_own_wording)
        is_first = found[rows] < 0
        found[rows[is_first]] = item[is_first] + start
        coverage[rows[is_first]] = covered[is_first]
        on_progress((start + len(block)) / len(items))
    rows = np.flatnonzero(found >= 0)
    return Overlaps(rows, found[rows], coverage[rows])


def equal_texts(texts: Texts, items: Texts) -> Overlaps:
    """Rows whose text is an item but for case, compatibility forms and white space: short ones share no long run."""
    at = {fold_text(items[index]): index for index in reversed(range(len(items)))}
    found = [(row, item) for row in range(len(texts)) if (item := at.get(fold_text(texts[row]), -1)) >= 0]
    pairs = np.array(found, np.int64).reshape(-1, 2)
    return Overlaps(pairs[:, 0], pairs[:, 1], np.ones(len(pairs)))


def _overlaps_in_block(
    texts: Texts, block: _Slice, section: GuardSection, without_own_wording: bool
) -> tuple[Indices, Indices, npt.NDArray[np.float64]]:
    rows = np.arange(len(texts))
    hits: list[tuple[Indices, Indices, npt.NDArray[np.float64]]] = []
    if section.ngram is not None:
        found = find_contamination(texts, block, n=section.ngram, without_own_wording=without_own_wording)
        is_hit = found.item_coverage >= section.coverage
        hits.append((rows[is_hit], found.item[is_hit], found.item_coverage[is_hit]))
        if section.any_ngram is not None and section.any_ngram >= section.ngram:
            rows = rows[(found.item >= 0) & ~is_hit]  # what shares the longer run shares the shorter one too
    if section.any_ngram is not None and len(rows):
        found = find_contamination(
            _Slice(texts, rows), block, n=section.any_ngram, without_own_wording=without_own_wording
        )
        is_hit = found.item >= 0
        hits.append((rows[is_hit], found.item[is_hit], found.item_coverage[is_hit]))
    none = np.empty(0, np.int64)
    return (
        np.concatenate([none, *(hit[0] for hit in hits)]),
        np.concatenate([none, *(hit[1] for hit in hits)]),
        np.concatenate([np.empty(0), *(hit[2] for hit in hits)]),
    )
