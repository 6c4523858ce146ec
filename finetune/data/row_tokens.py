"""Tokens and labels of one row: loss on the answers and their end-of-turn tokens, and on nothing else.

Labels are set by position, never by comparing ids: where the pad token equals the end-of-turn token, the latter is a
target all the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from finetune.data.chat_spans import Closing, Messages, RenderedRow, closing_of, locate_answers, render
from finetune.data.rows import Row
from finetune.errors import Fault, UserError

IGNORED = -100
TrainOn = Literal["all", "last"]


@dataclass(frozen=True, slots=True)
class TokenisedRow:
    """input_ids and labels have the same length; labels are the ids themselves on targets and -100 elsewhere.

    Labels are not shifted: position i is predicted from the positions before it, as transformers does it. `weights`, as
    long as they, is there when an answer has a weight other than 1: how much each target counts, 0 elsewhere. `shortened`:
    something was cut out before the last answer, so that it stands behind other tokens than those of the whole row.
    """

    row_id: str
    input_ids: list[int]
    labels: list[int]
    n_targets: int
    weights: list[float] | None = None
    source: str = ""
    shortened: bool = False

    def spans(self) -> list[tuple[int, int]]:
        """The runs of targets as (first, past the last) token positions."""
        marks = [False, *(label != IGNORED for label in self.labels), False]
        edges = [place for place, (left, right) in enumerate(itertools.pairwise(marks)) if left != right]
        return list(zip(edges[::2], edges[1::2], strict=True))


def prompt_ids(messages: Messages, tokenizer: Any, *, tools: Sequence[Any] = ()) -> tuple[list[int], str]:
    """What the model is given to answer `messages`: token ids and text, exactly as in training.

    The ids are those of `apply_chat_template(messages, add_generation_prompt=True)`. Raises UserError when they would
    begin with two BOS tokens.
    """
    text = render(messages, tokenizer, tools=tools, generation_prompt=True)
    return encode(text, tokenizer), text


def generation_stop_ids(tokenizer: Any) -> list[int]:
    """Ids that end an answer: the template's end-of-turn token, which need not be EOS, and EOS."""
    end_of_turn = tokenizer.convert_tokens_to_ids(closing_of(tokenizer).end_of_turn)
    return sorted({end_of_turn, tokenizer.eos_token_id} - {None})


def encode(text: str, tokenizer: Any) -> list[int]:
    """Ids of rendered text; no special token is added, for the template wrote them all.

    Raises UserError when the ids begin with two BOS tokens.
    """
    ids: list[int] = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    bos = tokenizer.bos_token_id
    if bos is not None and ids[:2] == [bos, bos]:
        raise UserError(
            f"the rendered conversation begins with two BOS tokens ({tokenizer.bos_token})",
            where="chat template",
            why="the template writes one already, and the text brings another",
            fix=f"remove '{tokenizer.bos_token}' from the start of the text, or from the template",
        )
    return ids


def tokenise_with(row: Row, tokenizer: Any, closing: Closing, train_on: TrainOn) -> TokenisedRow:
    """Tokens and labels of one row, `closing` being `closing_of(tokenizer)`.

    Of running text every token is a target but the first, and so is the EOS put after it; rows of tokens are taken as
    they are. Raises UserError, naming the row, when its answers have no provable place in the text or in the tokens, and
    for pairs, judged answers and steps, of which an answer may be one that is not wanted.
    """
    try:
        ids, labels, weights = _tokens_of(row, tokenizer, closing, train_on)
    except UserError as error:
        raise UserError([_naming(row, fault) for fault in error.faults]) from error
    return TokenisedRow(row.id, ids, labels, sum(label != IGNORED for label in labels), weights, row.source)


def _tokens_of(
    row: Row, tokenizer: Any, closing: Closing, train_on: TrainOn
) -> tuple[list[int], list[int], list[float] | None]:
    """Ids, labels, and weights where an answer has one of its own."""
    if row.kind == "chat":
        rendered = locate_answers(
            row.messages, tokenizer, closing, tools=row.tools, last_only=train_on == "last"
        )
        return _label(rendered, tokenizer)
    if row.kind == "text":
        ids = _ids_of_text(row.text, tokenizer)
        return ids, _first_ignored(ids), None
    if row.kind == "tokens":
        return list(row.input_ids), _first_ignored(list(row.labels)), None
    raise UserError(
        f"a row of kind {row.kind} is not learnt answer by answer",
        why="it holds answers that are not wanted, and all would be trained alike",
        fix="train on it with a preference method, or keep the wanted answers as chat rows",
    )


def _ids_of_text(text: str, tokenizer: Any) -> list[int]:
    """Ids of running text with one BOS, where the tokenizer puts one, and one EOS; a text that was rendered by a template
    may bring its own."""
    ids = list(tokenizer(text)["input_ids"])
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    while bos is not None and ids[:2] == [bos, bos]:
        ids = ids[1:]
    if eos is None:
        return ids
    if ids[-2:] == [eos, eos]:
        return ids[:-1]
    return ids if ids[-1:] == [eos] else [*ids, eos]


def _first_ignored(labels: list[int]) -> list[int]:
    """Nothing comes before the first token, in a row or at the start of a packed document, so it is predicted by none."""
    return [IGNORED, *labels[1:]] if labels else labels


def _naming(row: Row, fault: Fault) -> Fault:
    where = f"row {row.id} ({row.source})"
    return Fault(fault.what, f"{where}, {fault.where}" if fault.where else where, fault.why, fault.fix)


def _label(rendered: RenderedRow, tokenizer: Any) -> tuple[list[int], list[int], list[float] | None]:
    """Ids of the text, labels on the tokens inside the spans, and their weights unless all are 1.

    The text is tokenised in one go when every prompt in it then has the very tokens that the model is given when it is
    used. Where prompt and answer would merge into one token, the text is cut at the start of each answer instead.
    """
    text, spans = rendered.text, rendered.spans
    ids = encode(text, tokenizer)
    places = _places(ids, text, spans, tokenizer)
    if places is None:
        ids, places = _encode_in_pieces(ids, rendered, tokenizer)
    labels = [IGNORED] * len(ids)
    for first, last in places:
        labels[first:last] = ids[first:last]
    labels = _first_ignored(labels)
    if all(weight == 1.0 for weight in rendered.weights):
        return ids, labels, None
    weights = [0.0] * len(ids)
    for (first, last), weight in zip(places, rendered.weights, strict=True):
        weights[first:last] = [weight] * (last - first)
    return ids, labels, weights


def _places(
    ids: list[int], text: str, spans: Sequence[tuple[int, int]], tokenizer: Any
) -> list[tuple[int, int]] | None:
    """Token positions of character spans; None when a token reaches across an edge of a span.

    An edge lies between two tokens when the text before it, tokenised alone, gives the ids before it. This needs no
    character offsets, which byte-level tokenizers trim around white space.
    """
    places: list[tuple[int, int]] = []
    for span in spans:
        edges = [encode(text[:edge], tokenizer) for edge in span]
        if any(ids[: len(before)] != before for before in edges):
            return None
        places.append((len(edges[0]), len(edges[1])))
    return places


def _encode_in_pieces(
    whole: list[int], rendered: RenderedRow, tokenizer: Any
) -> tuple[list[int], list[tuple[int, int]]]:
    """The same with the text cut at the start of each span; proven to decode to the same text as the whole."""
    starts = [start for start, _ in rendered.spans]
    ids = encode(rendered.text[: starts[0]], tokenizer)
    places: list[tuple[int, int]] = []
    for (start, end), stop in zip(rendered.spans, [*starts[1:], len(rendered.text)], strict=True):
        piece = encode(rendered.text[start:stop], tokenizer)
        inside = _places(piece, rendered.text[start:stop], [(0, end - start)], tokenizer)
        if inside is None:
            raise _no_edge("the end-of-turn token merges with what follows it")
        places.append((len(ids), len(ids) + inside[0][1]))
        ids = ids + piece
    if tokenizer.decode(ids) != tokenizer.decode(whole):
        raise _no_edge("the prompt merges with the answer into one token")
    return ids, places


def _no_edge(what: str) -> UserError:
    return UserError(
        f"the tokens of the prompt cannot be told from those of the answer: {what}",
        where="chat template",
        why="training would use other prompt tokens than the model is given when it is used",
        fix="end the generation prompt with a special token or a line break in the chat template",
    )
