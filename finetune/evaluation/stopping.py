"""When a generated row ends, and what text it then stands for. The same rule for every batch size and decoder."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

FinishReason = Literal["stop", "length"]

# A stop string of n bytes spans at most n tokens; the margin covers word-start marks that a decoder strips.
_WINDOW_MARGIN_TOKENS = 8


@dataclass(frozen=True)
class StopRule:
    """Ends a row at a stop token, at a stop string, or at the token limit; whichever comes first.

    `stop_ids` are all end-of-turn and end-of-text ids. A stop string that is itself one token of the vocabulary
    (for example a special token that decoding would hide) has been turned into a stop id by `stop_rule`.
    """

    tokenizer: Any
    max_new_tokens: int
    stop_ids: frozenset[int]
    stop_strings: tuple[str, ...] = ()

    def finish_reason(self, tokens: Sequence[int]) -> FinishReason | None:
        """Why the row that has produced `tokens` ends with the newest one; None while it goes on."""
        if tokens[-1] in self.stop_ids:
            return "stop"
        if self.stop_strings and self._newest_holds_stop(tokens):
            return "stop"
        return "length" if len(tokens) >= self.max_new_tokens else None

    def text(self, tokens: Sequence[int]) -> str:
        """The answer: everything before the first stop, special tokens hidden, surrounding text untouched."""
        kept = list(tokens)
        for index, token in enumerate(kept):
            if token in self.stop_ids:
                kept = kept[:index]
                break
        visible = self._decode(kept)
        cuts = [at for at in (visible.find(stop) for stop in self.stop_strings) if at >= 0]
        if not cuts:
            return str(self.tokenizer.decode(kept, skip_special_tokens=True))
        text = visible[: min(cuts)]
        for special in self.tokenizer.all_special_tokens:
            text = text.replace(special, "")
        return text

    def _newest_holds_stop(self, tokens: Sequence[int]) -> bool:
        longest_bytes = max(len(stop.encode()) for stop in self.stop_strings)
        window = self._decode(tokens[-(longest_bytes + _WINDOW_MARGIN_TOKENS) :])
        return any(stop in window for stop in self.stop_strings)

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(
            self.tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        )


def stop_rule(
    tokenizer: Any, *, max_new_tokens: int, stop_strings: Iterable[str], stop_ids: Iterable[int]
) -> StopRule:
    """Build a rule; stop strings that are one vocabulary token of their own become stop ids."""
    ids = set(stop_ids)
    texts = []
    added = {str(token) for token in getattr(tokenizer, "added_tokens_decoder", {}).values()}
    for stop in stop_strings:
        if stop in added or stop in tokenizer.all_special_tokens:
            ids.add(int(tokenizer.convert_tokens_to_ids(stop)))
        else:
            texts.append(stop)
    return StopRule(tokenizer, max_new_tokens, frozenset(ids), tuple(texts))
