"""A dataset build from top to bottom: the stages in their order, each with one responsibility, and the manifest.

read     files → parts on disk, one a piece of the input; faulty rows are quarantined
table    keys of all rows in memory, texts on disk
curate   rows that the spec does not want, whatever side they would be on
sides    group → side
settle   exact duplicates once; no prompt, group or unique tag on two sides
guard    no near duplicate on two sides
choose   limits, balance and weights
write    split files, ledger, manifest
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import orjson
import pyarrow as pa

from finetune.data.questions import Questions
from finetune.data.read import Reject, check_reject_rate
from finetune.data.rows import SIDES, Progress, Side
from finetune.data.spec import DatasetSpec
from finetune.data.spec_source import HomeIntentsSource
from finetune.data.spec_split import GuardSection, SplitSection
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
from finetune.data.stages.parts import QUARANTINED, iter_entries
from finetune.data.stages.read import Input, Piece, ReadPart, read_pieces
from finetune.data.stages.runner import Runner
from finetune.data.stages.settle import (
    GROUP,
    PROMPT,
    UNITED,
    Verdicts,
    links_of,
    settle,
    shared_keys,
    tag_reason,
)
from finetune.data.stages.sides import SideCodes, assign_sides, write_assignment
from finetune.data.stages.table import Ints, RowTable
from finetune.data.stages.work import WorkFolder
from finetune.data.stages.write import write_ledger, write_sides
from finetune.data.wording import NO_WORDING, SharedWording
from finetune.digest import digest_json
from finetune.errors import UserError
from finetune.paths import write_json

MANIFEST = "manifest.json"
ASSIGNMENT = "assignment.json"
WORDING = "wording.json"
EVALUATION: tuple[Side, ...] = SIDES[1:]
_REJECTS_SHOWN = 5
# Where each stage begins in the whole, by the time that a million rows take.
_SHARES = {"read": 0.0, "guard": 0.6, "write": 0.9}


@dataclass(frozen=True)
class Plan:
    """Everything a build is made from. `digest` covers all of it; `where` gives the place of a key of the spec."""

    spec: DatasetSpec
    digest: str
    code: str
    inputs: Sequence[Input]
    frozen: Mapping[str, Side]
    questions: Sequence[Questions]
    where: Any


def make_build(
    plan: Plan, pieces: Sequence[Piece], work: WorkFolder, runner: Runner, on_progress: Progress
) -> dict[str, Any]:
    """Carry out the stages; the finished build is in `work.out`. Returns the manifest, which is written last.

    Raises UserError for too many faulty rows, no rows, and a split without train rows.
    """
    spec = plan.spec
    work.prepare({piece.key for piece in pieces}, plan.digest)
    parts = read_pieces(pieces, work.parts, runner, _part_of(on_progress, "read", "guard"))
    _check_rejects(plan, parts)
    table = RowTable.of_parts(
        [part.folder for part in parts],
        [part.piece.origin for part in parts],
        [part.piece.pinned for part in parts],
    )
    verdicts = Verdicts(len(table))
    units = _units(table, spec.split)
    group_sides, side = _sides(table, spec.split, plan.frozen, verdicts, units)
    links = links_of(table, spec.split, None if units is None else units[table.group.codes].astype(np.int32))
    settle(table, side, links, verdicts)
    chosen = _choose_apart(table, side, plan, verdicts, work, _part_of(on_progress, "guard", "write"))
    _require_train(chosen, plan.where("split"))
    leaks = shared_keys(side, links, verdicts.kept)
    if any(leaks.values()):
        raise AssertionError(f"the split put rows on two sides: {leaks}")
    splits, files = write_sides(work.out, table, chosen, _part_of(on_progress, "write", None))
    ledger, ledger_files = write_ledger(work.out, parts, table, side, verdicts, len(verdicts.kept))
    if spec.split.is_drawn:
        write_assignment(work.out / ASSIGNMENT, table.group.values, group_sides, spec.split)
    manifest = {
        **_head(plan, parts),
        "splits": splits,
        "repeated": sum(map(len, chosen.values())) - len(verdicts.kept),
        "ledger": ledger,
        "leaks": _leak_counts(leaks, spec.split),
        "files": files | ledger_files,
    }
    table.lines.close()
    write_json(work.out / MANIFEST, manifest)
    return manifest


def _units(table: RowTable, split: SplitSection) -> np.ndarray[Any, np.dtype[np.int64]] | None:
    """Group -> number of its unit, where the spec unites groups that share a tag; None: each is its own."""
    if not split.unite_tags:
        return None
    from finetune.data.curate.links import connected  # scipy: only when asked for

    groups, others = [], []
    n_nodes = len(table.group)
    for tag in split.unite_tags:
        values = table.tag(tag)
        has_value = values.codes >= 0
        groups.append(table.group.codes[has_value].astype(np.int64))
        others.append(values.codes[has_value].astype(np.int64) + n_nodes)
        n_nodes += len(values)
    lowest = connected(n_nodes, np.concatenate(groups), np.concatenate(others))[: len(table.group)]
    return np.unique(lowest, return_inverse=True)[1].astype(np.int64)


def _sides(
    table: RowTable, split: SplitSection, frozen: Mapping[str, Side], verdicts: Verdicts, units: Any
) -> tuple[SideCodes, SideCodes]:
    """Side of each group, and of each row: -1 where no row of a group is left. Pinned rows are regressions."""
    kept = verdicts.kept
    drawn = kept[~table.pinned[kept]]
    present = np.unique(table.group.codes[drawn])
    strata = None
    if split.stratify_by is not None:
        by_row = _ranked(table, split.stratify_by)
        lowest = np.full(len(table.group), np.iinfo(np.int64).max)
        np.minimum.at(lowest, table.group.codes[drawn], by_row[drawn])
        strata = lowest[present]
    group_sides = np.full(len(table.group), -1, np.int8)
    group_sides[present] = assign_sides(
        table.group.values.take(pa.array(present)),
        split,
        strata=strata,
        unit_of=None if units is None else np.unique(units[present], return_inverse=True)[1],
        frozen=frozen,
    )
    side = group_sides[table.group.codes]
    side[table.pinned] = SIDES.index("regressions")
    return group_sides, side


def _ranked(table: RowTable, tag: str) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Row -> rank of its value of a tag, 0 where it has none. Rows of a group may differ: the lowest rank stands for it."""
    values = table.tag(tag)
    ranks = np.zeros(len(values) + 1, np.int64)
    names = values.values.to_pylist()
    for rank, code in enumerate(sorted(range(len(names)), key=names.__getitem__), start=1):
        ranks[code] = rank
    return ranks[values.codes]


def _choose_apart(
    table: RowTable,
    side: SideCodes,
    plan: Plan,
    verdicts: Verdicts,
    work: WorkFolder,
    on_progress: Progress,
) -> dict[Side, Ints]:
    """The rows that are used, none of them near to or quoting what another side asks.

    Evaluation rows are chosen before train rows are compared with them, so that no train row goes because of a question
    that is not asked.
    """
    spec, guard = plan.spec, plan.spec.split.guard
    wording = shared_wording(table, verdicts.kept) if guard.is_on else NO_WORDING
    if wording:
        wording.write(work.out / WORDING)
    chosen: dict[Side, Ints] = {}
    for phase, sides, low, high in (("evaluation", EVALUATION, 0.0, 0.2), ("train", SIDES[:1], 0.2, 1.0)):
        rows = verdicts.kept
        if phase == "evaluation":
            rows = rows[side[rows] != SIDES.index("train")]
        _guard(table, side, rows, guard, wording, verdicts, work, phase, _slice(on_progress, low, high))
        if phase == "train":
            _drop_quotes_of(plan.questions, table, side, guard, wording, verdicts)
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
        near_to = _slice(on_progress, 0.0, 0.5)
        lost = work.remembered(
            f"near-{phase}", lambda: vars(lose_near(table, side, rows, threshold, wording, near_to))
        )
        verdicts.drop(NEAR, lost["rows"], lost["cause"], side[lost["cause"]])
        rows = np.setdiff1d(rows, lost["rows"])
    if section.counts_ngrams:
        quotes_to = _slice(on_progress, 0.5, 1.0)
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


def _check_rejects(plan: Plan, parts: Sequence[ReadPart]) -> None:
    """Raise UserError when too many rows of a source are faulty, or when there is none."""
    for given in plan.inputs:
        if isinstance(given.source, HomeIntentsSource):
            continue
        own = [
            part for part in parts if part.piece.origin == given.origin and part.piece.pinned == given.pinned
        ]
        entries = (line for part in own for line in iter_entries(part.folder, QUARANTINED))
        first = [orjson.loads(line) for line in islice(entries, _REJECTS_SHOWN)]
        check_reject_rate(
            given.source,
            sum(part.counts["read"] for part in own),
            sum(part.counts["quarantined"] for part in own),
            [
                Reject(entry["source"], entry["line"], entry["byte"], entry["reason"], entry["raw"])
                for entry in first
            ],
            [file.name for file, _ in given.files],
            plan.where("source"),
        )


def _require_train(chosen: Mapping[Side, Any], where: str) -> None:
    """A build without train rows is of no use; say which key to change."""
    if not len(chosen["train"]):
        counts = ", ".join(f"{side} {len(chosen[side])}" for side in SIDES)
        raise UserError(
            f"the split leaves no train rows ({counts})",
            where=where,
            why="with few groups the hash of their names can put all of them on the evaluation sides; and what is on "
            "an evaluation side is dropped from train",
            fix="give the data more groups, raise split.shares.train, or change split.salt",
        )


def _head(plan: Plan, parts: Sequence[ReadPart]) -> dict[str, Any]:
    spec = plan.spec
    ignored: Counter[str] = Counter()
    for part in parts:
        ignored.update(part.counts["ignored_keys"])
    described = [given.describe() for given in plan.inputs if not given.pinned]
    source = described[0] if len(described) == 1 else {"kind": "several", "sources": described}
    pinned = [given.describe() for given in plan.inputs if given.pinned]
    return {
        "format": 1,
        "digest": plan.digest,
        "name": spec.name,
        "description": spec.description,
        "licence": spec.licence,
        "seed": spec.seed,
        "spec_digest": digest_json(spec.model_dump(mode="json")),
        "code_digest": plan.code,
        "unique_by": spec.split.unique_tags,
        "unite_by": spec.split.unite_tags,
        "guard": spec.split.guard.model_dump(mode="json"),
        "source": {**source, "ignored_keys": dict(sorted(ignored.items()))},
    } | ({"pinned": pinned[0]} if pinned else {})


def _leak_counts(leaks: Mapping[str, int], split: SplitSection) -> dict[str, int]:
    """Kind of leak -> how many there are, as `find_leaks` names them."""
    named = {"exact": leaks[PROMPT], "group": leaks[GROUP]}
    named |= {tag: leaks[tag_reason(tag)] for tag in split.unique_tags}
    named |= dict.fromkeys(split.unite_tags, leaks.get(UNITED, 0))
    named |= {"near": 0} if split.guard.near_duplicates is not None else {}
    return named | ({"ngram": 0} if split.guard.counts_ngrams else {})


def _part_of(on_progress: Progress, start: str, stop: str | None) -> Progress:
    """Progress of one stage as progress of the whole."""
    return _slice(on_progress, _SHARES[start], _SHARES[stop] if stop is not None else 1.0)


def _slice(on_progress: Progress, low: float, high: float) -> Progress:
    return lambda share: on_progress(low + share * (high - low))
