"""Which answers a person reads: drawn evenly from fixed, broken, both wrong and both right, with the arms blinded."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from finetune.errors import UserError
from finetune.evaluation.pairing import pair_records
from finetune.evaluation.records import Record, question_of
from finetune.evaluation.repeats import first_answers
from finetune.evaluation.reviewed import answer_digest
from finetune.evaluation.suite import Suite

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

    @property
    def digests(self) -> dict[str, str]:
        """arm role -> digest of its answer: a verdict counts for these answers and no others."""
        return {arm: answer_digest(text) for arm, text in self.answers.items()}


IsRight = Callable[[Record], bool | None]  # None: the scorer says nothing of this answer


def scorer_says(suite: Suite) -> IsRight:
    """Whether the suite's deciding metric calls an answer right: a full score, or, of a judge, one that passes."""
    rules = suite.judges().get(suite.primary_metric)

    def is_right(record: Record) -> bool | None:
        score = record["scores"].get(suite.primary_metric)
        if score is None:
            return None
        return rules.passes(score) if rules is not None else score == 1.0

    return is_right


def readable_suite(suites: Sequence[Suite], *, named: bool) -> Suite:
    """The first suite whose answers a person can call right or wrong. named: the user chose it, so it must be the first."""
    for suite in suites[:1] if named else suites:
        if suite.task == "generate":
            return suite
    raise UserError(
        f"suite {suites[0].name} measures likelihoods: it has no answers to read",
        fix="name a suite with written answers: --suite NAME",
    )


def draw_review(
    suite: str, is_right: IsRight, baseline: Sequence[Record], tuned: Sequence[Record], *, n: int, seed: int
) -> list[ReviewItem]:
    """`n` items (all when there are fewer), as evenly from the four strata as they allow, in random order.

    Of several answers to an item the first is read. Items of which `is_right` knows nothing are left out. The draw, the
    order and the sides depend on `seed` alone, and a larger draw holds the smaller one.
    """
    pairs = [
        (left, right, before, after)
        for left, right in zip(*pair_records(first_answers(baseline), first_answers(tuned)), strict=True)
        if (before := is_right(left)) is not None and (after := is_right(right)) is not None
    ]
    generator = random.Random(seed)
    pools: dict[str, list[int]] = {stratum: [] for stratum in STRATA}
    for place, (_, _, before, after) in enumerate(pairs):
        pools[_stratum(before, after)].append(place)
    for pool in pools.values():
        generator.shuffle(pool)
    sides = [generator.random() < 0.5 for _ in pairs]  # one for each item, so that a larger draw changes none
    chosen: list[tuple[str, int]] = []
    while len(chosen) < n and any(pools.values()):
        for stratum in STRATA:
            if pools[stratum] and len(chosen) < n:
                chosen.append((stratum, pools[stratum].pop()))
    generator.shuffle(chosen)
    return [_item(suite, stratum, *pairs[place], turned=sides[place]) for stratum, place in chosen]


def _item(
    suite: str, stratum: str, left: Record, right: Record, before: bool, after: bool, *, turned: bool
) -> ReviewItem:
    return ReviewItem(
        item=left["item"],
        suite=suite,
        stratum=stratum,
        question=question_of(right),
        reference=left["reference"],
        answers={"baseline": left["output"], "tuned": right["output"]},
        right={"baseline": before, "tuned": after},
        sides=("tuned", "baseline") if turned else ("baseline", "tuned"),
    )


def _stratum(before: bool, after: bool) -> str:
    if before == after:
        return "both_right" if before else "both_wrong"
    return "fixed" if after else "broken"
