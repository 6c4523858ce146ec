"""The `home_intents` source: spoken smart-home commands and the JSON object that each one means.

Utterances are drawn from the sentence templates of the `home-assistant-intents` package; hassil's recogniser then says
what each one means, as it would in a real house, and only utterances that it understands as intended are kept.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import home_assistant_intents
from hassil.expression import Sentence
from hassil.intents import IntentData, Intents, SlotList, TextSlotList, WildcardSlotList
from hassil.recognize import recognize_best

from finetune.data.rows import Ledger, Progress, Row
from finetune.data.spec_source import HomeIntentsSource
from finetune.data.template_walk import TemplateWalk, Utterance
from finetune.digest import digest_bytes
from finetune.errors import Fault, UserError, did_you_mean

SOURCE_NAME = "home_intents"
# A voice device always knows the room it stands in, and many templates need that. The room is not part of what was
# said, so it is given to the recogniser as this mark and taken out of the target again.
_CONTEXT_AREA = "\x00here"
# Tries for each wanted utterance: some templates have few utterances, and about one in five is misunderstood.
_TRIES_PER_ROW = 3


@dataclass(frozen=True)
class Template:
    """One sentence template with the block of the intent that it stands in."""

    intent: str
    sentence: Sentence
    data: IntentData

    @property
    def id(self) -> str:
        """Stable: depends on the intent and the template's text alone, so new templates rename none."""
        return f"{self.intent}-{digest_bytes(str(self.sentence.text).encode())[:8]}"

    @property
    def domains(self) -> frozenset[str]:
        required = self.data.requires_context.get("domain", ())
        return frozenset([required] if isinstance(required, str) else required)


@dataclass(frozen=True)
class Home:
    """The parsed language with the values of this dataset: what is needed to draw and to recognise."""

    intents: Intents
    lists: dict[str, SlotList]
    source: HomeIntentsSource

    def recognise(self, text: str) -> tuple[str, dict[str, Any]] | None:
        """The intent and the normalised slots that hassil hears in `text`; None when it hears nothing."""
        result = recognize_best(
            text,
            self.intents,
            slot_lists=self.lists,
            intent_context={"area": _CONTEXT_AREA},
            language=self.source.language,
        )
        if result is None:
            return None
        slots = {name: _plain(entity.value) for name, entity in result.entities.items()}
        return result.intent.name, {name: value for name, value in slots.items() if value != _CONTEXT_AREA}


def source_versions() -> dict[str, str]:
    """Versions of the packages that decide the rows; part of the build's digest."""
    return {name: importlib.metadata.version(name) for name in ("home-assistant-intents", "hassil")}


def load_home(source: HomeIntentsSource) -> Home:
    """Parse the package's templates; raises UserError when the language is not in it."""
    parsed = home_assistant_intents.get_intents(source.language)
    if parsed is None:
        raise UserError(
            f"home-assistant-intents has no language '{source.language}'",
            fix=f"one of: {', '.join(home_assistant_intents.get_languages())}",
        )
    names = [(name, name, {"domain": domain}) for domain, values in source.names.items() for name in values]
    lists: dict[str, SlotList] = {
        "area": TextSlotList.from_strings(source.areas, name="area"),
        "floor": TextSlotList.from_strings(source.floors, name="floor"),
        "name": TextSlotList.from_tuples(names, name="name"),
    }
    return Home(Intents.from_dict(parsed), lists, source)


def list_templates(home: Home) -> list[Template]:
    """Every sentence template of the language, in the package's order."""
    return [
        Template(intent.name, sentence, data)
        for intent in home.intents.intents.values()
        for data in intent.data
        for sentence in data.sentences
    ]


def target_json(intent: str, slots: dict[str, Any]) -> str:
    """The answer: compact JSON, `intent` first, slots by name, whole numbers as integers."""
    ordered = {"intent": intent} | {name: slots[name] for name in sorted(slots)}
    return json.dumps(ordered, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def sample_rows(source: HomeIntentsSource, seed: int, ledger: Ledger, on_progress: Progress) -> Iterator[Row]:
    """Draw the rows, template by template.

    Each template has its own generator, seeded by `seed` and the template's id: adding a template, or asking for more
    rows, changes no row that was drawn before. Utterances that are not understood as meant go to the ledger.
    """
    home = load_home(source)
    templates = list_templates(home)
    _require_values(home, templates)
    per_intent: dict[str, int] = {}
    for template in templates:
        per_intent[template.intent] = per_intent.get(template.intent, 0) + 1
    for done, template in enumerate(templates, start=1):
        spread = math.ceil(source.min_rows_per_intent / per_intent[template.intent])
        yield from _sample_template(template, home, seed, max(source.rows_per_template, spread), ledger)
        on_progress(done / len(templates))


def _require_values(home: Home, templates: list[Template]) -> None:
    """Raise UserError, naming every key at once, when a template has a place that the spec gives no words for."""
    phrases, names = home.source.phrases, home.source.names
    needed: set[str] = set()
    lacking: dict[str, str] = {}
    for template in templates:
        rules = {**home.intents.expansion_rules, **template.data.expansion_rules}
        used = set(template.sentence.list_names(rules))
        needed |= {name for name in used if isinstance(home.intents.slot_lists.get(name), WildcardSlotList)}
        if "name" in used and template.domains and template.domains.isdisjoint(names):
            lacking.setdefault(" or ".join(sorted(template.domains)), str(template.sentence.text))
    faults = [
        Fault(f"source.names has no device of domain {domain}", why=f"needed by '{example}'")
        for domain, example in lacking.items()
    ]
    faults += [
        Fault(f"source.phrases has no words for the open list '{name}'", fix=f"add source.phrases.{name}")
        for name in sorted(needed - set(phrases))
    ]
    faults += [
        Fault(f"source.phrases.{name} belongs to no template", fix=did_you_mean(name, needed))
        for name in sorted(set(phrases) - needed)
    ]
    if faults:
        raise UserError(faults)


def _sample_template(template: Template, home: Home, seed: int, wanted: int, ledger: Ledger) -> Iterator[Row]:
    walk = _walk_for(template, home, seed)
    seen: set[str] = set()
    kept = 0
    for _ in range(wanted * _TRIES_PER_ROW):
        utterance = walk.draw(template.sentence)
        if utterance.text in seen:
            continue  # the same walk again: no new row
        seen.add(utterance.text)
        ledger.read += 1
        meaning = home.recognise(utterance.text)
        reason = _disagreement(template, utterance, meaning)
        if meaning is None or reason:
            ledger.drop(reason, source=SOURCE_NAME, group=template.id, raw=utterance.text)
            continue
        yield _row(template, home.source, utterance, target_json(*meaning))
        kept += 1
        if kept == wanted:
            return


def _walk_for(template: Template, home: Home, seed: int) -> TemplateWalk:
    start = digest_bytes(f"{seed}/{template.id}/{sorted(template.domains)}".encode())
    return TemplateWalk(
        rng=random.Random(int(start[:16], 16)),
        lists={**home.intents.slot_lists, **home.lists, **template.data.slot_lists},
        rules={**home.intents.expansion_rules, **template.data.expansion_rules},
        phrases=home.source.phrases,
        language=home.source.language,
        optional_share=home.source.optional_share,
        number_words_share=home.source.number_words_share,
        domains=template.domains,
    )


def _disagreement(
    template: Template, utterance: Utterance, meaning: tuple[str, dict[str, Any]] | None
) -> str:
    """Why the utterance is not kept; empty when hassil hears exactly what was meant."""
    if meaning is None:
        return "not_recognised"
    intent, slots = meaning
    if intent != template.intent:
        return "other_intent"
    intended = {name: _plain(value) for name, value in {**template.data.slots, **utterance.slots}.items()}
    return "" if slots == intended else "other_slots"


def _row(template: Template, source: HomeIntentsSource, utterance: Utterance, target: str) -> Row:
    messages = [{"role": "system", "content": source.system}] if source.system is not None else []
    messages += [{"role": "user", "content": utterance.text}, {"role": "assistant", "content": target}]
    return Row(
        id=f"{template.intent}-{digest_bytes(utterance.text.encode())[:12]}",
        messages=tuple(messages),
        group=template.id,
        source=SOURCE_NAME,
        tags={
            "intent": template.intent,
            "template": str(template.sentence.text),
            "phrasing": utterance.phrasing.casefold(),
        },
    )


def _plain(value: Any) -> Any:
    """hassil gives 30 or 30.0 by template; a whole number is written as an integer. Text is stripped."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value.strip() if isinstance(value, str) else value
