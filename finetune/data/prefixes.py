"""Beginnings that rows of a pack have in common, e.g. a system prompt, so that a forward pass computes them once.

A row's states depend on nothing that comes behind them. What two rows begin with is therefore computed alike in both, and
the second one can go on from the first one's (`model/documents.py`): the same losses and gradients for fewer tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from finetune.data.packing import pack
from finetune.data.row_tokens import IGNORED, TokenisedRow

# A row that goes on from another one attends in a call with a mask, which fewer tokens than these do not pay for.
FEWEST_TOKENS = 8

Ids = Sequence[int]


def shared_beginnings(rows: Sequence[tuple[Ids, Ids]]) -> list[tuple[int, int]]:
    """For each row of a pack, (input_ids, labels): the row before it whose beginning it has, and for how many tokens.

    (its own place, 0) for a row that begins on its own. All targets of a row stay in its own part, with one token or more
    before the first of them.
    """
    found: list[tuple[int, int]] = []
    whole: list[int] = []  # rows that begin on their own
    for place, (ids, labels) in enumerate(rows):
        limit = max(_first_target(labels) - 1, 0)
        known = [(common_length(ids, rows[other][0], limit), -other) for other in whole]
        length, other = max(known, default=(0, 0))
        if length < FEWEST_TOKENS:
            whole.append(place)
            length, other = 0, -place
        found.append((-other, length))
    return found


def common_length(one: Ids, other: Ids, limit: int) -> int:
    """Tokens that both begin with, at most `limit`."""
    pairs = itertools.islice(zip(one, other, strict=False), limit)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


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
