"""Tokens of preference rows: one list of prompt ids, and the answers to it, cut apart at one place.

The answers of a pair are tokenised each behind its own copy of the prompt and by the same rules as a training row
(`row_tokens`): where prompt and answer would merge into one token, the text is cut at the start of the answer. So both
answers have the very same prompt ids, and their own ids decode to the answer's text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from finetune.data.chat_spans import Closing, closing_of
from finetune.data.fold import fold_text
from finetune.data.long_rows import shorten
from finetune.data.row_tokens import IGNORED, tokenise_with
from finetune.data.rows import Row, Turn
from finetune.data.tokenise import LongRows, refuse_empty, refuse_long
from finetune.errors import UserError

Unit = Literal["pair", "judged"]  # two answers to compare, or one answer that is wanted or not
_COUNTS = ("read", "kept", "dropped_too_long", "truncated", "dropped_identical", "dropped_empty")


@dataclass(frozen=True, slots=True)
class Answer:
    """What follows a prompt, up to its last target. `labels` are the ids on targets and -100 on turns of others."""

    ids: list[int]
    labels: list[int]

    @property
    def n_targets(self) -> int:
        return sum(label != IGNORED for label in self.labels)


@dataclass(frozen=True, slots=True)
class AnsweredPrompt:
    """A prompt and its answers: chosen and rejected, or one answer that is `wanted` or not."""

    row_id: str
    prompt: list[int]
    answers: tuple[Answer, ...]
    wanted: bool | None = None
    source: str = ""

    @property
    def chosen(self) -> Answer:
        return self.answers[0]

    @property
    def rejected(self) -> Answer:
        return self.answers[1]

    @property
    def n_tokens(self) -> int:
        """Tokens with the prompt counted once."""
        return len(self.prompt) + sum(len(answer.ids) for answer in self.answers)

    @property
    def input_ids(self) -> list[int]:
        """The prompt with its longest answer: what has to fit the context."""
        return self.prompt + max((answer.ids for answer in self.answers), key=len)

    @property
    def n_targets(self) -> int:
        return sum(answer.n_targets for answer in self.answers)

    def content(self) -> list[Any]:
        """Everything that is learnt from it, for a digest."""
        return [self.prompt, [[answer.ids, answer.labels] for answer in self.answers], self.wanted]


@dataclass(frozen=True, slots=True)
class PreferenceSplit:
    """Rows that are kept, and an account of the others: read = kept + dropped_too_long + dropped_identical + dropped_empty.

    `counts["truncated"]` are kept rows whose prompt was cut. `dropped` holds {"id", "index", "reason", "tokens"}.
    """

    rows: list[AnsweredPrompt]
    counts: dict[str, int]
    dropped: list[dict[str, Any]] = field(default_factory=list)

    @property
    def n_targets(self) -> int:
        return sum(row.n_targets for row in self.rows)


def tokenise_preferences(
    rows: Sequence[Row],
    tokenizer: Any,
    *,
    unit: Unit,
    max_tokens: int,
    long_rows: LongRows = "error",
    max_identical_share: float = 0.01,
) -> PreferenceSplit:
    """Tokenise preference rows; `unit` says what the method learns from. A pair gives two judged answers, if need be.

    Pairs whose answers are the same tokens prefer nothing and are dropped, as are answers without text that is seen; long rows are
    treated as in `tokenise_rows`, with the same cut prompt for both answers. Raises UserError for rows of another kind,
    for more identical pairs than `max_identical_share` of those read, and when nothing is left.
    """
    if not rows:
        return PreferenceSplit([], dict.fromkeys(_COUNTS, 0))
    closing = closing_of(tokenizer)
    units = [one for row in rows for one in _units(row, unit)]
    counts: Counter[str] = Counter(read=len(units))
    kept: list[AnsweredPrompt] = []
    dropped: list[dict[str, Any]] = []
    for index, row in enumerate(units):
        whole = _tokenise(row, tokenizer, closing)
        reason = _useless(whole, tokenizer, closing)
        fitting: AnsweredPrompt | None = whole
        if not reason and len(whole.input_ids) > max_tokens:
            reason = "too_long"
            fitting = (
                _shorten(row, max_tokens, tokenizer, closing) if long_rows == "truncate_prompt" else None
            )
            counts["truncated"] += fitting is not None
        if fitting is not None and reason in ("", "too_long"):
            kept.append(fitting)
            continue
        counts[f"dropped_{reason}"] += 1
        dropped.append({"id": row.id, "index": index, "reason": reason, "tokens": len(whole.input_ids)})
    if long_rows == "error":
        refuse_long(dropped, max_tokens, ways="drop or truncate_prompt")
    _refuse_identical(dropped, len(units), max_identical_share)
    if not kept:
        refuse_empty(dropped, max_tokens)
    counts["kept"] = len(kept)
    return PreferenceSplit(kept, {name: counts[name] for name in _COUNTS}, dropped)


def _units(row: Row, unit: Unit) -> list[Row]:
    """The row as what the method learns from. Judged answers keep their prompt in `messages`, the answer in `chosen`."""
    if row.kind == "preference":
        if unit == "pair":
            return [row]
        return [
            replace(row, id=f"{row.id}:{side}", kind="kto", chosen=turns, rejected=(), label=side == "chosen")
            for side, turns in (("chosen", row.chosen), ("rejected", row.rejected))
        ]
    if row.kind == "kto" and unit == "judged":
        prompt = row.prompt
        return [replace(row, messages=prompt, chosen=row.messages[len(prompt) :])]
    raise UserError(
        f"row {row.id} is of kind '{row.kind}', and this method learns from "
        + ("pairs of a chosen and a rejected answer" if unit == "pair" else "answers that are wanted or not"),
        where=f"{row.source}",
        why="every row has to be of a kind that train.method learns from",
        fix="give every row 'chosen' and 'rejected' answers"
        + ("" if unit == "pair" else ", or a 'completion' with a 'label'")
        + f", or set train.method: {'kto' if row.kind == 'kto' else 'sft'}",
    )


def _tokenise(row: Row, tokenizer: Any, closing: Closing) -> AnsweredPrompt:
    prompts: list[list[int]] = []
    answers: list[Answer] = []
    for turns in [row.chosen, row.rejected] if row.kind == "preference" else [row.chosen]:
        prompt, answer = _cut_apart(row, turns, tokenizer, closing)
        prompts.append(prompt)
        answers.append(answer)
    if any(prompt != prompts[0] for prompt in prompts):
        raise UserError(
            "the chat template renders the prompt in another way for each of the two answers",
            where=f"row {row.id} ({row.source})",
            why="the answers would be compared behind different prompts",
            fix="take a template that renders a prompt whatever the answer to it is",
        )
    return AnsweredPrompt(row.id, prompts[0], tuple(answers), row.label, row.source)


def _cut_apart(row: Row, turns: Sequence[Turn], tokenizer: Any, closing: Closing) -> tuple[list[int], Answer]:
    """Prompt ids, and the answer up to its last target; answers that stand in the prompt carry no loss."""
    prompt_turns = [
        {**turn, "train": False} if turn["role"] == "assistant" else turn for turn in row.messages
    ]
    chat = Row(row.id, (*prompt_turns, *turns), row.group, row.source, tools=row.tools)
    whole = tokenise_with(chat, tokenizer, closing, "all")
    if whole.weights is not None:
        raise UserError(
            "a turn of the answer has a weight of its own, and preference methods weigh all of an answer alike",
            where=f"row {row.id} ({row.source})",
            fix="leave out 'weight', or mark turns that are not to count with train: false",
        )
    spans = whole.spans()
    if not spans:
        return whole.input_ids, Answer([], [])
    start, end = spans[0][0], spans[-1][1]
    return whole.input_ids[:start], Answer(whole.input_ids[start:end], whole.labels[start:end])


def _useless(example: AnsweredPrompt, tokenizer: Any, closing: Closing) -> str:
    """Why nothing can be learnt from it, or ''."""
    texts = [
        tokenizer.decode([label for label in answer.labels if label != IGNORED]) for answer in example.answers
    ]
    if any(not fold_text(text.replace(closing.end_of_turn, "")) for text in texts):
        return "empty"
    if len(example.answers) == 2 and example.chosen == example.rejected:
        return "identical"
    return ""


def _shorten(row: Row, max_tokens: int, tokenizer: Any, closing: Closing) -> AnsweredPrompt | None:
    """With the oldest turns of the prompt left out, or the middle of its longest one, the same for both answers."""
    n_answer = len(row.chosen)

    def tokenise(chat: Row) -> AnsweredPrompt:
        return _tokenise(
            replace(row, messages=chat.messages[: len(chat.messages) - n_answer]), tokenizer, closing
        )

    chat = replace(row, kind="chat", messages=(*row.messages, *row.chosen))
    return shorten(chat, max_tokens, tokenise)


def _refuse_identical(dropped: Sequence[dict[str, Any]], n_read: int, limit: float) -> None:
    same = [entry["id"] for entry in dropped if entry["reason"] == "identical"]
    if len(same) > limit * n_read:
        raise UserError(
            f"{len(same)} of {n_read} pairs have the same chosen and rejected answer, more than {limit:.0%}",
            where="train.preference.max_identical_share",
            why="such pairs prefer nothing; so many of them mean that the pairs were made wrongly. "
            f"First: {', '.join(same[:5])}",
            fix="mend how the pairs are made, or raise train.preference.max_identical_share to drop them in silence",
        )
