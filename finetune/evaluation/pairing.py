"""Two arms' answers side by side, item by item."""

from __future__ import annotations

from collections.abc import Sequence

from finetune.errors import UserError
from finetune.evaluation.items import refuse_duplicates
from finetune.evaluation.records import Record, repeat_of
from finetune.evaluation.repeats import per_item

_SHOWN = 3
_SAME = ("reference", "cluster")  # what must not differ between two answers to one item


def pair_records(
    baseline: Sequence[Record], arm: Sequence[Record], *, inner: bool = False
) -> tuple[list[Record], list[Record]]:
    """One record an item of both arms, in one order. Several answers to an item are averaged (see `per_item`).

    Raises UserError when an answer is repeated or, unless `inner`, when an item has an answer on one side only.
    """
    for records, side in ((baseline, "the baseline"), (arm, "the arm")):
        _refuse_repeated_answers(records, side)
    left = {record["item"]: record for record in per_item(baseline)}
    right = {record["item"]: record for record in per_item(arm)}
    only_left = [item for item in left if item not in right]
    only_right = [item for item in right if item not in left]
    if (only_left or only_right) and not inner:
        raise UserError(
            f"the arms do not answer the same items: {len(only_left)} only in the baseline{examples(only_left)}, "
            f"{len(only_right)} only in the arm{examples(only_right)}",
            why="a paired comparison needs both answers to every item",
            fix="evaluate both arms on the same suite and items, or compare what they share with --inner",
        )
    shared = [item for item in left if item in right]
    other = [item for item in shared for key in _SAME if left[item].get(key, "") != right[item].get(key, "")]
    if other:
        raise UserError(
            f"{len(set(other))} items of one name are not the same item on both sides{examples(other)}",
            why="their reference or cluster differs",
            fix="evaluate both arms on the same version of the suite",
        )
    return [left[item] for item in shared], [right[item] for item in shared]


def _refuse_repeated_answers(records: Sequence[Record], side: str) -> None:
    repeated = len({(record["item"], repeat_of(record)) for record in records}) < len(records)
    if repeated:
        names = [
            record["item"] if not repeat_of(record) else f"{record['item']} (repeat {repeat_of(record)})"
            for record in records
        ]
        refuse_duplicates(names, side)


def examples(items: Sequence[str]) -> str:
    """' (a, b, c, …)' for a message; empty without items."""
    if not items:
        return ""
    return f" ({', '.join(items[:_SHOWN])}{', …' if len(items) > _SHOWN else ''})"
