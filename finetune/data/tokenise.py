"""From rows to tokens and labels, with a policy for rows that are too long and an account of every row.

The model's own chat template decides the text (`chat_spans`), which is then tokenised and labelled row by row
(`row_tokens`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from finetune.data.chat_spans import closing_of, is_trained_answer
from finetune.data.long_rows import shorten
from finetune.data.row_tokens import (
    IGNORED,
    TokenisedRow,
    TrainOn,
    generation_stop_ids,
    prompt_ids,
    tokenise_with,
)
from finetune.data.rows import Row
from finetune.data.split_rows import split_row
from finetune.errors import UserError

__all__ = [
    "IGNORED",
    "LongRows",
    "TokenisedRow",
    "TokenisedSplit",
    "TrainOn",
    "generation_stop_ids",
    "prompt_ids",
    "tokenise_row",
    "tokenise_rows",
]

LongRows = Literal["error", "drop", "truncate_prompt", "split"]
_COUNTS = (
    "read",
    "kept",
    "dropped_too_long",
    "truncated",
    "split",
    "parts",
    "lost_targets",
    "dropped_no_target",
)
_ROWS_SHOWN = 5


@dataclass(frozen=True, slots=True)
class TokenisedSplit:
    """Rows that fit, and an account of those that did not: read = kept + dropped_too_long + dropped_no_target.

    `counts["truncated"]` are kept rows whose prompt was cut. `counts["split"]` are kept rows that became
    `counts["parts"]` of `rows`; `counts["lost_targets"]` are the tokens of their answers that fit into no part.
    `dropped` holds {"id", "index", "reason", "tokens"}.
    """

    rows: list[TokenisedRow]
    counts: dict[str, int]
    dropped: list[dict[str, Any]] = field(default_factory=list)

    @property
    def n_targets(self) -> int:
        return sum(row.n_targets for row in self.rows)


def tokenise_row(row: Row, tokenizer: Any, *, train_on: TrainOn = "all") -> TokenisedRow:
    """Tokens and labels of one row. Raises UserError, naming the row, when its answers have no provable place."""
    return tokenise_with(row, tokenizer, closing_of(tokenizer), train_on)


def tokenise_rows(
    rows: Sequence[Row],
    tokenizer: Any,
    *,
    max_tokens: int,
    long_rows: LongRows = "error",
    train_on: TrainOn | Literal["each"] = "all",
) -> TokenisedSplit:
    """Tokenise rows and apply the policy for rows longer than `max_tokens`; an answer is never cut.

    train_on "each" makes a row of every trained answer, asked as it is in use: for templates that rewrite earlier turns,
    at the price of reading those again. What is read, kept or dropped is then an answer.

    error: refuse, listing them. drop: leave them out. truncate_prompt: leave out the oldest turns first, then the
    middle of the longest turn that is left, keeping the system turn; a row whose answer alone does not fit is dropped.
    split: part a conversation between exchanges, a text anywhere (see `split_rows`); where only the last answer is
    trained, that is truncate_prompt.
    Rows without any target are dropped. All are counted. Raises UserError when rows went in and none came out.
    """
    if not rows:
        return TokenisedSplit([], dict.fromkeys(_COUNTS, 0))
    if train_on == "each":
        units = [unit for row in rows for unit in _one_an_answer(row)]
        return tokenise_rows(units, tokenizer, max_tokens=max_tokens, long_rows=long_rows, train_on="last")
    closing = closing_of(tokenizer)

    def tokenise(row: Row) -> TokenisedRow:
        return tokenise_with(row, tokenizer, closing, train_on)

    counts: Counter[str] = Counter(read=len(rows))
    kept: list[TokenisedRow] = []
    dropped: list[dict[str, Any]] = []
    for index, row in enumerate(rows):
        whole = tokenise(row)
        fitting = [whole] if whole.n_targets else []
        if whole.n_targets and len(whole.input_ids) > max_tokens:
            fitting = _make_fit(row, whole, max_tokens, long_rows, train_on, tokenise, counts)
        if fitting:
            kept += fitting
            counts["kept"] += 1
            continue
        reason = "too_long" if whole.n_targets else "no_target"
        counts[f"dropped_{reason}"] += 1
        dropped.append({"id": row.id, "index": index, "reason": reason, "tokens": len(whole.input_ids)})
    if long_rows == "error":
        refuse_long(dropped, max_tokens)
    if not kept:
        refuse_empty(dropped, max_tokens)
    return TokenisedSplit(kept, {name: counts[name] for name in _COUNTS}, dropped)


def _one_an_answer(row: Row) -> list[Row]:
    """The row up to each of its trained answers; the row itself when it has but one, or is no conversation."""
    if row.kind != "chat":
        return [row]
    ends = [index for index, turn in enumerate(row.messages) if index and is_trained_answer(turn)]
    if len(ends) < 2:
        return [row]
    return [replace(row, id=f"{row.id}#{n}", messages=row.messages[: end + 1]) for n, end in enumerate(ends)]


def _make_fit(
    row: Row,
    whole: TokenisedRow,
    max_tokens: int,
    long_rows: LongRows,
    train_on: TrainOn,
    tokenise: Callable[[Row], TokenisedRow],
    counts: Counter[str],
) -> list[TokenisedRow]:
    """What the policy makes of a row that is too long; empty when it is to be dropped."""
    if long_rows == "split" and (train_on == "all" or row.kind != "chat"):
        parts = split_row(row, max_tokens, tokenise)
        if parts:
            counts["split"] += 1
            counts["parts"] += len(parts)
            counts["lost_targets"] += whole.n_targets - sum(part.n_targets for part in parts)
        return parts
    shorter = shorten(row, max_tokens, tokenise) if long_rows in ("truncate_prompt", "split") else None
    counts["truncated"] += shorter is not None
    return [replace(shorter, shortened=True)] if shorter is not None else []


def refuse_long(
    dropped: list[dict[str, Any]], max_tokens: int, *, ways: str = "drop, truncate_prompt or split"
) -> None:
    """Raise UserError when rows were dropped for their length, with the longest, the first few, and the `ways` out."""
    too_long = [entry for entry in dropped if entry["reason"] == "too_long"]
    if not too_long:
        return
    longest = max(entry["tokens"] for entry in too_long)
    listed = ", ".join(f"{entry['id']} ({entry['tokens']})" for entry in too_long[:_ROWS_SHOWN])
    raise UserError(
        f"{len(too_long)} rows are longer than data.max_tokens = {max_tokens}; the longest has {longest} tokens",
        where="data.max_tokens",
        why=f"first: {listed}",
        fix=f"set data.max_tokens to {longest}, or data.long_rows to {ways}",
    )


def refuse_empty(dropped: list[dict[str, Any]], max_tokens: int) -> None:
    """Raise UserError: no row is left, and why each was dropped."""
    reasons = Counter(str(entry["reason"]) for entry in dropped)
    lengths = [entry["tokens"] for entry in dropped]
    words = {
        "too_long": f"are too long for data.max_tokens = {max_tokens}",
        "no_target": "have no trained answer",
        "identical": "have the same chosen and rejected answer",
        "empty": "have an empty answer",
    }
    remedies = {
        "too_long": "raise data.max_tokens",
        "no_target": "check that answers are not marked train: false",
        "identical": "give each pair two different answers",
        "empty": "write the missing answers",
    }
    causes = [f"{reasons[reason]} {phrase}" for reason, phrase in words.items() if reasons[reason]]
    raise UserError(
        f"no row is left: of {len(dropped)} rows, {' and '.join(causes)}",
        where="data.max_tokens" if reasons["too_long"] else "data.spec",
        why=f"the rows have {min(lengths)} to {max(lengths)} tokens",
        fix=", and ".join(remedy for reason, remedy in remedies.items() if reasons[reason]),
    )
