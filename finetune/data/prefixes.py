"""Beginnings that rows of a pack have in common, e.g. a system prompt, so that a forward pass computes them once.

A row's states depend on nothing that comes behind them. What two rows begin with is therefore computed alike in both, and
the second one can go on from the first one's (`model/documents.py`): the same losses and gradients for fewer tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from finetune.data.packing import pack
from finetune.data.row_tokens import IGNORED, TokenisedRow

# A row that goes on from another one attends in a call with a mask, or in two, which fewer tokens than these do not pay for,
# nor fewer than this share of the row: 16 tokens cost a row of 1,500 six times what they save.
FEWEST_TOKENS = 8
_SMALLEST_SHARE = 1 / 16

Ids = Sequence[int]


def shared_beginnings(rows: Sequence[tuple[Ids, Ids]]) -> list[tuple[int, int]]:
    """For each row of a pack, (input_ids, labels): the row before it whose beginning it has, and for how many tokens.

    (its own place, 0) for a row that begins on its own. All targets of a row stay in its own part, with one token or more
    before the first of them. A row goes on only from one that begins on its own.
    """
    found = [(place, 0) for place in range(len(rows))]
    alike: dict[tuple[int, ...], list[int]] = {}
    for place, (ids, _) in enumerate(rows):
        alike.setdefault(tuple(ids[:FEWEST_TOKENS]), []).append(place)
    for places in alike.values():
        if len(places) > 1:
            for place, shared in zip(places, _among([rows[place] for place in places]), strict=True):
                found[place] = (places[shared[0]], shared[1])
    return found


def _among(rows: Sequence[tuple[Ids, Ids]]) -> list[tuple[int, int]]:
    """`shared_beginnings` of rows that all begin alike.

    A row that could go on from another one begins on its own all the same where that saves those behind it more tokens than it
    costs: two system prompts whose first sentence is the same.
    """
    ids = [row_ids for row_ids, _ in rows]
    limits = [max(_first_target(labels) - 1, 0) for _, labels in rows]
    fewest = [max(FEWEST_TOKENS, len(row_ids) * _SMALLEST_SHARE) for row_ids in ids]
    best = [(place, 0) for place in range(len(rows))]
    if all(limit < least for limit, least in zip(limits, fewest, strict=True)):
        return best  # texts, of which every token is learnt
    neighbours = _Neighbours(ids)

    def behind(place: int, more_than: int) -> Iterator[tuple[int, int]]:
        """Rows to come that had better have more than so many tokens from row `place`, and how many."""
        alike = neighbours.of(place, more_than=more_than)
        usable = ((other, min(common, limits[other])) for other, common in alike if other > place)
        return ((other, length) for other, length in usable if length > more_than and length >= fewest[other])

    for place in range(len(rows)):
        _, length = best[place]
        if length:
            saved = (max(tokens - best[other][1], 0) for other, tokens in behind(place, length))
            if sum(saved) <= length:
                continue
        best[place] = (place, 0)
        # What a row has in common with this one up to there, it has with the one that this would have gone on from.
        for other, tokens in behind(place, max(length, FEWEST_TOKENS - 1)):
            if tokens > best[other][1]:
                best[other] = (place, tokens)
    return best


class _Neighbours:
    """Which rows have how much in common with a row, from sorted rows: what two have is the least between any two that lie
    between them."""

    def __init__(self, ids: Sequence[Ids]) -> None:
        self._order = sorted(range(len(ids)), key=lambda place: tuple(ids[place]))
        self._rank = {place: rank for rank, place in enumerate(self._order)}
        pairs = itertools.pairwise(self._order)
        self._common = [0, *(common_length(ids[one], ids[other]) for one, other in pairs), 0]

    def of(self, place: int, *, more_than: int) -> Iterator[tuple[int, int]]:
        """(row, tokens that it begins with like row `place`), of all that have more than so many."""
        rank, common = self._rank[place], self._common
        for ranks, gaps in (
            (range(rank - 1, -1, -1), range(rank, -1, -1)),
            (range(rank + 1, len(self._order)), range(rank + 1, len(self._order))),
        ):
            least = itertools.accumulate((common[gap] for gap in gaps), min)
            for other, length in zip(ranks, least, strict=False):
                if length <= more_than:
                    break
                yield self._order[other], length


def common_length(one: Ids, other: Ids) -> int:
    """Tokens that both begin with."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def computed_tokens(rows: Sequence[TokenisedRow]) -> int:
    """Tokens of a pack of these rows when common beginnings are computed once."""
    repeated = sum(length for _, length in shared_beginnings([(row.input_ids, row.labels) for row in rows]))
    return sum(len(row.input_ids) for row in rows) - repeated


def longest_pack(rows: Sequence[TokenisedRow], pack_tokens: int, *, share: bool) -> int:
    """Tokens that the longest pack of these rows takes through the model; `share`: common beginnings once."""
    packs = pack([len(row.input_ids) for row in rows], pack_tokens)
    if not share:
        return max(sum(len(rows[index].input_ids) for index in members) for members in packs)
    return max(computed_tokens([rows[index] for index in members]) for members in packs)


def _first_target(labels: Ids) -> int:
    """Place of the first target; that of the last token where there is none."""
    return next((place for place, label in enumerate(labels) if label != IGNORED), len(labels) - 1)
