"""Rows to read by hand: a seeded draw, each in stretches of what is learnt and what is only read."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from finetune.data.chat_spans import closing_of
from finetune.data.marks import Mark
from finetune.data.row_tokens import TrainOn, tokenise_with
from finetune.data.rows import Row
from finetune.errors import UserError
from finetune.report.untrusted import visible
from finetune.stats.means import wilson_interval

_LONGEST_SHOWN = 20_000  # characters of one row
Segment = tuple[str, bool]  # text, whether it is learnt


@dataclass(frozen=True, slots=True)
class ReadRow:
    """One row of a review. `drawn` is False for rows that were added because of their flags."""

    row: Row
    flags: tuple[str, ...]
    segments: tuple[Segment, ...]
    n_tokens: int | None
    n_targets: int | None
    drawn: bool


def draw_rows(
    rows: Sequence[Row], flags: Sequence[Sequence[str]], *, n: int = 100, n_flagged: int = 50, seed: int = 17
) -> list[tuple[int, bool]]:
    """(index, drawn at random) of the rows to read: `n` of all, drawn evenly, then up to `n_flagged` flagged ones more.

    Only the first kind says how many rows of the data set are faulty. Both are in an order that depends on the seed.
    """
    draw = random.Random(seed)
    order = list(range(len(rows)))
    draw.shuffle(order)
    drawn = order[:n]
    flagged = [index for index in order[n:] if flags[index]][:n_flagged]
    return [(index, True) for index in drawn] + [(index, False) for index in flagged]


def prepare_rows(
    rows: Sequence[Row],
    flags: Sequence[Sequence[str]],
    chosen: Sequence[tuple[int, bool]],
    tokenizer: Any | None = None,
    train_on: TrainOn = "all",
) -> list[ReadRow]:
    """The rows as they are shown: with a tokenizer by their very tokens, else turn by turn."""
    closing = closing_of(tokenizer) if tokenizer is not None else None
    prepared = []
    for index, drawn in chosen:
        row, marks = rows[index], tuple(flags[index])
        segments, n_tokens, n_targets = by_turn(row), None, None
        if closing is not None and row.kind in ("chat", "text", "tokens"):
            try:
                done = tokenise_with(row, tokenizer, closing, train_on)
            except UserError as error:
                marks = (*marks, "cannot be rendered")
                segments = [(f"{error.faults[0].what}\n\n", False), *segments]
            else:
                segments = _by_token(done.input_ids, done.spans(), tokenizer)
                n_tokens, n_targets = len(done.input_ids), done.n_targets
        prepared.append(ReadRow(row, marks, tuple(segments), n_tokens, n_targets, drawn))
    return prepared


def by_turn(row: Row) -> list[Segment]:
    """The texts of a row with what they are, answers as learnt."""
    if row.kind in ("text", "tokens"):
        return [(row.text or " ".join(map(str, row.input_ids)), True)]
    segments: list[Segment] = []
    for turn in row.messages:
        segments += _turn(str(turn["role"]), turn)
    for name, turns in (("chosen", row.chosen), ("rejected", row.rejected)):
        for turn in turns:
            segments += _turn(f"{name} {turn['role']}", turn, is_learnt=name == "chosen")
    for step in row.steps:
        segments += [
            (f"step, {'right' if step.get('correct') else 'wrong'}\n", False),
            (f"{step.get('text')}\n\n", True),
        ]
    return segments


def _turn(name: str, turn: Mapping[str, Any], is_learnt: bool = True) -> list[Segment]:
    said = str(turn.get("content") or "")
    if turn.get("tool_calls"):
        said += f"\n{turn['tool_calls']}"
    is_answer = turn["role"] == "assistant" and turn.get("train") is not False and turn.get("weight") != 0
    return [(f"{name}\n", False), (f"{said}\n\n", is_answer and is_learnt)]


def _by_token(ids: list[int], spans: list[tuple[int, int]], tokenizer: Any) -> list[Segment]:
    edges = [0, *(edge for span in spans for edge in span), len(ids)]
    return [
        (tokenizer.decode(ids[first:past]), bool(number % 2))
        for number, (first, past) in enumerate(pairwise(edges))
        if past > first
    ]


def row_state(read: ReadRow, mark: Mark | None) -> dict[str, Any]:
    """A row as the page shows it: all text made visible and cut to 20,000 characters; `answer` is the text to mend."""
    left = _LONGEST_SHOWN
    segments = []
    for text, is_learnt in read.segments:
        segments.append({"text": visible(text[:left]), "learnt": is_learnt})
        left -= min(len(text), left)
        if not left:
            segments.append({"text": " … cut", "learnt": False})
            break
    return {
        "id": visible(read.row.id),
        "source": visible(read.row.source),
        "tags": {visible(tag): visible(value) for tag, value in sorted(read.row.tags.items())},
        "flags": list(read.flags),
        "segments": segments,
        "tokens": read.n_tokens,
        "targets": read.n_targets,
        "drawn": read.drawn,
        "answer": read.row.answer,
        "digest": read.row.content_digest(),
        "mark": None
        if mark is None
        else {"decision": mark.decision, "note": mark.note, "answer": mark.answer},
    }


def summarise_marks(rows: Sequence[ReadRow], marks: Mapping[str, Mark]) -> dict[str, Any]:
    """How many of the rows were read and what was decided; and, from the randomly drawn alone, what that says of all.

    `faulty_low` and `faulty_high` are the 95 % Wilson interval of the share of rows that a reader would drop or fix.
    """
    decided = [(read, marks[key]) for read in rows if (key := read.row.content_digest()) in marks]
    drawn = [mark.decision for read, mark in decided if read.drawn]
    faulty = sum(decision != "keep" for decision in drawn)
    low, high = wilson_interval(faulty, len(drawn)) if drawn else (None, None)
    counts = {name: sum(mark.decision == name for _, mark in decided) for name in ("keep", "drop", "fix")}
    return {
        "planned": len(rows),
        "read": len(decided),
        **counts,
        "drawn_read": len(drawn),
        "drawn_faulty": faulty,
        "faulty_low": low,
        "faulty_high": high,
    }
