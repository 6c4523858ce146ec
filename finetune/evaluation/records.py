"""Saved answers of one arm: written as they come, continued after a crash, scored from what is saved.

While an arm runs, `<arm>.partial.jsonl` grows line by line behind a first line with the arm's key. When every item
has an answer, `<arm>.jsonl` (in the suite's order) and `<arm>.summary.json` replace it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from finetune.errors import UserError
from finetune.paths import disk_faults, read_json, read_jsonl, write_json, write_jsonl

Record = dict[str, Any]


@dataclass(frozen=True)
class ArmSummary:
    """What one arm did on one suite; `<arm>.summary.json` holds the same."""

    suite: str
    suite_digest: str
    items_digest: str
    arm: str
    n: int
    metrics: dict[str, dict[str, Any]]
    output_tokens: int
    seconds: float
    latency_seconds: dict[str, float | None]
    finish_reasons: dict[str, int]
    adapter_sha256: str | None
    key: str
    batch_size: int
    prompt_tokens: int
    template_sha256: str
    backend: str = "transformers"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> ArmSummary:
        """Raises UserError for a summary that another version wrote."""
        try:
            return cls(**given)
        except TypeError as error:
            raise UserError(
                f"the summary of arm {given.get('arm')} was written by another version: {error}",
                fix="delete it and evaluate the arm again",
            ) from None


def records_path(folder: Path, arm: str) -> Path:
    return folder / f"{arm}.jsonl"


def summary_path(folder: Path, arm: str) -> Path:
    return folder / f"{arm}.summary.json"


def partial_path(folder: Path, arm: str) -> Path:
    return folder / f"{arm}.partial.jsonl"


def read_records(folder: Path, arm: str) -> list[Record]:
    """The records of a complete arm, in the suite's order. Raises UserError when there are none."""
    records = read_jsonl(records_path(folder, arm))
    if not records:
        raise UserError(f"{records_path(folder, arm)} holds no answers", fix="evaluate the arm again")
    return records


def read_summary(folder: Path, arm: str) -> ArmSummary:
    return ArmSummary.from_dict(read_json(summary_path(folder, arm)))


def write_arm(folder: Path, summary: ArmSummary, records: Sequence[Record]) -> None:
    """Records first, the summary last: a summary that exists describes a complete arm."""
    summary_path(folder, summary.arm).unlink(missing_ok=True)
    write_jsonl(records_path(folder, summary.arm), list(records))
    write_json(summary_path(folder, summary.arm), summary.to_dict())
    partial_path(folder, summary.arm).unlink(missing_ok=True)


class PartialRecords:
    """Append-only answers of an arm that is running. `done` holds those of an earlier try with the same key."""

    def __init__(self, folder: Path, arm: str, key: str) -> None:
        self._path = partial_path(folder, arm)
        header, lines = _whole_lines(self._path)
        kept = lines if header == {"key": key} else []
        self.done: dict[str, Record] = {line["record"]["item"]: line["record"] for line in kept}
        self.seconds_before: float = kept[-1]["seconds"] if kept else 0.0
        # Written anew rather than appended to: a line cut off by a crash must not stay in the middle of the file.
        write_jsonl(self._path, [{"key": key}, *kept])
        with disk_faults(self._path):
            self._stream = self._path.open("a", encoding="utf-8")

    def __enter__(self) -> PartialRecords:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stream.close()

    def add(self, record: Record, seconds: float) -> None:
        """Push one answer to the disk; `seconds` is the arm's working time up to now, earlier tries included."""
        line = json.dumps({"record": record, "seconds": seconds}, ensure_ascii=False, allow_nan=False)
        with disk_faults(self._path):
            self._stream.write(line + "\n")
            self._stream.flush()
            os.fsync(self._stream.fileno())


def _whole_lines(path: Path) -> tuple[Record | None, list[Record]]:
    """Header and whole lines; reading stops at the first line that is not whole."""
    if not path.is_file():
        return None, []
    lines: list[Record] = []
    for raw in path.read_bytes().split(b"\n"):
        try:
            lines.append(json.loads(raw))
        except ValueError:
            break
    return (lines[0], lines[1:]) if lines else (None, [])
