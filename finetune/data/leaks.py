"""The proof that no evaluation row was seen in training: exact prompts and groups that are on two sides."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from finetune.data.rows import SIDES, Row, Side
from finetune.data.split import normalised_prompt


@dataclass(frozen=True, slots=True)
class Leak:
    """Two rows on different sides that share what must be on one side only. `kind` is exact, group or a tag's name."""

    kind: str
    key: str
    first_side: Side
    first_id: str
    second_side: Side
    second_id: str

    def to_dict(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "key": self.key,
            "first": {"side": self.first_side, "id": self.first_id},
            "second": {"side": self.second_side, "id": self.second_id},
        }


def find_leaks(by_side: Mapping[Side, list[Row]], unique_by: str | None = None) -> dict[str, list[Leak]]:
    """Kind -> leaks: 'exact' (same normalised prompt), 'group', and the tag `unique_by` when given.

    One leak is reported for each shared key and pair of sides, with one row of each side as the witness.
    """
    kinds: dict[str, Callable[[Row], str | None]] = {
        "exact": normalised_prompt,
        "group": lambda row: row.group,
    }
    if unique_by is not None:
        kinds[unique_by] = lambda row: row.tags.get(unique_by)
    return {kind: _shared(by_side, kind, key_of) for kind, key_of in kinds.items()}


def _shared(by_side: Mapping[Side, list[Row]], kind: str, key_of: Callable[[Row], str | None]) -> list[Leak]:
    witnesses: dict[str, dict[Side, str]] = defaultdict(dict)
    for side in SIDES:
        for row in by_side.get(side, []):
            key = key_of(row)
            if key is not None:
                witnesses[key].setdefault(side, row.id)
    leaks: list[Leak] = []
    for key, sides in sorted(witnesses.items()):
        present = list(sides)
        leaks += [
            Leak(kind, key, first, sides[first], second, sides[second])
            for index, first in enumerate(present)
            for second in present[index + 1 :]
        ]
    return leaks
