"""Answers that teach little or harm: empty ones, refusals, and texts that stand word for word in many rows."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from finetune.data.curate.exact import groups_of_equal, text_digest
from finetune.data.curate.tokens import Texts
from finetune.data.fold import fold_text

_LEAST_WORDS = 4
_SHOWN = 200
_KINDS = ("answer", "first sentence", "last sentence")
_NOTHING = bytes(16)
# Said at the beginning of a refusal. Kept to phrases that hardly begin an answer: a wrong hit would accuse a good row.
_REFUSALS = re.compile(
    r"""^\W*(?:
    (?:i['’]?\s?a?m\ (?:really\ |very\ |so\ )?sorry|sorry|i\ apologi[sz]e|unfortunately|my\ apologies)
      [,.;:!]?\s+(?:but\s+)?(?:i|we)\W?\s*(?:a?m\ )?(?:can(?:['’]?t|not|\ not)|not\ able|unable|won['’]t|do\ not|don['’]t)
    | i\ (?:can(?:['’]?t|not|\ not)|won['’]t|am\ (?:unable|not\ able)\ to)\ (?:\w+\ ){0,2}?
      (?:assist|help|comply|fulfil|fulfill|provide|support|engage|participate|create|generate|discuss|do\ that)
    | i['’]m\ (?:unable|not\ able|not\ comfortable)
    | as\ an?\ (?:ai|artificial|language\ model|assistant)\b[^.]{0,80}\b(?:i\ (?:can|do|am|have)|cannot|can['’]t)
    | (?:es\ )?tut\ mir\ (?:sehr\ )?leid,?\s+(?:aber\ )?(?:ich|dabei|das)\ [^.]{0,30}\bnicht
    | (?:ich\ )?kann\ (?:ich\ )?(?:ihnen|dir)\ (?:dabei|damit)\ (?:leider\ )?nicht
    | (?:je\ suis\ )?désolée?,?\s+(?:mais\ )?je\ ne\ (?:peux|suis)\ pas
    | lo\ siento,?\s+(?:pero\ )?no\ puedo | mi\ dispiace,?\s+(?:ma\ )?non\ posso
    | (?:desculpe|sinto\ muito|lamento),?\s+(?:mas\ )?não\ posso
    | 很?抱歉[,、]?[^。]{0,8}(?:无法|不能) | 申し訳(?:ありません|ございません)が
    )""",
    re.VERBOSE,
)


@dataclass(frozen=True, slots=True)
class Repeated:
    """A text that many rows share: `kind` is answer, first sentence or last sentence; `rows` the first few of them."""

    kind: str
    text: str
    n_rows: int
    rows: tuple[int, ...]

    def to_dict(self) -> dict[str, Any]:
        return {"kind": self.kind, "text": self.text, "n_rows": self.n_rows, "rows": list(self.rows)}


def is_empty(answer: str) -> bool:
    """Whether an answer has no letter, digit or symbol: nothing, white space, or dots and dashes alone."""
    return not any(character.isalnum() or ord(character) > 0x2190 for character in answer) and not (
        set(answer) & set("+*/=<>^%$€£")
    )


def is_refusal(answer: str) -> bool:
    """Whether an answer opens with a refusal, in English, German, French, Spanish, Italian, Portuguese, Chinese or
    Japanese. A refusal deeper in the text, or one in other words, is not seen."""
    return _REFUSALS.match(fold_text(answer[:300])) is not None


def find_repeated(answers: Texts, *, min_rows: int = 10, min_share: float = 0.05) -> list[Repeated]:
    """Boilerplate: answers of four words or more that at least `min_rows` rows have, and first or last sentences that
    also make up at least `min_share` of all rows. The most frequent stand first.

    JSON and short answers, of which a classifier has few by nature, are not looked at. Answers that are counted whole
    are not counted by their sentences too. Memory is 48 bytes a row.
    """
    packed: dict[str, bytearray] = {kind: bytearray() for kind in _KINDS}
    for row in range(len(answers)):
        parts = _parts(fold_text(answers[row]))
        for kind in _KINDS:
            packed[kind] += text_digest(parts[kind]) if kind in parts else _NOTHING
    found: list[Repeated] = []
    for kind in _KINDS:
        digests = np.frombuffer(bytes(packed[kind]), "<u8").reshape(-1, 2)
        least = min_rows if kind == "answer" else math.ceil(max(min_rows, min_share * len(answers)))
        for rows in groups_of_equal(digests, at_least=max(least, 2)):
            if digests[rows[0]].any():
                text = _parts(fold_text(answers[int(rows[0])]))[kind]
                found.append(Repeated(kind, text[:_SHOWN], len(rows), tuple(rows[:3].tolist())))
    whole = [one.text for one in found if one.kind == "answer"]
    found = [one for one in found if one.kind == "answer" or not any(one.text in text for text in whole)]
    return sorted(found, key=lambda one: (-one.n_rows, one.kind, one.text))


def _parts(folded: str) -> dict[str, str]:
    """Kind -> the part of an answer that could be boilerplate; too short parts are left out."""
    if folded[:1] in ("{", "["):
        return {}
    sentences = re.split(r"(?<=[.!?。！？])\s+", folded)
    parts = {"answer": folded}
    if len(sentences) > 1:
        parts |= {"first sentence": sentences[0], "last sentence": sentences[-1]}
    return {kind: part for kind, part in parts.items() if _is_long(part)}


def _is_long(part: str) -> bool:
    return len(part.split(maxsplit=_LEAST_WORDS - 1)) >= _LEAST_WORDS or (
        not part.isascii() and len(part) >= 12
    )
