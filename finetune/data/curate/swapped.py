"""Judgements that contradict one another: the same two answers to a prompt preferred both ways, or one answer wanted and not."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from finetune.data.fold import fold_turns
from finetune.data.rows import Row, Turn, digest_content

_Key = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Swapped:
    """Row numbers: `one` judges as `other` does, the other way round. `one` holds the first row."""

    one: tuple[int, ...]
    other: tuple[int, ...]

    @property
    def rows(self) -> tuple[int, ...]:
        """All of them, in order."""
        return tuple(sorted((*self.one, *self.other)))


def find_swapped(rows: Sequence[Row]) -> list[Swapped]:
    """Pairs of one prompt with chosen and rejected changed over, and judged answers that are wanted and not; by first row.

    Prompts are the same when they differ in case, compatibility forms or white space only; answers must be the same to the
    letter, because a pair may be about just such a difference. Rows of other kinds judge nothing. What different pairs say
    together (a before b, b before c, c before a) is not looked at.
    """
    pairs: dict[_Key, list[int]] = defaultdict(list)
    judged: dict[_Key, dict[bool, list[int]]] = defaultdict(lambda: {True: [], False: []})
    for number, row in enumerate(rows):
        if row.kind == "preference":
            pairs[(_prompt(row), _answer(row.chosen), _answer(row.rejected))].append(number)
        elif row.kind == "kto" and row.label is not None:
            asked = row.prompt
            judged[(_prompt(row), _answer(row.messages[len(asked) :]))][row.label].append(number)
    found = [
        Swapped(tuple(numbers), tuple(pairs[(prompt, rejected, chosen)]))
        for (prompt, chosen, rejected), numbers in [*pairs.items()]
        if numbers[0] < min(pairs.get((prompt, rejected, chosen), ()), default=-1)
    ]
    for labels in judged.values():
        if labels[True] and labels[False]:
            one, other = sorted(labels.values())
            found.append(Swapped(tuple(one), tuple(other)))
    return sorted(found, key=lambda each: each.one)


def _prompt(row: Row) -> str:
    return digest_content([fold_turns(row.prompt), row.tools])


def _answer(turns: Iterable[Turn]) -> str:
    """Marks of training (`train`, `weight`) change nothing of what is said."""
    return digest_content(
        [{key: turn[key] for key in sorted(turn) if key not in ("train", "weight")} for turn in turns]
    )
