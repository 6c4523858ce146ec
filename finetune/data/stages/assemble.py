"""A dataset build from top to bottom: the stages in their order, each with one responsibility, and the manifest.

read     files → parts on disk, one a piece of the input; faulty rows are quarantined
table    keys of all rows in memory, texts on disk
curate   rows that the spec does not want, whatever side they would be on
sides    group → side
settle   exact duplicates once; no prompt, group or unique tag on two sides
guard    no near duplicate on two sides
choose   limits, balance and weights
write    split files, ledger, card, manifest
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa

from finetune.data.card import write_card
from finetune.data.questions import Questions
from finetune.data.read import Reject, check_one_use, check_reject_rate
from finetune.data.rows import SIDES, Progress, Side
from finetune.data.spec import DatasetSpec
from finetune.data.spec_source import HomeIntentsSource, RowsSource
from finetune.data.spec_split import SplitSection
from finetune.data.stages.apart import choose_apart
from finetune.data.stages.curate import (
    describe_duplicates,
    describe_rows,
    leave_out_alike,
    warnings_of,
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
from finetune.data.stages.table import RowTable
from finetune.data.stages.work import WorkFolder, part_of
from finetune.data.stages.write import write_ledger, write_sides
from finetune.digest import digest_json
from finetune.errors import UserError, did_you_mean
from finetune.paths import write_json

MANIFEST = "manifest.json"
ASSIGNMENT = "assignment.json"
_REJECTS_SHOWN = 5
_MANY_LOST = 0.1
# Where each stage begins in the whole, by the time that a million rows take.
_SHARES = {"read": 0.0, "curate": 0.45, "guard": 0.5, "write": 0.9}


@dataclass(frozen=True)
class Plan:
    """Everything a build is made from. `digest` covers all of it; `where` gives the place of a key of the spec.

    code: digest of the code that decides the rows. reader: of the part of it that reads the input, so that a change
    after it reads nothing again.
    """

    spec: DatasetSpec
    digest: str
    code: str
    reader: str
    inputs: Sequence[Input]
    folder: Path
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
    parts = read_pieces(pieces, work.parts, runner, _part_of(on_progress, "read", "curate"))
    _check_rejects(plan, parts)
    table = RowTable.of_parts(
        [part.folder for part in parts],
        [part.piece.origin for part in parts],
        [part.piece.pinned for part in parts],
    )
    _require_tags(plan, table)
    verdicts = Verdicts(len(table))
    curating = _part_of(on_progress, "curate", "guard")
    curation = leave_out_alike(table, spec.curate, plan.folder, verdicts, work, curating)
    units = _units(table, spec.split)
    group_sides, side = _sides(table, spec.split, plan.frozen, verdicts, units)
    links = links_of(table, spec.split, None if units is None else units[table.group.codes].astype(np.int32))
    settle(table, side, links, verdicts, train_repeats=spec.curate.exact_duplicates != "drop")
    guarding = _part_of(on_progress, "guard", "write")
    chosen = choose_apart(table, side, spec, plan.questions, verdicts, work, guarding)
    _require_train(chosen, plan.where("split"))
    leaks = shared_keys(side, links, verdicts.kept)
    if any(leaks.values()):
        raise AssertionError(f"the split put rows on two sides: {leaks}")
    splits, files = write_sides(work.out, table, chosen, _part_of(on_progress, "write", None))
    ledger, ledger_files = write_ledger(work.out, parts, table, side, verdicts, len(verdicts.kept))
    if spec.split.is_drawn:
        write_assignment(work.out / ASSIGNMENT, table.group.values, group_sides, spec.split)
    curation |= describe_duplicates(table, spec.curate, verdicts)
    curation |= describe_rows(table, spec.curate, chosen, _findings(parts))
    manifest = {
        **_head(plan, parts),
        "splits": splits,
        "repeated": sum(map(len, chosen.values())) - len(verdicts.kept),
        "ledger": ledger,
        "leaks": _leak_counts(leaks, spec.split),
        "warnings": [
            *warnings_of(curation),
            *_loss_warnings(ledger, splits),
            *_empty_sides(spec.split, splits, int((group_sides >= 0).sum())),
            *_absent_tags(plan, table, parts),
            *_absent_marks(plan),
        ],
        "curation": curation,
        "files": files | ledger_files,
    }
    table.lines.close()
    write_card(work.out, manifest)
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


def _check_rejects(plan: Plan, parts: Sequence[ReadPart]) -> None:
    """Raise UserError when too many rows of a source are faulty, or when there is none."""
    for given in plan.inputs:
        if isinstance(given.source, HomeIntentsSource):
            continue
        own = _parts_of(given, parts)
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
            [one.file.name for one in given.files],
            plan.where("source"),
        )
    kinds: Counter[str] = Counter()
    for part in parts:
        kinds.update(part.counts["kinds"])
    check_one_use(kinds, plan.where("source"))


def _require_tags(plan: Plan, table: RowTable) -> None:
    """Raise UserError for a key of the spec that names a tag which no row has."""
    spec = plan.spec
    one = {
        "split.stratify_by": spec.split.stratify_by,
        "select.balance_by": spec.select.balance_by,
        "curate.consistent_within": spec.curate.consistent_within,
    }
    named = [(key, tag) for key, tag in one.items() if tag is not None]
    named += [("split.unique_by", tag) for tag in spec.split.unique_tags]
    named += [("split.unite_by", tag) for tag in spec.split.unite_tags]
    declared = {tag for source in spec.sources if isinstance(source, RowsSource) for tag in source.tags}
    for key, tag in named:
        if not len(table.tag(tag)):
            known = (declared | table.tag_names()) - {tag}
            raise UserError(
                f"no row has the tag '{tag}'",
                where=plan.where(key),
                why="source.tags names it, and no row has a value under that key" if tag in declared else "",
                fix=did_you_mean(tag, known)
                if known
                else f"name the key of the rows in source.tags: [{'a key they have' if tag in declared else tag}]",
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
    described = [_described(given, parts) for given in plan.inputs if not given.pinned]
    source = described[0] if len(described) == 1 else {"kind": "several", "sources": described}
    pinned = [_described(given, parts) for given in plan.inputs if given.pinned]
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


def _described(given: Input, parts: Sequence[ReadPart]) -> dict[str, Any]:
    """A source, where it is from, and how many rows were read from it."""
    read = sum(part.counts["read"] for part in _parts_of(given, parts))
    return {**given.describe(), **given.provenance(), "read": read}


def _parts_of(given: Input, parts: Sequence[ReadPart]) -> list[ReadPart]:
    return [part for part in parts if part.piece.origin == given.origin and part.piece.pinned == given.pinned]


def _leak_counts(leaks: Mapping[str, int], split: SplitSection) -> dict[str, int]:
    """Kind of leak -> how many there are, as `find_leaks` names them."""
    named = {"exact": leaks[PROMPT], "group": leaks[GROUP]}
    named |= {tag: leaks[tag_reason(tag)] for tag in split.unique_tags}
    named |= dict.fromkeys(split.unite_tags, leaks.get(UNITED, 0))
    named |= {"near": 0} if split.guard.near_duplicates is not None else {}
    return named | ({"ngram": 0} if split.guard.counts_ngrams else {})


def _findings(parts: Sequence[ReadPart]) -> Counter[str]:
    """Personal data by kind, in all rows that were read."""
    found: Counter[str] = Counter()
    for part in parts:
        found.update(part.counts["findings"])
    return found


def _loss_warnings(ledger: Mapping[str, Any], splits: Mapping[str, Any]) -> list[str]:
    """Train rows that were lost because something of them is on an evaluation side, where they are many."""
    lost = {reason: n for reason, n in ledger["dropped"].items() if reason.endswith("_other_side")}
    n_lost, n_train = sum(lost.values()), splits["train"]["rows"]
    if n_lost <= _MANY_LOST * (n_train + n_lost):
        return []
    return [
        f"{n_lost} rows were dropped because something of them is on another side ({', '.join(lost)}); rows that belong "
        "together are best kept together by source.group_by, or by split.unite_by for a tag"
    ]


def _empty_sides(split: SplitSection, splits: Mapping[str, Any], n_groups: int) -> list[str]:
    """Sides that were to have a share of the rows and have none, as happens where groups are few."""
    empty = [side for side in SIDES if split.shares.get(side) and not splits[side]["rows"]]
    if not empty:
        return []
    told = " and ".join(f"{side} ({split.shares[side]:.0%})" for side in empty)
    return [
        f"no row is on the side of {told}: with few groups, here {n_groups}, their hashes can miss a side. "
        "split.stratify_by deals groups by exact shares; else give the data more groups, or the side a larger share"
    ]


def _absent_tags(plan: Plan, table: RowTable, parts: Sequence[ReadPart]) -> list[str]:
    """Tags that the spec names and no row has; a key of the spec that needs one has been refused already."""
    passed_over = {key for part in parts for key in part.counts["ignored_keys"]}
    declared = {tag for source in plan.spec.sources if isinstance(source, RowsSource) for tag in source.tags}
    return [
        f"no row has '{tag}', which source.tags names"
        + (f"; {did_you_mean(tag, passed_over)}" if passed_over else "")
        for tag in sorted(declared)
        if not len(table.tag(tag))
    ]


def _absent_marks(plan: Plan) -> list[str]:
    """A file of marks that is not there: it is made by the review, but its name may be wrong as well."""
    marks = plan.spec.marks
    if marks is None or (plan.folder / marks).is_file():
        return []
    return [f"marks names {marks}, which is not there: no mark was applied"]


def _part_of(on_progress: Progress, start: str, stop: str | None) -> Progress:
    """Progress of one stage as progress of the whole."""
    return part_of(on_progress, _SHARES[start], _SHARES[stop] if stop is not None else 1.0)
