"""Preference pairs: where the prompt ends and the two answers begin, told or not."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from finetune.data.read.record import RowError
from finetune.data.read.turns import TurnKeys, described, text_or_turns, turns_of
from finetune.data.rows import Turn

# "\n\nHuman: …\n\nAssistant: …", the transcripts in which a much used collection of pairs is written.
_SPEAKER = re.compile(r"(?:\A|\n\n)(Human|Assistant):(?: |(?=\n|\Z))")


def preference_fields(given: Mapping[str, Any], keys: TurnKeys) -> dict[str, Any]:
    """`messages` (the prompt), `chosen` and `rejected` of a pair.

    The answers may be texts or lists of messages, and the lists may repeat the prompt. Without 'prompt' it is what both
    have in common: whole turns of conversations or transcripts; of plain texts the words up to the first that differs,
    never a part of a word. Raises RowError for a pair that prefers nothing or asks different things.
    """
    chosen, rejected = given["chosen"], given["rejected"]
    if given.get("prompt") not in (None, ""):
        prompt = text_or_turns(given["prompt"], "prompt", "user", keys)
        good, bad = _answers(chosen, "chosen", keys), _answers(rejected, "rejected", keys)
        prompt, good, bad = _without_prompt(prompt, good, bad)
    else:
        prompt, good, bad = _split_common(chosen, rejected, keys)
    for turns, key in ((good, "chosen"), (bad, "rejected")):
        if not turns:
            raise RowError(f"'{key}' has no answer of its own after the prompt")
        if turns[0]["role"] != "assistant":
            raise RowError(f"'{key}' goes on with a turn of {turns[0]['role']} where the answers part")
        if any(
            turn["role"] == "assistant" and not (turn.get("content") or turn.get("tool_calls"))
            for turn in turns
        ):
            raise RowError(f"'{key}' has an empty answer")
    if good == bad:
        raise RowError("'chosen' and 'rejected' are the same, so that nothing is preferred")
    return {"messages": prompt, "chosen": tuple(good), "rejected": tuple(bad)}


def _answers(value: Any, key: str, keys: TurnKeys) -> list[Turn]:
    return (
        turns_of([value], key, keys)
        if isinstance(value, dict)
        else text_or_turns(value, key, "assistant", keys)
    )


def _without_prompt(
    prompt: list[Turn], good: list[Turn], bad: list[Turn]
) -> tuple[list[Turn], list[Turn], list[Turn]]:
    """Answers that repeat the prompt, perhaps with a system turn before it, without it."""
    if good[0]["role"] == "assistant" and bad[0]["role"] == "assistant":
        return prompt, good, bad
    common = _common_turns(good, bad)
    size = next((end for end in range(len(common), 0, -1) if common[:end][-len(prompt) :] == prompt), 0)
    if size == 0:
        raise RowError("'chosen' and 'rejected' begin with turns that are not those of 'prompt'")
    return common[:size], good[size:], bad[size:]


def _split_common(chosen: Any, rejected: Any, keys: TurnKeys) -> tuple[list[Turn], list[Turn], list[Turn]]:
    if isinstance(chosen, str) and isinstance(rejected, str):
        good, bad = _transcript(chosen), _transcript(rejected)
        if good is None or bad is None:
            return _split_text(chosen, rejected)
    elif isinstance(chosen, list) and isinstance(rejected, list):
        good, bad = turns_of(chosen, "chosen", keys), turns_of(rejected, "rejected", keys)
    else:
        raise RowError(
            f"'chosen' is {described(chosen)} and 'rejected' {described(rejected)}; without a 'prompt' both are "
            "conversations or both are texts"
        )
    common = _common_turns(good, bad)
    if not common:
        raise RowError("'chosen' and 'rejected' have no turn in common, and there is no 'prompt'")
    return common, good[len(common) :], bad[len(common) :]


def _common_turns(good: list[Turn], bad: list[Turn]) -> list[Turn]:
    size = 0
    while size < min(len(good), len(bad)) and good[size] == bad[size]:
        size += 1
    return good[:size]


def _split_text(chosen: str, rejected: str) -> tuple[list[Turn], list[Turn], list[Turn]]:
    size = 0
    limit = min(len(chosen), len(rejected))
    while size < limit and chosen[size] == rejected[size]:
        size += 1
    # Back to a word's edge that is one in both texts; the space stays with the answers.
    while size and not all(size < len(text) and text[size].isspace() for text in (chosen, rejected)):
        size -= 1
    if not chosen[:size].strip():
        raise RowError("'chosen' and 'rejected' do not begin alike, and there is no 'prompt'")
    prompt = [{"role": "user", "content": chosen[:size]}]
    good, bad = chosen[size:], rejected[size:]
    return prompt, [{"role": "assistant", "content": good}], [{"role": "assistant", "content": bad}]


def _transcript(text: str) -> list[Turn] | None:
    """The turns of a 'Human: … Assistant: …' transcript, or None for other texts."""
    marks = list(_SPEAKER.finditer(text))
    if len(marks) < 2 or text[: marks[0].start()].strip() or marks[0][1] != "Human":
        return None
    ends = [mark.start() for mark in marks[1:]] + [len(text)]
    return [
        {"role": "user" if mark[1] == "Human" else "assistant", "content": text[mark.end() : end]}
        for mark, end in zip(marks, ends, strict=True)
    ]
