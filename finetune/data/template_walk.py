"""A seeded random walk over hassil's parsed sentence templates: one utterance, its slots and its phrasing.

hassil's own sampler enumerates every combination in order (millions for some templates); a walk draws one.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hassil.expression import (
    Alternative,
    Expression,
    ListReference,
    Permutation,
    RuleReference,
    Sentence,
    Sequence,
    TextChunk,
)
from hassil.intents import RangeSlotList, SlotList, TextSlotList, WildcardSlotList
from hassil.numbers import get_rbnf_engine

_SPACES = re.compile(r"\s+")


@dataclass(frozen=True, slots=True)
class Utterance:
    """What is said, the same with every value replaced by `{slot}`, and the slots that were meant."""

    text: str
    phrasing: str
    slots: dict[str, Any]


@dataclass
class TemplateWalk:
    """Everything one walk needs to know.

    lists: hassil slot lists by name; a `{name}` value may carry a context such as {"domain": "light"}.
    phrases: what may stand for each wildcard list. A wildcard without phrases raises KeyError with its name.
    domains: when not empty, only list values whose context names one of these domains may be said.
    """

    rng: random.Random
    lists: Mapping[str, SlotList]
    rules: Mapping[str, Sentence]
    phrases: Mapping[str, list[str]]
    language: str
    optional_share: float
    number_words_share: float
    domains: frozenset[str] = frozenset()
    _slots: dict[str, Any] = field(default_factory=dict)

    def draw(self, sentence: Sentence) -> Utterance:
        """One utterance of the template."""
        self._slots = {}
        text, phrasing = self._walk(sentence.expression)
        return Utterance(_tidy(text), _tidy(phrasing), self._slots)

    def _walk(self, node: Expression) -> tuple[str, str]:
        if isinstance(node, TextChunk):
            return node.original_text, node.original_text
        if isinstance(node, Alternative):
            return self._walk_alternative(node)
        if isinstance(node, Permutation):
            parts = [self._walk(item) for item in node.items]
            self.rng.shuffle(parts)
            return "".join(f" {text} " for text, _ in parts), "".join(f" {p} " for _, p in parts)
        if isinstance(node, Sequence):
            parts = [self._walk(item) for item in node.items]
            return "".join(text for text, _ in parts), "".join(phrasing for _, phrasing in parts)
        if isinstance(node, RuleReference):
            return self._walk(self.rules[node.rule_name].expression)
        if isinstance(node, ListReference):
            return self._walk_list(node)
        raise TypeError(f"unknown template node: {type(node).__name__}")

    def _walk_alternative(self, node: Alternative) -> tuple[str, str]:
        items = node.items
        if node.is_optional:
            items = [item for item in items if not (isinstance(item, TextChunk) and item.is_empty)]
            if not items or self.rng.random() >= self.optional_share:
                return "", ""
        return self._walk(items[self.rng.randrange(len(items))])

    def _walk_list(self, node: ListReference) -> tuple[str, str]:
        if node.is_inline_range:
            start, stop, step = node.get_inline_range()
            text, value = self._number(range(start, stop + 1, step), digits=True, words=True)
        else:
            text, value = self._value(node.list_name)
        if not node.is_capture:
            self._slots[node.slot_name] = value
        return text, f"{{{node.slot_name}}}"

    def _value(self, list_name: str) -> tuple[str, Any]:
        slot_list = self.lists[list_name]
        if isinstance(slot_list, TextSlotList):
            values = [value for value in slot_list.values if self._is_speakable(value.context)]
            chosen = values[self.rng.randrange(len(values))]
            return self._walk(chosen.text_in)[0], chosen.value_out
        if isinstance(slot_list, RangeSlotList):
            text, number = self._number(
                list(slot_list.get_numbers()), digits=slot_list.digits, words=slot_list.words
            )
            return text, number if slot_list.multiplier is None else number * slot_list.multiplier
        if isinstance(slot_list, WildcardSlotList):
            phrases = self.phrases[list_name]
            phrase = phrases[self.rng.randrange(len(phrases))]
            return phrase, phrase
        raise TypeError(f"unknown slot list: {type(slot_list).__name__}")

    def _is_speakable(self, context: Mapping[str, Any] | None) -> bool:
        return not (self.domains and context and "domain" in context) or context["domain"] in self.domains

    def _number(self, numbers: range | list[float], *, digits: bool, words: bool) -> tuple[str, float]:
        number = numbers[self.rng.randrange(len(numbers))]
        if words and (not digits or self.rng.random() < self.number_words_share):
            spoken = get_rbnf_engine(self.language).format_number(number).text_by_ruleset
            forms = sorted(set(spoken.values()))
            return forms[self.rng.randrange(len(forms))], number
        return str(number), number


def _tidy(text: str) -> str:
    return _SPACES.sub(" ", text).strip()
