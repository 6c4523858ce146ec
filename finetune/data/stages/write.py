"""The last stage: the split files and the ledger, written from the parts without holding rows in memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from finetune.data.rows import SIDES, Progress, Row, Side
from finetune.data.stages.digests import DigestingFile, SideHasher
from finetune.data.stages.parts import DROPPED, QUARANTINED, iter_entries, json_line, parse_line
from finetune.data.stages.read import ReadPart
from finetune.data.stages.settle import Verdicts
from finetune.data.stages.table import Ints, RowTable
from finetune.paths import disk_faults

LEDGER = "ledger.jsonl"
REJECTS = "rejects.jsonl"
_ROWS_AT_ONCE = 10_000


def side_file(side: Side) -> str:
    """Name of the file of a side."""
    return f"{side}.jsonl"


def write_sides(
    folder: Path, table: RowTable, chosen: Mapping[Side, Ints], on_progress: Progress
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Write the rows of each side in the given order. Side -> {rows, digest}, and file name -> {bytes, sha256}."""
    splits: dict[str, Any] = {}
    files: dict[str, Any] = {}
    done, total = 0, sum(len(rows) for rows in chosen.values()) or 1
    for side in SIDES:
        hasher = SideHasher()
        with _digesting(folder / side_file(side), files) as file:
            for row in chosen[side].tolist():
                line = table.line(row)
                file.write(line + b"\n")
                hasher.add(Row.from_dict(parse_line(line)))
                if hasher.n_rows % _ROWS_AT_ONCE == 0:
                    on_progress((done + hasher.n_rows) / total)
        done += hasher.n_rows
        splits[side] = {"rows": hasher.n_rows, "digest": hasher.hexdigest()}
    on_progress(1.0)
    return splits, files


def write_ledger(
    folder: Path, parts: Sequence[ReadPart], table: RowTable, side: Any, verdicts: Verdicts, n_kept: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Write an entry for every row that is not used. The sums of the ledger, and file name -> {bytes, sha256}.

    Raises AssertionError when the sums do not add up: that is a bug, never shown to a user as success.
    """
    files: dict[str, Any] = {}
    reasons: Counter[str] = Counter()
    n_entries = 0
    with _digesting(folder / LEDGER, files) as ledger, _digesting(folder / REJECTS, files) as rejects:
        for part in parts:
            for line in iter_entries(part.folder, DROPPED):
                ledger.write(line)
                n_entries += 1
            for line in iter_entries(part.folder, QUARANTINED):
                ledger.write(line)
                rejects.write(line)
                n_entries += 1
            reasons.update(part.counts["dropped"])
        for line in _dropped_lines(table, side, verdicts):
            ledger.write(line)
            n_entries += 1
    reasons.update(verdicts.counts())
    read = sum(part.counts["read"] for part in parts)
    quarantined = sum(part.counts["quarantined"] for part in parts)
    dropped = dict(sorted((reason, n) for reason, n in reasons.items() if n))
    if read != n_kept + n_entries or n_entries != sum(dropped.values()) + quarantined:
        raise AssertionError(
            f"row ledger: read {read} != kept {n_kept} + dropped {dropped} + quarantined {quarantined} "
            f"({n_entries} entries)"
        )
    return {"read": read, "kept": n_kept, "dropped": dropped, "quarantined": quarantined}, files


def _dropped_lines(table: RowTable, side: Any, verdicts: Verdicts) -> Iterator[bytes]:
    dropped = verdicts.dropped
    ids, sources = table.column("id"), table.column("source")
    for start in range(0, len(dropped), _ROWS_AT_ONCE):
        rows = dropped[start : start + _ROWS_AT_ONCE]
        causes = verdicts.cause[rows]
        named = zip(
            rows.tolist(),
            ids.take(pa.array(rows)).to_pylist(),
            sources.take(pa.array(rows)).to_pylist(),
            ids.take(pa.array(np.maximum(causes, 0))).to_pylist(),
            strict=True,
        )
        for row, name, source, cause in named:
            entry = {
                "reason": verdicts.reasons[verdicts.reason[row]],
                "kind": "dropped",
                "source": source,
                "id": name,
            }
            if side[row] >= 0:
                entry["side"] = SIDES[side[row]]
            if verdicts.other_side[row] >= 0:
                entry["other_side"] = SIDES[verdicts.other_side[row]]
            if verdicts.cause[row] >= 0:
                entry["because_of"] = cause
            elif row in verdicts.because_of:
                entry["because_of"] = verdicts.because_of[row]
            yield json_line(entry) + b"\n"


@contextmanager
def _digesting(path: Path, files: dict[str, Any]) -> Iterator[DigestingFile]:
    with disk_faults(path):
        file = DigestingFile(path)
        try:
            yield file
            files[path.name] = file.close()
        except BaseException:
            file.abandon()
            raise
