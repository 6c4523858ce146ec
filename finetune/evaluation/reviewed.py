"""What a person found of answers in `finetune review`, by the answers themselves: a verdict never counts for another answer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from finetune.digest import digest_bytes
from finetune.errors import UserError
from finetune.paths import read_jsonl

Reviewed = Mapping[tuple[str, str], bool]  # (item, digest of the answer) -> the reader found it right


def review_file(run_folder: Path) -> Path:
    return run_folder / "eval" / "review.jsonl"


def answer_digest(answer: str) -> str:
    """Names one answer."""
    return digest_bytes(answer.encode("utf-8", errors="surrogatepass"))[:16]


def read_verdicts(path: Path) -> list[dict[str, Any]]:
    """Every verdict of a review file, oldest first; none without the file. Raises UserError for a line that is none."""
    lines = read_jsonl(path) if path.is_file() else []
    for number, line in enumerate(lines, start=1):
        if not _is_verdict(line):
            raise UserError(
                "this line is no verdict of `finetune review`",
                where=f"{path}: verdict number {number}",
                fix="bring the line back as it was, or remove it and read that item again",
            )
    return lines


def _is_verdict(line: Any) -> bool:
    if not isinstance(line, dict) or not all(isinstance(line.get(key), str) for key in ("suite", "item")):
        return False
    right, answers = line.get("right"), line.get("answers")
    return (
        isinstance(right, dict)
        and isinstance(answers, dict)
        and all(isinstance(found, bool) and isinstance(answers.get(arm), str) for arm, found in right.items())
    )


def read_reviewed(run_folder: Path, suite: str) -> dict[tuple[str, str], bool]:
    """Every answer to the suite that was read in this run; of several verdicts about one the last counts."""
    return {
        (line["item"], line["answers"][arm]): line["right"][arm]
        for line in read_verdicts(review_file(run_folder))
        if line["suite"] == suite
        for arm in line["right"]
    }


def run_folder_of(answers: Path) -> Path | None:
    """The run folder that a folder of answers lies in; None for answers from elsewhere."""
    above = list(answers.absolute().parents)[:3]  # <run>/eval/<suite>/<backend>
    return next((folder for folder in above if (folder / "recipe.resolved.yaml").is_file()), None)
