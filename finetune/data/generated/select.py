"""Which answers become rows: by verdict, by difficulty of the prompt, distinct, and the same for the same seed."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Literal

from finetune.data.rows import Row
from finetune.data.spec_generated import DIFFICULTIES, Difficulty, KeepSection

FORMAT = "format"  # how the reason of an answer begins that fails for its form, not for what it says


@dataclass(frozen=True, slots=True)
class Judged:
    """One answer and its verdict."""

    text: str
    passed: bool
    reason: str = ""

    @property
    def fails_in_form(self) -> bool:
        return not self.passed and self.reason.startswith(FORMAT)


@dataclass(frozen=True, slots=True)
class AnsweredRow:
    """A prompt's row as it stands in its dataset, and the answers to it in the order they were drawn."""

    row: Row
    answers: tuple[Judged, ...]

    @property
    def pass_rate(self) -> float:
        return sum(answer.passed for answer in self.answers) / len(self.answers)

    @property
    def difficulty(self) -> Difficulty:
        rate = self.pass_rate
        if rate in (0.0, 1.0):
            return "never" if rate == 0.0 else "always"
        return "hard" if rate <= 1 / 3 else "medium" if rate <= 2 / 3 else "easy"


@dataclass(frozen=True, slots=True)
class Selection:
    """Records of the rows, and of each difficulty how many prompts, answers and passed answers there were, and how many
    prompts were kept and gave a row."""

    records: list[dict[str, Any]]
    prompts: dict[Difficulty, dict[str, int]] = field(default_factory=dict)


def select_rows(
    answered: Sequence[AnsweredRow], keep: KeepSection, *, write: Literal["pairs", "chat"], seed: int
) -> Selection:
    """Records in the order of the prompts: `prompt`, `chosen`, `rejected`, or `messages`; with `group` and the row's tags.

    A prompt is kept by a number drawn from the seed and its id, so that neither the other prompts nor a larger share of
    another difficulty move it. Answers that say the same are one.
    """
    records: list[dict[str, Any]] = []
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for one in answered:
        difficulty = one.difficulty
        passed = sum(answer.passed for answer in one.answers)
        counts[difficulty].update(prompts=1, answers=len(one.answers), passed=passed)
        if _drawn(seed, one.row.id) >= keep.difficulty.get(difficulty, 1.0):
            continue
        counts[difficulty]["kept"] += 1
        made = _pairs(one, keep) if write == "pairs" else _chats(one, keep)
        counts[difficulty]["with_rows"] += bool(made)
        counts[difficulty]["rows"] += len(made)
        records += made
    prompts: dict[Difficulty, dict[str, int]] = {
        name: dict(counts[name]) for name in DIFFICULTIES if name in counts
    }
    return Selection(records, prompts)


def pass_rates(
    answered: Sequence[AnsweredRow], tags: Sequence[str]
) -> dict[str, dict[str, dict[str, float]]]:
    """tag -> value -> prompts, answers, passed, pass_rate; the values in order of their pass rate, lowest first."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for tag in tags:
        cells: dict[str, Counter[str]] = defaultdict(Counter)
        for one in answered:
            cell = cells[one.row.tags.get(tag, "")]
            cell.update(prompts=1, answers=len(one.answers), passed=sum(a.passed for a in one.answers))
        rows = {
            value: {**cell, "pass_rate": round(cell["passed"] / cell["answers"], 4)}
            for value, cell in cells.items()
        }
        found[tag] = dict(sorted(rows.items(), key=lambda pair: (pair[1]["pass_rate"], pair[0])))
    return found


def _drawn(seed: int, name: str) -> float:
    """A number in [0, 1) of this prompt's own."""
    return int.from_bytes(hashlib.sha256(f"{seed}/keep/{name}".encode()).digest()[:6], "big") / 2**48


def _passed(one: AnsweredRow, keep: KeepSection) -> list[str]:
    wanted = (
        answer.text for answer in one.answers if answer.passed or not (keep.filter or not answer.text.strip())
    )
    passed = list(dict.fromkeys(wanted))
    if keep.prefer == "shortest":
        passed.sort(key=len)
    if not passed and keep.reference_as_chosen and one.row.answer:
        return [one.row.answer]
    return passed


def _pairs(one: AnsweredRow, keep: KeepSection) -> list[dict[str, Any]]:
    passed = _passed(one, keep)
    failed = list(
        dict.fromkeys(
            answer.text
            for answer in one.answers
            if not answer.passed
            and answer.text.strip()
            and answer.text not in passed
            and not (answer.fails_in_form and keep.format_failures == "drop")
        )
    )
    # First each with the one of the same number, so that every answer is used once before any is used again.
    pairs = product(range(len(passed)), range(len(failed)))
    order = sorted(pairs, key=lambda at: (at[0] != at[1], max(at), at))
    return [
        _record(one.row)
        | {"prompt": list(one.row.prompt), "chosen": [_turn(passed[good])], "rejected": [_turn(failed[bad])]}
        for good, bad in order[: keep.rows_per_prompt]
    ]


def _chats(one: AnsweredRow, keep: KeepSection) -> list[dict[str, Any]]:
    return [
        _record(one.row) | {"messages": [*one.row.prompt, _turn(text)]}
        for text in _passed(one, keep)[: keep.rows_per_prompt]
    ]


def _turn(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def _record(row: Row) -> dict[str, Any]:
    """What a generated row has of its prompt's: tags as keys of their own, and the group, which keeps its side."""
    tools = {"tools": list(row.tools)} if row.tools else {}
    return {**row.tags, "prompt_row": row.id, "group": row.group, **tools}
