"""Choosing rows of one side while nothing of them is on another: evaluation sides first, then train."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from finetune.data.questions import Questions
from finetune.data.rows import SIDES, Progress, Side
from finetune.data.spec import DatasetSpec
from finetune.data.spec_split import GuardSection
from finetune.data.stages.choose import choose
from finetune.data.stages.guard import (
    IN_FILE,
    NEAR,
    NGRAM,
    Lost,
    lose_near,
    lose_quotes,
    shared_wording,
    train_overlaps,
)
from finetune.data.stages.settle import Verdicts
from finetune.data.stages.sides import SideCodes
from finetune.data.stages.table import Ints, RowTable
from finetune.data.stages.work import WorkFolder, part_of
from finetune.data.wording import NO_WORDING, SharedWording

WORDING = "wording.json"
EVALUATION: tuple[Side, ...] = SIDES[1:]
TRAIN: tuple[Side, ...] = SIDES[:1]


def choose_apart(
    table: RowTable,
    side: SideCodes,
    spec: DatasetSpec,
    evaluations: Sequence[Questions],
    verdicts: Verdicts,
    work: WorkFolder,
    on_progress: Progress,
) -> dict[Side, Ints]:
    """The rows that are used, none of them near to or quoting what another side asks.

    Evaluation rows are chosen before train rows are compared with them, so that no train row goes because of a question
    that is not asked.
    """
    guard = spec.split.guard
    wording = shared_wording(table, verdicts.kept) if guard.is_on else NO_WORDING
    if wording:
        wording.write(work.out / WORDING)
    guarding = _Guarding(table, side, guard, wording, verdicts, work)
    guarding.keep_apart(EVALUATION, part_of(on_progress, 0.0, 0.2))
    chosen = choose(table, side, spec.select, spec.seed, verdicts, of=EVALUATION)
    guarding.keep_apart(TRAIN, part_of(on_progress, 0.2, 1.0))
    guarding.drop_quotes_of(evaluations)
    chosen |= choose(table, side, spec.select, spec.seed, verdicts, spec.weights, of=TRAIN)
    on_progress(1.0)
    return chosen


@dataclass(frozen=True)
class _Guarding:
    """What is dropped because nearly the same, or a part of it, is on a side that goes before."""

    table: RowTable
    side: SideCodes
    section: GuardSection
    wording: SharedWording
    verdicts: Verdicts
    work: WorkFolder

    def keep_apart(self, of: tuple[Side, ...], on_progress: Progress) -> None:
        """Compare rows of the sides in `of` with those that go before, and drop what is not kept apart."""
        codes = [SIDES.index(name) for name in of]
        threshold, phase = self.section.near_duplicates, "-".join(of)
        if threshold is not None:
            near_to = part_of(on_progress, 0.0, 0.5)
            self._drop(
                NEAR,
                f"near-{phase}",
                lambda: lose_near(self.table, self.side, self._rows(of), threshold, self.wording, near_to),
                codes,
            )
        if self.section.counts_ngrams:
            quotes_to = part_of(on_progress, 0.5, 1.0)
            self._drop(
                NGRAM,
                f"quotes-{phase}",
                lambda: lose_quotes(
                    self.table, self.side, self._rows(of), self.section, self.wording, quotes_to, of=of
                ),
                codes,
            )

    def drop_quotes_of(self, evaluations: Sequence[Questions]) -> None:
        """Drop train rows that hold what another evaluation asks."""
        for questions in evaluations:
            kept = self.verdicts.kept
            train = kept[self.side[kept] == SIDES.index("train")]
            found = train_overlaps(self.table, train, questions, self.section, self.wording)
            self.verdicts.drop(IN_FILE, train[found.rows])
            named = zip(train[found.rows].tolist(), found.items.tolist(), strict=True)
            self.verdicts.because_of |= {row: questions.ids[item] for row, item in named}

    def _rows(self, of: tuple[Side, ...]) -> Ints:
        """What is left of the sides in `of` and of those that go before them."""
        kept = self.verdicts.kept
        return kept if "train" in of else kept[self.side[kept] != SIDES.index("train")]

    def _drop(self, reason: str, key: str, find: Callable[[], Lost], codes: list[int]) -> None:
        found = self.work.remembered(key, lambda: vars(find()))
        lost, cause = found["rows"], found["cause"]
        assert np.isin(self.side[lost], codes).all(), "chosen rows of other sides stay"
        self.verdicts.drop(reason, lost, cause, self.side[cause])
