"""What a model is really trained on: the tokens of the rows, looked at as the model sees them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from finetune.data.chat_spans import (
    closing_of,
    control_tokens,
    ending_of,
    holds_control_tokens,
    is_trained_answer,
    no_end_of_turn,
    require_generation_prompt,
)
from finetune.data.rows import Row
from finetune.data.template_breaches import Breach, answers_have_an_end, breaches_of
from finetune.data.tokenise import TokenisedRow, TrainOn, generation_stop_ids
from finetune.doctor.finding import Finding, examine, fault, faults_of, ok, skipped, warning
from finetune.errors import Fault, UserError
from finetune.training.invariants import rendering_differences

BOS, EOS, SERVE, ANSWERS = "BOS once", "EOS is a target", "train = serve", "targets are the answers"
_TOLD_AS: dict[Breach, str] = {"bos": BOS, "prompt": SERVE, "answer": ANSWERS, "row": "rendering"}
_TOKENIZER, _TEMPLATE = "tokenizer_config.json of model.id", "chat template"
_SHOWN = 3


def check_tokens(
    rows: Sequence[Row], tokenised: Sequence[TokenisedRow], tokenizer: Any, *, vocabulary: int
) -> Iterator[Finding]:
    """All of them. `rows` before and `tokenised` after the tokenizer; `vocabulary` rows has the model's embedding."""
    by_id = {row.row_id: row for row in tokenised}
    checks: dict[str, Callable[[], Finding]] = {
        BOS: lambda: check_bos(tokenised, tokenizer),
        EOS: lambda: check_end_is_target(tokenised, tokenizer),
        "pad token": lambda: check_pad(tokenizer, vocabulary),
        "vocabulary": lambda: check_vocabulary(tokenised, vocabulary),
        SERVE: lambda: check_rendering(rows, by_id, tokenizer),
        ANSWERS: lambda: check_spans(rows, by_id, tokenizer),
        "control tokens in texts": lambda: check_control_tokens(rows, tokenizer),
    }
    for name, check in checks.items():
        yield from examine("tokens", name, check)


def check_refused(
    rows: Sequence[Row],
    tokenizer: Any,
    refused: UserError,
    *,
    vocabulary: int,
    train_on: TrainOn | Literal["each"] = "all",
) -> Iterator[Finding]:
    """What can be said of rows that cannot be tokenised: all that the chat template breaks, each once, with how many rows.
    `refused` is what the tokeniser said of the first one, told where nothing else explains it."""
    found = [*_of_template(tokenizer), *_of_rows(rows, tokenizer, train_on)]
    yield from found or faults_of("rows", refused)
    yield check_pad(tokenizer, vocabulary)


def _of_template(tokenizer: Any) -> Iterator[Finding]:
    """What a conversation of two turns shows already."""
    try:
        if not answers_have_an_end(tokenizer):
            yield from faults_of(EOS, no_end_of_turn())
        head, _ = ending_of(tokenizer)
    except UserError:  # which the rows tell, with their number
        return
    try:
        require_generation_prompt(tokenizer, head)
    except UserError as error:
        yield from faults_of(SERVE, error)


def _of_rows(rows: Sequence[Row], tokenizer: Any, train_on: TrainOn | Literal["each"]) -> Iterator[Finding]:
    first: dict[Breach, tuple[Fault, Row]] = {}
    broken: dict[Breach, int] = {}
    for row in rows:
        for breach, one in breaches_of(row, tokenizer, train_on=train_on).items():
            first.setdefault(breach, (one, row))
            broken[breach] = broken.get(breach, 0) + 1
    for breach, (one, row) in first.items():
        place = f", {one.where}" if one.where else ""
        yield fault(
            _TOLD_AS[breach],
            f"{broken[breach]} of {len(rows)} rows: {one.what}" + (f" ({one.why})" if one.why else ""),
            one.fix,
            where=f"row {row.id} ({row.source}){place}",
        )


def check_bos(rows: Sequence[TokenisedRow], tokenizer: Any) -> Finding:
    """BOS once: not twice, and not never where the tokenizer puts one before plain text."""
    bos, name = tokenizer.bos_token_id, BOS
    if bos is None:
        return ok(name, "the tokenizer has no BOS token")
    twice = [row.row_id for row in rows if row.input_ids[:2] == [bos, bos]]
    if twice:
        return fault(
            name,
            f"{len(twice)} rows begin with two BOS tokens, e.g. {_shown(twice)}",
            f"take '{tokenizer.bos_token}' out of the start of the texts, or out of the chat template",
            where=f"row {twice[0]}",
        )
    never = sum(row.input_ids[:1] != [bos] for row in rows)
    adds = list(tokenizer("a")["input_ids"])[:1] == [bos]
    if adds and never:
        return warning(
            name,
            f"{never} of {len(rows)} rows begin without BOS, which the tokenizer puts before plain text",
            "the model was probably trained with it: let the chat template begin with {{ bos_token }}",
            where=_TEMPLATE,
        )
    return ok(name, f"no row of {len(rows)} begins with two")


def check_end_is_target(rows: Sequence[TokenisedRow], tokenizer: Any) -> Finding:
    """Every answer ends in a token that stops the generation, and that token carries loss."""
    stops, name = set(generation_stop_ids(tokenizer)), EOS
    ends = [(row.row_id, row.input_ids[first:last]) for row in rows for first, last in row.spans()]
    without = [row_id for row_id, ids in ends if not stops & set(ids[-2:])]  # a line break may follow it
    if without:
        return fault(
            name,
            f"{len(without)} of {len(ends)} answers do not end in a token that stops the generation "
            f"(rows {_shown(without)}): the model would learn to go on",
            "let the chat template end assistant turns with the end-of-turn or EOS token",
            where=f"row {without[0]}",
        )
    return ok(name, f"all {len(ends)} answers end in {tokenizer.convert_ids_to_tokens(sorted(stops))}")


def check_pad(tokenizer: Any, vocabulary: int) -> Finding:
    """A pad token that the embedding has; where it is EOS too, padding is told by place and never by id."""
    pad, name = tokenizer.pad_token_id, "pad token"
    if pad is None:
        return warning(
            name,
            "the tokenizer has none; batches of rows of different lengths are padded with EOS",
            "set tokenizer.pad_token and save the tokenizer with the model, or train with packing",
            where=_TOKENIZER,
        )
    if pad >= vocabulary:
        return fault(
            name,
            f"its id is {pad}, and the model has rows for {vocabulary} tokens",
            "save a tokenizer whose pad token is one of the model's",
            where=_TOKENIZER,
        )
    shared = " (also the end of an answer, which stays a target)" if pad in _stops(tokenizer) else ""
    return ok(name, f"{tokenizer.pad_token}{shared}")


def _stops(tokenizer: Any) -> list[int]:
    """Ids that end an answer; EOS alone where the template tells no other."""
    try:
        return generation_stop_ids(tokenizer)
    except UserError:
        return [tokenizer.eos_token_id]


def check_vocabulary(rows: Sequence[TokenisedRow], vocabulary: int) -> Finding:
    """No id beyond the model's embedding."""
    highest = max((max(row.input_ids) for row in rows if row.input_ids), default=0)
    if highest >= vocabulary:
        return fault(
            "vocabulary",
            f"the rows hold token {highest}, and the model has rows for {vocabulary}",
            "use the tokenizer that belongs to the model, or name what it adds in model.new_tokens",
            where=_TOKENIZER,
        )
    return ok("vocabulary", f"the highest id is {highest} of {vocabulary}")


def check_rendering(rows: Sequence[Row], tokenised: Mapping[str, TokenisedRow], tokenizer: Any) -> Finding:
    """Behind the very tokens that the model is given when it is asked."""
    name = SERVE
    differing = rendering_differences(rows, tokenised, tokenizer)
    if differing:
        return fault(
            name,
            f"{len(differing)} rows are trained behind other tokens than the model is given, e.g. {_shown(differing)}",
            "use a chat template that renders earlier turns the same way with and without an answer, or train_on: each",
            where=f"row {differing[0]}",
        )
    return ok(name, "rows are trained behind the tokens that the model is given when it is asked")


def check_spans(rows: Sequence[Row], tokenised: Mapping[str, TokenisedRow], tokenizer: Any) -> Finding:
    """What carries loss, decoded, is the answer as it stands in the row, and its end-of-turn token."""
    name = ANSWERS
    chats = [row for row in rows if row.kind == "chat" and row.id in tokenised]
    if not chats:
        return skipped(name, "no row is a conversation of its own")
    end = closing_of(tokenizer).end_of_turn
    wrong: list[str] = []
    n_answers = 0
    for row in chats:
        one = tokenised[row.id]
        answers = [turn for turn in row.messages if is_trained_answer(turn)]
        for (first, last), turn in zip(reversed(one.spans()), reversed(answers), strict=False):
            content = turn.get("content")
            if not isinstance(content, str) or turn.get("tool_calls"):
                continue  # written by the template in its own way
            n_answers += 1
            text = tokenizer.decode(one.input_ids[first:last]).strip().removesuffix(end)
            if text.strip() != content.strip():
                wrong.append(row.id)
    if wrong:
        return fault(
            name,
            f"of {n_answers} answers, {len(wrong)} decode to another text than the row holds, e.g. {_shown(wrong)}",
            "look at them with `finetune data show`; the template may rewrite answers, or cut them",
            where=f"row {wrong[0]}",
        )
    return ok(name, f"{n_answers} answers decode to the text of their rows")


def check_control_tokens(rows: Sequence[Row], tokenizer: Any) -> Finding:
    """Tokens of the template that stand in texts, typed by a user or left by an earlier rendering: they act as control."""
    name = "control tokens in texts"
    control = control_tokens(tokenizer, closing_of(tokenizer))
    holding = [
        row.id for row in rows if holds_control_tokens((*row.messages, *row.chosen, *row.rejected), control)
    ]
    if holding:
        return warning(
            name,
            f"{len(holding)} of {len(rows)} rows hold a control token as text, e.g. {_shown(holding)}: the model reads it as "
            "the end or the start of a turn",
            "take it out of the texts, or write it another way; `finetune data lengths` counts all such rows",
            where=f"row {holding[0]}",
        )
    return ok(name, f"none in {len(rows)} rows")


def _shown(ids: Sequence[str]) -> str:
    return ", ".join(ids[:_SHOWN])
