"""Which answers a person reads: drawn evenly from fixed, broken, both wrong and both right, with the arms blinded."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from finetune.evaluation.pairing import pair_records
from finetune.evaluation.records import Record
from finetune.evaluation.repeats import first_answers
from finetune.evaluation.scoring import scores_of

STRATA = ("broken", "fixed", "both_wrong", "both_right")


@dataclass(frozen=True)
class ReviewItem:
    """One item to read. `sides` says which arm stands left and right; the reader is not told."""

    item: str
    suite: str
    stratum: str
    question: str
    reference: str
    answers: dict[str, str]  # arm role -> answer
    right: dict[str, bool]  # arm role -> what the scorer says
    sides: tuple[str, str]


def draw_review(
    suite: str,
    metric: str,
    baseline: Sequence[Record],
    tuned: Sequence[Record],
    *,
    n: int,
    seed: int,
) -> list[ReviewItem]:
    """`n` items (all when there are fewer), as evenly from the four strata as they allow, in random order.

    An answer counts as right when its score on `metric` is 1; of several answers to an item the first is read. The draw, the order and the sides depend on `seed` alone.
    """
    left, right = pair_records(first_answers(baseline), first_answers(tuned))
    outcomes = list(zip(scores_of(left, metric), scores_of(right, metric), strict=True))
    generator = random.Random(seed)
    pools: dict[str, list[int]] = {stratum: [] for stratum in STRATA}
    for place, (before, after) in enumerate(outcomes):
        pools[_stratum(before == 1.0, after == 1.0)].append(place)
    for pool in pools.values():
        generator.shuffle(pool)
    chosen: list[tuple[str, int]] = []
    while len(chosen) < n and any(pools.values()):
        for stratum in STRATA:
            if pools[stratum] and len(chosen) < n:
                chosen.append((stratum, pools[stratum].pop()))
    generator.shuffle(chosen)
    return [
        ReviewItem(
            item=left[place]["item"],
            suite=suite,
            stratum=stratum,
            question=right[place]["prompt"],
            reference=left[place]["reference"],
            answers={"baseline": left[place]["output"], "tuned": right[place]["output"]},
            right={"baseline": outcomes[place][0] == 1.0, "tuned": outcomes[place][1] == 1.0},
            sides=("baseline", "tuned") if generator.random() < 0.5 else ("tuned", "baseline"),
        )
        for stratum, place in chosen
    ]


def _stratum(before: bool, after: bool) -> str:
    if before == after:
        return "both_right" if before else "both_wrong"
    return "fixed" if after else "broken"
