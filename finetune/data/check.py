"""Whether a build is what it says: its files, its ledger and its sides, all counted anew from the disk."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.data.build import DatasetBuild
from finetune.data.leaks import Leak, SideFile, count_ledger, find_leaks, read_side, table_of
from finetune.data.rows import SIDES, Progress, Side
from finetune.data.spec_split import GuardSection
from finetune.data.stages.apart import WORDING
from finetune.data.stages.write import LEDGER, side_file
from finetune.data.wording import SharedWording
from finetune.digest import digest_file
from finetune.errors import Fault

_LEAKS_SHOWN = 20
_REBUILD = "delete the folder and build it again"


@dataclass(frozen=True)
class CheckResult:
    """leaks: kind -> the pairs of rows. damage: what is not as the manifest says."""

    folder: Path
    rows: dict[str, int]
    leaks: dict[str, list[Leak]]
    damage: list[Fault]

    @property
    def passed(self) -> bool:
        return not self.damage and not any(self.leaks.values())

    def to_dict(self) -> dict[str, Any]:
        """Numbers of leaks, and every pair."""
        return {
            "folder": str(self.folder),
            "passed": self.passed,
            "rows": self.rows,
            "leaks": {kind: len(found) for kind, found in self.leaks.items()},
            "pairs": [leak.to_dict() for found in self.leaks.values() for leak in found],
            "damage": [fault.to_dict() for fault in self.damage],
        }

    def describe(self) -> str:
        """One line for a build that passed."""
        sides = ", ".join(f"{side} ({n})" for side, n in self.rows.items())
        counts = ", ".join(f"{kind} {len(found)}" for kind, found in self.leaks.items())
        return f"no leaks between {sides}: {counts}; files and ledger are as the manifest says"

    def faults(self) -> list[Fault]:
        """Everything that is wrong, for a person: of each kind of leak the first pairs."""
        faults = list(self.damage)
        for kind, found in self.leaks.items():
            faults += [_leak_fault(leak, self.folder) for leak in found[:_LEAKS_SHOWN]]
            if len(found) > _LEAKS_SHOWN:
                faults.append(Fault(f"{len(found) - _LEAKS_SHOWN} more {kind} leaks; --json lists all"))
        return faults


def check_build(build: DatasetBuild, on_progress: Progress = lambda share: None) -> CheckResult:
    """Read all files of a build and compare them with its manifest and with one another.

    Raises UserError for a line that is no row.
    """
    files: dict[Side, SideFile] = {}
    for number, side in enumerate(SIDES):
        files[side] = read_side(build.path(side))
        on_progress(0.5 * (number + 1) / len(SIDES))
    manifest = build.manifest
    damage = _changed_sides(build, files) + _changed_others(build) + _ledger_faults(build, files)
    table, side_of = table_of(build.folder, files)
    guard = GuardSection(**manifest["guard"]) if "guard" in manifest else None
    tags = [*(manifest.get("unique_by") or []), *(manifest.get("unite_by") or [])]
    wording = SharedWording.read(build.folder / WORDING)
    leaks = find_leaks(table, side_of, tags, guard, wording, lambda share: on_progress(0.5 + share / 2))
    table.lines.close()
    on_progress(1.0)
    return CheckResult(build.folder, {side: files[side].rows for side in SIDES}, leaks, damage)


def _changed_sides(build: DatasetBuild, files: dict[Side, SideFile]) -> list[Fault]:
    """Sides whose rows, or whose bytes, are not those of the manifest."""
    faults = []
    written = build.manifest.get("files", {})
    for side in SIDES:
        said = build.manifest["splits"][side]
        sha256 = written.get(side_file(side), {}).get("sha256", files[side].sha256)
        if (files[side].rows, files[side].digest, files[side].sha256) != (
            said["rows"],
            said["digest"],
            sha256,
        ):
            faults.append(
                Fault(
                    f"the {side} rows are not those of the manifest: the file was changed after the build",
                    str(build.folder / side_file(side)),
                    "",
                    _REBUILD,
                )
            )
    return faults


def _changed_others(build: DatasetBuild) -> list[Fault]:
    """Files of the manifest besides the sides whose bytes are not those that were written."""
    sides = {side_file(side) for side in SIDES}
    faults = []
    for name, written in build.manifest.get("files", {}).items():
        path = build.folder / name
        if name not in sides and not (path.is_file() and digest_file(path) == written["sha256"]):
            faults.append(
                Fault("the file is missing or was changed after the build", str(path), "", _REBUILD)
            )
    return faults


def _ledger_faults(build: DatasetBuild, files: dict[Side, SideFile]) -> list[Fault]:
    """Whether ledger.jsonl holds an entry for every row that is in no split, and the sums add up."""
    ledger, path = build.manifest["ledger"], build.folder / LEDGER
    if not path.is_file():
        return [Fault("the ledger is missing", str(path), "", _REBUILD)]
    dropped, quarantined = count_ledger(path)
    kept = sum(files[side].rows for side in SIDES) - build.manifest.get("repeated", 0)
    counted = {"read": ledger["read"], "kept": kept, "dropped": dropped, "quarantined": quarantined}
    adds_up = ledger["read"] == kept + sum(dropped.values()) + quarantined
    if counted == ledger and adds_up:
        return []
    return [
        Fault(
            f"the ledger does not add up: read {ledger['read']}, but {kept} rows are in the splits, and the ledger "
            f"lists {sum(dropped.values())} dropped and {quarantined} quarantined rows",
            str(path),
            f"the manifest says {ledger}",
            _REBUILD,
        )
    ]


def _leak_fault(leak: Leak, folder: Path) -> Fault:
    return Fault(
        f"{leak.kind} leak: {leak.first_side} row {leak.first_id} and {leak.second_side} row {leak.second_id} "
        f"share {leak.key!r}",
        str(folder),
        "what is measured on one side was learnt on the other",
        "build the dataset again from its spec",
    )
