"""Saved answers of one arm: written as they come, continued after a crash, scored from what is saved.

One record an answer: `item`, `repeat` and `key` say which one. While an arm runs, `<arm>.partial.jsonl` grows line by
line. When every wanted answer is there, `<arm>.jsonl` (in the suite's order) and `<arm>.summary.json` replace it.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from finetune.digest import digest_file
from finetune.errors import UserError
from finetune.paths import disk_faults, read_json, read_jsonl, write_json, write_jsonl

Record = dict[str, Any]
_KINDS: dict[str, tuple[type, str]] = {
    "item": (str, "text"),
    "arm": (str, "text"),
    "cluster": (str, "text"),
    "tags": (dict, "a mapping"),
    "output": (str, "text"),
    "scores": (dict, "a mapping"),
}


@dataclass(frozen=True)
class ArmSummary:
    """What one arm did on one suite; `<arm>.summary.json` holds the same.

    n: answers, `repeats` to each item; the n of a metric counts items. stopped: where a suite that may stop early did so,
    `answered` of how many items (`of`), and the suite's `largest_cluster`; None when every item was answered.
    records_sha256: of `<arm>.jsonl`, so that answers edited afterwards do not pass for the model's.
    """

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
    repeats: int = 1
    stopped: dict[str, int] | None = None
    records_sha256: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> ArmSummary:
        """Raises UserError for a summary that another version wrote."""
        try:
            summary = cls(**given)
            if summary.n < 1 or sum(summary.finish_reasons.values()) != summary.n:
                raise TypeError(f"it counts {summary.n} answers and {summary.finish_reasons} ends of answers")
            return summary
        except (TypeError, AttributeError) as error:
            raise UserError(
                f"the summary of an arm is damaged or of another version: {error}",
                fix="delete it and evaluate the arm again",
            ) from None


def records_path(folder: Path, arm: str) -> Path:
    return folder / f"{arm}.jsonl"


def summary_path(folder: Path, arm: str) -> Path:
    return folder / f"{arm}.summary.json"


def partial_path(folder: Path, arm: str) -> Path:
    return folder / f"{arm}.partial.jsonl"


def read_records(folder: Path, arm: str) -> list[Record]:
    """The records of a complete arm, in the suite's order. Raises UserError when there are none, or they are none."""
    path = records_path(folder, arm)
    records = read_jsonl(path)
    if not records:
        raise UserError(f"{path} holds no answers", fix="evaluate the arm again")
    for number, record in enumerate(records, start=1):
        problem = _problem(record)
        if problem:
            raise UserError(
                problem,
                where=f"{path}: record number {number}",
                why="this is no file of answers of `finetune eval`",
                fix="evaluate the arm again; scores of other tools are compared by finetune stats compare",
            )
    return records


def _problem(record: Any) -> str:
    """What is wrong with one record; empty when nothing is."""
    if not isinstance(record, dict):
        return "the line is not a JSON object"
    for key, (kind, said) in _KINDS.items():
        if not isinstance(record.get(key), kind):
            return f"'{key}' is {record[key]!r:.40}, not {said}" if key in record else f"no '{key}'"
    for metric, score in record["scores"].items():
        if score is not None and not (isinstance(score, (int, float)) and math.isfinite(score)):
            return f"the score '{metric}' of item '{record['item']}' is {score!r:.40}, not a number"
    return ""


def read_summary(folder: Path, arm: str) -> ArmSummary:
    """Raises UserError when it is missing, damaged, or of another version."""
    path = summary_path(folder, arm)
    found = read_json(path)
    if not isinstance(found, dict):
        raise UserError(f"{path} is no summary of an arm", fix="delete it and evaluate the arm again")
    return ArmSummary.from_dict(found)


def is_intact(folder: Path, summary: ArmSummary) -> bool:
    """Whether the records beside a summary are there, and the ones that it describes."""
    path = records_path(folder, summary.arm)
    return path.is_file() and summary.records_sha256 in (None, digest_file(path))


def write_arm(folder: Path, summary: ArmSummary, records: Sequence[Record]) -> ArmSummary:
    """Records first, the summary last: a summary that exists describes a complete arm. Returns it as it is saved."""
    path = records_path(folder, summary.arm)
    summary_path(folder, summary.arm).unlink(missing_ok=True)
    write_jsonl(path, list(records))
    complete = replace(summary, records_sha256=digest_file(path))
    write_json(summary_path(folder, summary.arm), complete.to_dict())
    partial_path(folder, summary.arm).unlink(missing_ok=True)
    return complete


def question_of(record: Record) -> str:
    """What was asked, without template, instructions and examples; the whole prompt for records that do not say."""
    return str(record.get("question") or record["prompt"])


def repeat_of(record: Record) -> int:
    """Which of the item's answers this is, from 0; records from elsewhere may not say."""
    return int(record.get("repeat", 0))


@dataclass
class SavedAnswers:
    """Answers that need not be given again, by their keys, and the seconds that they took."""

    by_key: dict[str, Record] = field(default_factory=dict)
    seconds: float = 0.0


def saved_answers(folders: Sequence[Path], arm: str, wanted: Collection[str]) -> SavedAnswers:
    """The wanted answers in these folders, whether their arm is complete there or was interrupted.

    The first folder that has an answer gives it. Of an arm's working time its share of answers is counted. An arm that
    is damaged, or that another process is just writing anew, gives nothing.
    """
    found, left = SavedAnswers(), set(wanted)
    for folder in folders:
        lines = _partial_lines(partial_path(folder, arm))
        _take(found, left, [line["record"] for line in lines], lines[-1]["seconds"] if lines else 0.0)
        if left:
            with contextlib.suppress(UserError):
                summary = read_summary(folder, arm)
                if is_intact(folder, summary):
                    _take(found, left, read_records(folder, arm), summary.seconds)
    return found


def _take(found: SavedAnswers, left: set[str], records: Sequence[Record], seconds: float) -> None:
    taken = {record["key"]: record for record in records if record.get("key") in left}
    found.by_key.update(taken)
    left -= set(taken)
    found.seconds += seconds * len(taken) / max(len(records), 1)


class PartialRecords:
    """Append-only answers of an arm that is running, behind those that are `known` already."""

    def __init__(self, folder: Path, arm: str, known: SavedAnswers) -> None:
        self._path = partial_path(folder, arm)
        # Written anew rather than appended to: a line cut off by a crash must not stay in the middle of the file.
        lines = [{"record": record, "seconds": known.seconds} for record in known.by_key.values()]
        write_jsonl(self._path, lines)
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


def _partial_lines(path: Path) -> list[Record]:
    """Whole lines of answers; reading stops at the first line that is not whole."""
    lines: list[Record] = []
    for raw in path.read_bytes().split(b"\n") if path.is_file() else []:
        try:
            lines.append(json.loads(raw))
        except ValueError:
            break
    return [line for line in lines if "record" in line]
