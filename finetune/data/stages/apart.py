"""Choosing rows of one side while nothing of them is on another: evaluation sides first, then train."""

from __future__ import annotations

from collections.abc import Sequence

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
    chosen: dict[Side, Ints] = {}
    for phase, sides, low, high in (("evaluation", EVALUATION, 0.0, 0.2), ("train", SIDES[:1], 0.2, 1.0)):
        rows = verdicts.kept
        if phase == "evaluation":
            rows = rows[side[rows] != SIDES.index("train")]
        _guard(table, side, rows, guard, wording, verdicts, work, phase, part_of(on_progress, low, high))
        if phase == "train":
            _drop_quotes_of(evaluations, table, side, guard, wording, verdicts)
        chosen |= choose(table, side, spec.select, spec.seed, verdicts, spec.weights, of=sides)
    on_progress(1.0)
    return chosen


def _guard(
    table: RowTable,
    side: SideCodes,
    rows: Ints,
    section: GuardSection,
    wording: SharedWording,
    verdicts: Verdicts,
    work: WorkFolder,
    phase: str,
    on_progress: Progress,
) -> None:
    """Drop what is on two sides of `rows` although no key shows it."""
    threshold = section.near_duplicates
    if threshold is not None:
        near_to = part_of(on_progress, 0.0, 0.5)
        lost = work.remembered(
            f"near-{phase}", lambda: vars(lose_near(table, side, rows, threshold, wording, near_to))
        )
        verdicts.drop(NEAR, lost["rows"], lost["cause"], side[lost["cause"]])
        rows = np.setdiff1d(rows, lost["rows"])
    if section.counts_ngrams:
        quotes_to = part_of(on_progress, 0.5, 1.0)
        lost = work.remembered(
            f"quotes-{phase}", lambda: vars(lose_quotes(table, side, rows, section, wording, quotes_to))
        )
        verdicts.drop(NGRAM, lost["rows"], lost["cause"], side[lost["cause"]])


def _drop_quotes_of(
    evaluations: Sequence[Questions],
    table: RowTable,
    side: SideCodes,
    section: GuardSection,
    wording: SharedWording,
    verdicts: Verdicts,
) -> None:
    """Drop train rows that hold what another evaluation asks."""
    for questions in evaluations:
        kept = verdicts.kept
        train = kept[side[kept] == SIDES.index("train")]
        found = train_overlaps(table, train, questions, section, wording)
        verdicts.drop(IN_FILE, train[found.rows])
        named = zip(train[found.rows].tolist(), found.items.tolist(), strict=True)
        verdicts.because_of |= {row: questions.ids[item] for row, item in named}
