"""What counts as the same text: compatibility forms, case and white space folded."""

from __future__ import annotations

import itertools
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

# ASCII in lower case, with all white space that `str.split` knows as spaces.
_FOLDED = bytes(
    32 if 9 <= value <= 13 or 28 <= value <= 31 else value for value in range(128)
).lower() + bytes(128)

_FEW_RUNS = 8
# Characters that are not seen: soft hyphens, zero-width spaces and joiners, marks of direction, variation selectors, byte
# order marks inside a text. Pages and word processors scatter them, and a reader sees the same words.
_UNSEEN = dict.fromkeys(
    itertools.chain(
        (0xAD, 0x34F, 0x61C, 0x180E, 0xFEFF),
        *(range(first, first + 16) for first in (0x2060, 0xFE00)),
        range(0x200B, 0x2010),
        range(0x202A, 0x202F),
    )
)


def fold_text(text: str) -> str:
    """Unicode NFKC without unseen characters, case folded, runs of white space as one space."""
    if not text.isascii():
        return " ".join(fold_characters(text).split())
    # Of ASCII both foldings are the lower case. Runs of spaces are mostly few, and closing them one by one is then three
    # times as fast as cutting the text into words.
    folded = text.encode().translate(_FOLDED)
    run = folded.find(b"  ")
    for _ in range(_FEW_RUNS):
        if run < 0:
            return folded.strip(b" ").decode()
        folded = folded[:run] + b" " + folded[run:].lstrip(b" ")
        run = folded.find(b"  ", run + 1)
    return b" ".join(folded.split()).decode()


def fold_characters(text: str) -> str:
    """Compatibility forms (full-width letters, ligatures) and case folded, unseen characters left out."""
    return (
        text.lower() if text.isascii() else unicodedata.normalize("NFKC", text.translate(_UNSEEN)).casefold()
    )


def fold_turns(turns: Sequence[Mapping[str, Any]]) -> str:
    """A conversation, folded: roles and contents, so that only their order and words matter."""
    return "\x01".join([f"{turn['role']}\x00{fold_text(turn.get('content') or '')}" for turn in turns])


def normalised_opening(turns: Sequence[Mapping[str, Any]]) -> str:
    """All before the first answer to a user, folded like a prompt: the same in every continuation of a conversation.

    Rows grouped by their opening share no prompt across sides, neither as a whole row nor as an earlier turn.
    """
    asked = False
    for index, turn in enumerate(turns):
        if asked and turn["role"] == "assistant":
            return fold_turns(turns[:index])
        asked = asked or turn["role"] == "user"
    return fold_turns(turns)
