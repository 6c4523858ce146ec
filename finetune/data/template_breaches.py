"""Everything that a chat template does wrong with a conversation, where tokenising stops at the first of it: for the doctor.

Each breach is looked for by itself in the rendered text, so that a template with two begins of text and without an end of
turn is told both.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from finetune.data.chat_spans import (
    first_special,
    is_trained_answer,
    render,
    require_as_written,
    rewritten_history,
)
from finetune.data.row_tokens import TrainOn, encode
from finetune.data.rows import Row, Turn
from finetune.errors import Fault, UserError

Breach = Literal["bos", "prompt", "answer", "row"]
_ANSWERS = ("ProbeAnswer", "42")  # without a common end, in any spelling


def breaches_of(
    row: Row, tokenizer: Any, *, train_on: TrainOn | Literal["each"] = "all"
) -> dict[Breach, Fault]:
    """What of `row` breaks when it is rendered: at most one fault of each sort; none for running text and tokens.

    bos: two BOS tokens at its start. prompt: an answer stands behind another text than the model is given. answer: an
    answer is not written as it is. row: it cannot be rendered at all.
    """
    found: dict[Breach, Fault] = {}
    for turns in _conversations(row):
        try:
            for breach, error in _of_turns(turns, row, tokenizer, train_on):
                found.setdefault(breach, error.faults[0])
        except UserError as error:
            found.setdefault("row", error.faults[0])
    return found


def answers_have_an_end(tokenizer: Any) -> bool:
    """Whether the template writes a special token behind an answer, whatever it makes of the answer itself: what the
    renderings of two answers end in alike. Raises UserError where it renders no conversation."""
    question = {"role": "user", "content": "q"}
    one, other = (render([question, {"role": "assistant", "content": text}], tokenizer) for text in _ANSWERS)
    pairs = zip(reversed(one), reversed(other), strict=False)
    alike = "".join(left for left, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))[::-1]
    return first_special(alike, tokenizer) is not None


def _conversations(row: Row) -> list[tuple[Turn, ...]]:
    if row.kind == "preference":
        silent = tuple(
            {**turn, "train": False} if turn["role"] == "assistant" else turn for turn in row.messages
        )
        return [(*silent, *row.chosen), (*silent, *row.rejected)]
    return [tuple(row.messages)] if row.kind in ("chat", "kto") else []


def _of_turns(
    turns: Sequence[Turn], row: Row, tokenizer: Any, train_on: TrainOn | Literal["each"]
) -> Iterator[tuple[Breach, UserError]]:
    answers = [index for index, turn in enumerate(turns) if index and is_trained_answer(turn)]
    if not answers:
        return
    whole = render(turns[: answers[-1] + 1], tokenizer, tools=row.tools)
    try:
        encode(whole, tokenizer)
    except UserError as error:
        yield "bos", error
    for index in answers[-1:] if train_on == "last" else answers:
        full = render(turns[: index + 1], tokenizer, tools=row.tools) if train_on == "each" else whole
        prompt = render(turns[:index], tokenizer, tools=row.tools, generation_prompt=True)
        said = full[len(prompt) :]
        if not full.startswith(prompt):
            said = full  # where it begins is not known
            what = "the prompt of this answer is not how the whole conversation begins"
            yield "prompt", rewritten_history(index, what, is_last=index == answers[-1])
        try:
            require_as_written(turns[index], said, index)
        except UserError as error:
            yield "answer", error
