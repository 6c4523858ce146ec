"""A build against the questions of evaluations that are not its own: whole train rows that hold one are left out.

The build that a spec makes knows no recipe. What a recipe's suites ask is compared with its train rows here; when none
holds a question the build stays as it is, else a build without those rows is made beside it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from finetune.data.build import DatasetBuild, code_digest, complete_build
from finetune.data.card import CARD, CROISSANT, write_card
from finetune.data.leaks import read_side
from finetune.data.questions import Questions
from finetune.data.rows import Progress, Row, Side
from finetune.data.spec_split import GuardSection
from finetune.data.stages.apart import WORDING
from finetune.data.stages.assemble import MANIFEST
from finetune.data.stages.digests import DigestingFile, SideHasher
from finetune.data.stages.guard import train_overlaps
from finetune.data.stages.parts import json_line
from finetune.data.stages.table import RowTable
from finetune.data.stages.write import LEDGER, side_file
from finetune.data.wording import SharedWording
from finetune.digest import digest_json
from finetune.errors import UserError
from finetune.paths import disk_faults, read_json, write_json


def decontaminate(
    build: DatasetBuild, evaluations: Sequence[Questions], on_progress: Progress = lambda share: None
) -> tuple[DatasetBuild, dict[str, Any]]:
    """The build without train rows that hold a question of `evaluations`, and a report of what was found.

    The rule is the guard's of the build's spec: any shared run of 13 words, or runs of 8 words that cover half of a
    question, by default. Report: {"evaluations": {name: {"digest", "questions", "rows"}}, "rows": [{"row",
    "evaluation", "question", "coverage"}]}. It is kept beside the build, so that the same question is answered at once.
    Raises UserError when no train row is left.
    """
    if not evaluations:
        return build, {"evaluations": {}, "rows": []}
    section = GuardSection(**build.manifest.get("guard", {}))
    asked = {one.name: one.digest for one in evaluations}
    code = code_digest("decontaminate.py")
    key = digest_json(
        {"build": build.digest, "against": asked, "guard": section.model_dump(mode="json"), "code": code}
    )
    kept_report = build.folder / f"decontamination-{key[:16]}.json"
    if kept_report.is_file():
        report: dict[str, Any] = read_json(kept_report)
    else:
        report = _search(build, evaluations, section, on_progress)
        write_json(kept_report, report)
    on_progress(1.0)
    return (build if not report["rows"] else _without(build, report, key)), report


def rows_that_hold(build: DatasetBuild, side: Side, evaluations: Sequence[Questions]) -> set[str]:
    """Ids of the rows of a side that hold a question of `evaluations`, by the guard of the build's spec."""
    section = GuardSection(**build.manifest.get("guard", {}))
    return {hit["row"] for hit in _search(build, evaluations, section, lambda share: None, side)["rows"]}


def _search(
    build: DatasetBuild,
    evaluations: Sequence[Questions],
    section: GuardSection,
    on_progress: Progress,
    side: Side = "train",
) -> dict[str, Any]:
    report: dict[str, Any] = {"evaluations": {}, "rows": []}
    table: RowTable | None = None
    with contextlib.ExitStack() as opened:
        wording = SharedWording.read(build.folder / WORDING)
        taken: set[str] = set()
        for number, questions in enumerate(evaluations):
            if table is None and section.counts_ngrams:
                path = build.path(side)
                table = RowTable.of_keys([read_side(path).keys], [path], [0], [False])
                opened.callback(table.lines.close)
            hits = [] if table is None else _hits(table, questions, section, wording)
            new = [hit for hit in hits if hit["row"] not in taken]  # a repeated row is one row
            taken.update(hit["row"] for hit in new)
            report["rows"] += list({hit["row"]: hit for hit in new}.values())
            report["evaluations"][questions.name] = {
                "digest": questions.digest,
                "questions": len(questions.texts),
                "rows": len({hit["row"] for hit in hits}),
            }
            on_progress((number + 1) / len(evaluations))
    return report


def _hits(
    table: RowTable, questions: Questions, section: GuardSection, wording: SharedWording
) -> list[dict[str, Any]]:
    found = train_overlaps(table, np.arange(len(table)), questions, section, wording)
    return [
        {
            "row": table.text("id", row),
            "evaluation": questions.name,
            "question": questions.ids[item],
            "coverage": round(coverage, 4),
        }
        for row, item, coverage in zip(
            found.rows.tolist(), found.items.tolist(), found.coverage.tolist(), strict=True
        )
    ]


def _without(build: DatasetBuild, report: dict[str, Any], key: str) -> DatasetBuild:
    """The build beside `build` in which the reported rows are not train rows, made unless it is there."""
    digest = digest_json({"decontaminated": key})
    folder = build.folder.parent / f"{build.manifest['name']}-{digest[:8]}"
    found = complete_build(folder, digest)
    if found is not None:
        return found
    with disk_faults(folder):
        aside = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
        try:
            manifest = _write_without(build, report, aside, digest)
            aside.chmod(0o755)
            if folder.exists():
                shutil.rmtree(folder)
            aside.rename(folder)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    return DatasetBuild(folder, manifest)


def _write_without(build: DatasetBuild, report: dict[str, Any], folder: Path, digest: str) -> dict[str, Any]:
    hits = {hit["row"]: hit for hit in report["rows"]}
    train = side_file("train")
    for path in build.folder.iterdir():
        if path.is_file() and path.name not in (train, LEDGER, MANIFEST, CARD, CROISSANT):
            _link(path, folder / path.name)
    rows, ledger = DigestingFile(folder / train), DigestingFile(folder / LEDGER)
    hasher, dropped = SideHasher(), Counter[str]()
    ledger.write((build.folder / LEDGER).read_bytes())
    entered: set[str] = set()
    n_repeated = 0
    for row in build.iter_rows("train"):
        hit = hits.get(row.id)
        if hit is None:
            rows.write(json_line(row.to_dict()) + b"\n")
            hasher.add(row)
        elif row.id in entered:
            n_repeated += 1
        else:
            entered.add(row.id)
            reason = f"quotes_{hit['evaluation']}"
            dropped[reason] += 1
            ledger.write(json_line(_entry(row, reason, hit)) + b"\n")
    if not hasher.n_rows:
        raise UserError(
            "every train row holds a question of the evaluations",
            why=", ".join(f"{reason}: {n} rows" for reason, n in dropped.items()),
            fix="evaluate with questions that are not in the data",
        )
    said = build.manifest
    counts = said["ledger"]
    manifest = {
        **said,
        "digest": digest,
        "derived_from": build.digest,
        "splits": {**said["splits"], "train": {"rows": hasher.n_rows, "digest": hasher.hexdigest()}},
        "repeated": said.get("repeated", 0) - n_repeated,
        "ledger": {
            **counts,
            "kept": counts["kept"] - dropped.total(),
            "dropped": dict(sorted((Counter(counts["dropped"]) + dropped).items())),
        },
        "files": {**said.get("files", {}), train: rows.close(), LEDGER: ledger.close()},
        "decontamination": report,
    }
    write_card(folder, manifest)
    write_json(folder / MANIFEST, manifest)
    return manifest


def _entry(row: Row, reason: str, hit: dict[str, Any]) -> dict[str, Any]:
    return {
        "reason": reason,
        "kind": "dropped",
        "source": row.source,
        "id": row.id,
        "side": "train",
        "because_of": hit["question"],
    }


def _link(path: Path, target: Path) -> None:
    """The same file under another name where the disk allows it, else a copy: files of a build are never changed."""
    try:
        os.link(path, target)
    except OSError:
        shutil.copy2(path, target)
