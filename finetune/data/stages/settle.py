"""Which rows are kept where: duplicates once, and nothing that must be on one side on two. Drops have a reason.

Rows are taken side by side, evaluation first, and within a side in an order that depends on what rows say and not on
where they stood. A row is dropped when something of it belongs to another side already; else it claims what it has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from finetune.data.rows import SIDES
from finetune.data.spec_split import SplitSection
from finetune.data.stages.sides import PRECEDENCE, SideCodes
from finetune.data.stages.table import Codes, Ints, RowTable

DUPLICATE = "duplicate"
PROMPT = "prompt_on_other_side"
GROUP = "group_on_other_side"
UNITED = "united_with_other_side"


def tag_reason(tag: str) -> str:
    """Why a row goes whose value of `tag` is on another side."""
    return f"{tag}_on_other_side"


@dataclass(frozen=True)
class Link:
    """A key that rows of one side only may share; `codes` has one entry a row, -1 where a row has no such key."""

    reason: str
    codes: Codes


class Verdicts:
    """What became of every row of a table: kept, or dropped with a reason and, where there is one, the cause.

    cause: the row because of which a row was dropped, -1 where no single row is known. other_side: the side that keeps
    what they share, -1 where there is none. because_of: a cause that is no row, by the row that was dropped.
    """

    def __init__(self, n_rows: int) -> None:
        self.reasons: list[str] = []
        self.reason = np.full(n_rows, -1, np.int16)
        self.cause = np.full(n_rows, -1, np.int64)
        self.other_side = np.full(n_rows, -1, np.int8)
        self.because_of: dict[int, str] = {}

    def drop(
        self, reason: str, rows: Ints, cause: Ints | None = None, other_side: SideCodes | None = None
    ) -> None:
        """Drop rows that are still kept."""
        if not len(rows):
            return
        assert (self.reason[rows] < 0).all(), "a row is dropped once"
        if reason not in self.reasons:
            self.reasons.append(reason)
        self.reason[rows] = self.reasons.index(reason)
        if cause is not None:
            self.cause[rows] = cause
        if other_side is not None:
            self.other_side[rows] = other_side

    @property
    def kept(self) -> Ints:
        """The rows that are not dropped, as they stand."""
        return np.flatnonzero(self.reason < 0)

    @property
    def dropped(self) -> Ints:
        return np.flatnonzero(self.reason >= 0)

    def counts(self) -> dict[str, int]:
        """Reason -> number of rows."""
        found = np.bincount(self.reason[self.reason >= 0], minlength=len(self.reasons))
        return dict(zip(self.reasons, found.tolist(), strict=True))


def links_of(table: RowTable, split: SplitSection, units: Codes | None = None) -> list[Link]:
    """Everything that may be on one side only, as the spec says. `units` are the united groups of each row."""
    links = [Link(PROMPT, table.prompt.codes), Link(GROUP, table.group.codes)]
    if units is not None:
        links.append(Link(UNITED, units))
    return links + [Link(tag_reason(tag), table.tag(tag).codes) for tag in split.unique_tags]


def settle(
    table: RowTable,
    side: SideCodes,
    links: Sequence[Link],
    verdicts: Verdicts,
    *,
    train_repeats: bool = False,
) -> None:
    """Drop exact duplicates and rows that share a key with a row of a side that goes first.

    `side` is the side of each row. Pinned rows are taken before all others. train_repeats: duplicates stay on the train
    side; what is measured is asked once in any case.
    """
    rows = verdicts.kept
    rank = PRECEDENCE[side[rows]]
    rows = rows[np.lexsort((table.place[rows], ~table.pinned[rows], rank))]
    taken = _take(
        side[rows].tolist(),
        table.content.codes[rows].tolist(),
        [link.codes[rows].tolist() for link in links],
        len(table.content),
        [int(link.codes.max(initial=-1)) + 1 for link in links],
        SIDES.index("train") if train_repeats else -1,
    )
    verdict = np.array(taken, np.int64).reshape(-1, 2)
    is_duplicate = verdict[:, 0] == len(links)
    verdicts.drop(DUPLICATE, rows[is_duplicate], _first_with_content(table, rows, verdict, is_duplicate))
    for number, link in enumerate(links):
        here = verdict[:, 0] == number
        verdicts.drop(link.reason, rows[here], other_side=verdict[here, 1].astype(np.int8))


def _take(
    sides: list[int],
    contents: list[int],
    links: list[list[int]],
    n_contents: int,
    n_keys: list[int],
    repeating: int,
) -> list[tuple[int, int]]:
    """For each row in turn (number of the link that forbids it, the side that holds it); (-1, -1): it is kept.

    Exact duplicates have the number after the last link; on the side `repeating` they are like other rows.
    """
    seen = bytearray(n_contents)
    owners = [bytearray(n) for n in n_keys]  # side + 1, or 0 while nobody has claimed the key
    pairs = list(zip(links, owners, strict=True))
    duplicate, kept = (len(links), -1), (-1, -1)
    verdicts: list[tuple[int, int]] = []
    for place, (side, content) in enumerate(zip(sides, contents, strict=True)):
        if seen[content] and side != repeating:
            verdicts.append(duplicate)
            continue
        mine = side + 1
        for number, (codes, owner) in enumerate(pairs):
            code = codes[place]
            if code >= 0 and owner[code] not in (0, mine):
                verdicts.append((number, owner[code] - 1))
                break
        else:
            seen[content] = 1
            for codes, owner in pairs:
                if codes[place] >= 0:
                    owner[codes[place]] = mine
            verdicts.append(kept)
    return verdicts


def _first_with_content(
    table: RowTable, rows: Ints, verdict: npt.NDArray[np.int64], is_duplicate: npt.NDArray[np.bool_]
) -> Ints:
    """The kept row of which each duplicate is one."""
    keeper = np.full(len(table.content), -1, np.int64)
    kept = rows[verdict[:, 0] == -1]
    keeper[table.content.codes[kept]] = kept
    return keeper[table.content.codes[rows[is_duplicate]]]


def shared_keys(side: SideCodes, links: Sequence[Link], rows: Ints) -> dict[str, int]:
    """Reason -> number of keys that are on two sides among `rows`: all zero after `settle`, or there is a fault."""
    found: dict[str, int] = {}
    for link in links:
        codes, sides = link.codes[rows], side[rows]
        n_keys = int(codes.max(initial=-1)) + 1
        low, high = np.full(n_keys, len(SIDES)), np.full(n_keys, -1)
        held = codes >= 0
        np.minimum.at(low, codes[held], sides[held])
        np.maximum.at(high, codes[held], sides[held])
        found[link.reason] = int(((high >= 0) & (low != high)).sum())
    return found
