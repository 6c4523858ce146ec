"""What a prompt is; and prompts without a chat template, for base models: the text itself, with examples as earlier text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from finetune.data.row_tokens import encode
from finetune.errors import UserError
from finetune.evaluation.item_source import RawSection
from finetune.evaluation.items import Item


@dataclass(frozen=True)
class Prompt:
    """The rendered text and its token ids, up to where the answer begins. `lead` of the ids stand before the text's own
    (a BOS that the template does not write)."""

    text: str
    ids: list[int]
    lead: int = 0


def raw_text(item: Item, raw: RawSection, *, system: str | None = None, shown: Sequence[Item] = ()) -> str:
    """System text, worked examples, then the item's own text, joined by the example separator; the answer follows."""
    parts = [system] if system is not None else []
    parts += [
        asked + answer_behind(asked, example.reference, raw)
        for example in shown
        for asked in [own_text(example)]
    ]
    return raw.example_separator.join([*parts, own_text(item)])


def own_text(item: Item) -> str:
    """The item's prompt. Raises UserError for a conversation, which only a chat template can write out."""
    if len(item.messages) != 1 or item.messages[0]["role"] != "user" or item.tools:
        raise UserError(
            f"item {item.id} is a conversation, not one prompt",
            where="prompt_format: raw",
            why="without a chat template nothing says how turns, system messages or tools are written",
            fix="give the item a `prompt`, or set prompt_format: chat",
        )
    return str(item.messages[0]["content"])


def answer_behind(prompt: str, answer: str, raw: RawSection) -> str:
    """The answer as it stands behind a prompt: with the separator, unless white space ends the prompt or begins it."""
    apart = prompt[-1:].isspace() or answer[:1].isspace()
    return answer if apart else raw.answer_separator + answer


def encode_raw(text: str, tokenizer: Any) -> tuple[list[int], int]:
    """Token ids of a text as the tokenizer begins one, and how many of them come before the text's own (BOS, or none)."""
    ids = encode(text, tokenizer)
    first = list(tokenizer(text)["input_ids"])[:1]
    begins = first == [tokenizer.bos_token_id] and ids[:1] != first
    return (first + ids, 1) if begins else (ids, 0)
