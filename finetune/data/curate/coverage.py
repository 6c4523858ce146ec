"""How many rows each value of each tag has, side by side: what is learnt but never measured, and what is rare."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

_MOST_VALUES = 200  # beyond it a tag is rather an id than a label


@dataclass(frozen=True, slots=True)
class TagCoverage:
    """Of one tag: value -> side -> rows, the most frequent value first; empty when the tag has more than 200 values.

    missing: rows without the tag. unmeasured: values with train rows and none on any evaluation side.
    """

    tag: str
    n_values: int
    values: dict[str, dict[str, int]]
    missing: int
    unmeasured: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        return {
            "tag": self.tag,
            "n_values": self.n_values,
            "missing": self.missing,
            "unmeasured": list(self.unmeasured),
            "values": self.values,
        }


def tag_coverage(rows: Iterable[tuple[str, Mapping[str, str]]]) -> list[TagCoverage]:
    """The coverage of every tag, in the order of their names, from (side, tags) of each row."""
    counts: dict[str, Counter[tuple[str, str]]] = defaultdict(Counter)
    n_rows = 0
    for side, tags in rows:
        n_rows += 1
        for tag, value in tags.items():
            counts[tag][value, side] += 1
    return [_of_tag(tag, counts[tag], n_rows) for tag in sorted(counts)]


def _of_tag(tag: str, counts: Counter[tuple[str, str]], n_rows: int) -> TagCoverage:
    by_value: dict[str, dict[str, int]] = defaultdict(dict)
    for (value, side), n in counts.items():
        by_value[value][side] = n
    ordered = sorted(by_value, key=lambda value: (-sum(by_value[value].values()), value))
    unmeasured = tuple(value for value in ordered if set(by_value[value]) == {"train"})
    is_label = len(ordered) <= _MOST_VALUES
    return TagCoverage(
        tag,
        len(ordered),
        {value: by_value[value] for value in ordered} if is_label else {},
        n_rows - counts.total(),
        unmeasured if is_label else (),
    )
