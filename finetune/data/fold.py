"""What counts as the same text: compatibility forms, case and white space folded."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any


def fold_text(text: str) -> str:
    """Unicode NFKC, case folded, runs of white space as one space."""
    if text.isascii():  # both foldings are the lower case there, ten times faster
        return " ".join(text.lower().split())
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def fold_turns(turns: Sequence[Mapping[str, Any]]) -> str:
    """A conversation, folded: roles and contents, so that only their order and words matter."""
    return fold_text("\x01".join([f"{turn['role']}\x00{turn.get('content') or ''}" for turn in turns]))


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
