"""What a limit on tokens would do to rows, by the model's own template, before anything is trained."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from finetune.data.chat_spans import closing_of, control_tokens, holds_control_tokens
from finetune.data.row_tokens import TokenisedRow, TrainOn, tokenise_with
from finetune.data.rows import Row
from finetune.errors import Fault, UserError

LIMITS = (512, 1024, 2048, 4096, 8192)
_QUANTILES = (0.5, 0.9, 0.99, 1.0)
_SHOWN = 5


@dataclass(frozen=True, slots=True)
class AtLimit:
    """Of rows cut off after `max_tokens`: how many are cut, lose their last end of turn, or lose every target.

    A row that keeps targets but not its end of turn teaches the model to go on and on; one without targets teaches
    nothing. `targets_kept` is the share of all target tokens that is left.
    """

    max_tokens: int
    cut: int
    lose_end: int
    lose_all_targets: int
    targets_kept: float

    def to_dict(self) -> dict[str, Any]:
        return {
            "max_tokens": self.max_tokens,
            "cut": self.cut,
            "lose_end": self.lose_end,
            "lose_all_targets": self.lose_all_targets,
            "targets_kept": self.targets_kept,
        }


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lengths of all rows in tokens: quantiles ("0.5" to "1.0"), totals, and what each limit would do.

    without_targets: rows that have no trained answer at any length. failed: rows that the template cannot render, with
    the first few reasons. with_control_tokens: rows whose text holds BOS, EOS or the end-of-turn token, and the first few.
    """

    rows: int
    tokens: int
    targets: int
    quantiles: dict[str, int]
    limits: tuple[AtLimit, ...]
    without_targets: int
    failed: int
    reasons: tuple[str, ...]
    longest: tuple[tuple[str, int], ...]
    with_control_tokens: int
    first_with_control_tokens: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        return {
            "rows": self.rows,
            "tokens": self.tokens,
            "targets": self.targets,
            "quantiles": self.quantiles,
            "limits": [limit.to_dict() for limit in self.limits],
            "without_targets": self.without_targets,
            "failed": self.failed,
            "reasons": list(self.reasons),
            "longest": [{"id": row, "tokens": tokens} for row, tokens in self.longest],
            "with_control_tokens": self.with_control_tokens,
            "first_with_control_tokens": list(self.first_with_control_tokens),
        }


def measure_lengths(
    rows: Iterable[Row],
    tokenizer: Any,
    *,
    train_on: TrainOn = "all",
    limits: Sequence[int] = LIMITS,
    on_row: Callable[[], None] = lambda: None,
) -> Lengths:
    """Tokenise every row as training would and see what each limit cuts. Rows are taken one at a time, 24 bytes each.

    Raises UserError when no row can be rendered.
    """
    closing = closing_of(tokenizer)
    control = control_tokens(tokenizer, closing)
    ids: list[str] = []
    spans: list[tuple[int, int, int]] = []  # tokens, first target, last target
    targets = np.zeros(len(limits), np.int64)
    n_targets = failed = 0
    faults: list[Fault] = []
    with_control: list[str] = []
    n_control = 0
    for row in rows:
        on_row()
        if holds_control_tokens(row.messages, control):
            n_control += 1
            with_control += [row.id] if len(with_control) < _SHOWN else []
        try:
            done = tokenise_with(row, tokenizer, closing, train_on)
        except UserError as error:
            failed += 1
            faults += error.faults[: _SHOWN - len(faults)]
            continue
        places = _target_places(done)
        targets += [int(np.count_nonzero(places < limit)) for limit in limits]
        n_targets += len(places)
        ids.append(row.id)
        edges = (int(places[0]), int(places[-1])) if len(places) else (-1, -1)
        spans.append((len(done.input_ids), *edges))
    if not ids:
        raise UserError(faults or "there are no rows to measure")
    table = np.array(spans, np.int64)
    return Lengths(
        rows=len(ids),
        tokens=int(table[:, 0].sum()),
        targets=n_targets,
        quantiles={str(q): int(np.quantile(table[:, 0], q, method="inverted_cdf")) for q in _QUANTILES},
        limits=tuple(
            _at_limit(table, limit, int(kept), n_targets) for limit, kept in zip(limits, targets, strict=True)
        ),
        without_targets=int(np.count_nonzero(table[:, 1] < 0)),
        failed=failed,
        reasons=tuple(str(fault) for fault in faults),
        longest=tuple(
            (ids[row], int(table[row, 0])) for row in np.argsort(-table[:, 0], kind="stable")[:_SHOWN]
        ),
        with_control_tokens=n_control,
        first_with_control_tokens=tuple(with_control),
    )


def _target_places(done: TokenisedRow) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.concatenate([np.empty(0, np.int64), *(np.arange(first, past) for first, past in done.spans())])


def _at_limit(table: np.ndarray[Any, np.dtype[np.int64]], limit: int, kept: int, n_targets: int) -> AtLimit:
    tokens, first, last = table.T
    return AtLimit(
        limit,
        int(np.count_nonzero(tokens > limit)),
        int(np.count_nonzero((last >= limit) & (first >= 0))),
        int(np.count_nonzero(first >= limit)),
        kept / n_targets if n_targets else 0.0,
    )
