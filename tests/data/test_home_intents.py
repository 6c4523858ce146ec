"""The embedded data set: every row means what its answer says, and test phrasings are new."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from collections import Counter
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from hassil.intents import Intents, TextSlotList
from hassil.parse_expression import parse_sentence

from finetune.data.build import DatasetBuild, build_dataset, load_spec
from finetune.data.home_intents import list_templates, load_home, sample_rows, target_json
from finetune.data.rows import SIDES, Ledger, Row
from finetune.data.spec_source import HomeIntentsSource
from finetune.data.template_walk import TemplateWalk
from finetune.errors import UserError
from finetune.paths import shipped_root

SPEC = shipped_root() / "data" / "home_intents.yaml"


def shipped_source() -> HomeIntentsSource:
    source = load_spec(SPEC).value.source
    assert isinstance(source, HomeIntentsSource)
    return source


@lru_cache(maxsize=4)
def sampled(rows_per_template: int, seed: int) -> tuple[tuple[Row, ...], Ledger]:
    source = shipped_source().model_copy(
        update={"rows_per_template": rows_per_template, "min_rows_per_intent": 1}
    )
    ledger = Ledger()
    return tuple(sample_rows(source, seed, ledger, lambda share: None)), ledger


@pytest.fixture(scope="module")
def shipped_build(tmp_path_factory: pytest.TempPathFactory) -> DatasetBuild:
    return build_dataset(SPEC, tmp_path_factory.mktemp("builds"))


def test_every_row_is_understood_as_its_answer_says() -> None:
    home = load_home(shipped_source())
    rows, _ = sampled(1, 17)
    for row in random.Random(0).sample(rows, 150):
        answer = json.loads(row.answer)
        assert home.recognise(row.messages[-2]["content"]) == (answer.pop("intent"), answer)


def test_nearly_all_templates_and_all_intents_are_covered() -> None:
    rows, ledger = sampled(1, 17)
    templates = list_templates(load_home(shipped_source()))
    assert len({row.group for row in rows}) >= 0.99 * len({template.id for template in templates})
    assert {row.tags["intent"] for row in rows} == {template.intent for template in templates}
    assert ledger.read == len(rows) + sum(ledger.dropped.values())
    assert len(rows) >= 0.95 * ledger.read


def test_what_is_misunderstood_goes_to_the_ledger_with_its_reason() -> None:
    _, ledger = sampled(2, 17)
    assert set(ledger.dropped) <= {"not_recognised", "other_intent", "other_slots"}
    assert len(ledger.entries) == sum(ledger.dropped.values()) > 0
    assert all(entry["raw"] and entry["group"] for entry in ledger.entries)


def test_the_answer_is_compact_json_in_a_fixed_order() -> None:
    assert (
        target_json("HassX", {"b": 21.5, "a": "é", "c": 30}) == '{"intent":"HassX","a":"é","b":21.5,"c":30}'
    )
    for row in sampled(1, 17)[0]:
        answer = json.loads(row.answer)
        assert target_json(answer.pop("intent"), answer) == row.answer
        assert not any(isinstance(value, float) and value.is_integer() for value in answer.values())
        assert "here" not in answer.values()


def test_asking_for_more_rows_keeps_the_ones_there_were() -> None:
    few, more = ({row.id for row in sampled(n, 17)[0]} for n in (1, 2))
    assert few < more


def test_another_seed_draws_other_rows() -> None:
    first, second = ({row.id for row in sampled(1, seed)[0]} for seed in (17, 18))
    assert len(first & second) < 0.5 * len(first)


def test_rows_do_not_depend_on_the_hash_seed_of_python() -> None:
    code = (
        "from pathlib import Path\n"
        "from finetune.data.build import load_spec\n"
        "from finetune.data.home_intents import sample_rows\n"
        "from finetune.data.rows import Ledger\n"
        f"source = load_spec(Path({str(SPEC)!r})).value.source\n"
        "rows = sample_rows(source, 17, Ledger(), lambda share: None)\n"
        "print([(next(rows).id, row.answer) for row in (next(rows) for _ in range(60))])\n"
    )
    printed = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(printed) == 1


def test_the_shipped_build_is_what_the_job_needs(shipped_build: DatasetBuild) -> None:
    """Enough rows, test phrasings never seen in training, every intent with two templates trained and tested."""
    by_side = shipped_build.by_side
    assert {side: len(by_side[side]) for side in SIDES} == {
        "train": 1200,
        "validation": 100,
        "test": 240,
        "regressions": 32,
    }
    assert shipped_build.manifest["leaks"] == {"exact": 0, "group": 0, "phrasing": 0, "near": 0, "ngram": 0}
    groups = {side: {row.group for row in by_side[side]} for side in SIDES}
    assert len(groups["test"]) >= 120
    assert len(groups["train"]) >= 500
    intents = {side: Counter(row.tags["intent"] for row in by_side[side]) for side in SIDES}
    templates = {template.id: template.intent for template in list_templates(load_home(shipped_source()))}
    assert set(intents["train"]) == set(templates.values())
    several = {intent for intent, n in Counter(templates.values()).items() if n > 1}
    assert several <= set(intents["test"])
    timers = sum(n for intent, n in intents["train"].items() if "Timer" in intent)
    assert timers < 0.36 * 1200
    utterances = {side: {row.messages[-2]["content"].casefold() for row in by_side[side]} for side in SIDES}
    assert not utterances["train"] & (
        utterances["test"] | utterances["validation"] | utterances["regressions"]
    )


def test_an_unknown_language_is_a_user_error() -> None:
    with pytest.raises(UserError, match="no language 'xx'"):
        load_home(shipped_source().model_copy(update={"language": "xx"}))


def test_places_without_words_are_named_all_at_once() -> None:
    source = shipped_source()
    phrases = {name: words for name, words in source.phrases.items() if name != "message"}
    phrases["serch_query"] = phrases.pop("search_query")
    names = {domain: words for domain, words in source.names.items() if domain != "todo"}
    lacking = source.model_copy(update={"phrases": phrases, "names": names})
    with pytest.raises(UserError) as caught:
        list(sample_rows(lacking, 1, Ledger(), lambda share: None))
    said = str(caught.value)
    assert "source.names has no device of domain todo" in said
    assert "no words for the open list 'message'" in said
    assert "did you mean 'search_query'?" in said


def walk_of(template: str, n: int = 200, **options: Any) -> set[tuple[str, str]]:
    lists = Intents.from_dict(
        {
            "language": "en",
            "intents": {},
            "lists": {
                "state": {"values": [{"in": "(shut|closed)", "out": "off"}]},
                "level": {"range": {"from": 0, "to": 3}},
                "open": {"wildcard": True},
            },
        }
    ).slot_lists
    names = [("lamp", "lamp", {"domain": "light"}), ("fan", "fan", {"domain": "fan"})]
    walk = TemplateWalk(
        rng=random.Random(1),
        lists={**lists, "name": TextSlotList.from_tuples(names, name="name")},
        rules={"the": parse_sentence("(the|my)")},
        phrases={"open": ["some words"]},
        language="en",
        optional_share=options.pop("optional_share", 0.5),
        number_words_share=options.pop("number_words_share", 0.0),
        **options,
    )
    drawn = [walk.draw(parse_sentence(template)) for _ in range(n)]
    return {(utterance.text, json.dumps(utterance.slots)) for utterance in drawn}


@pytest.mark.parametrize(
    ("template", "texts"),
    [
        ("(a|b) c", {"a c", "b c"}),
        ("[x] y", {"x y", "y"}),
        ("(a;b;c)", {"a b c", "a c b", "b a c", "b c a", "c a b", "c b a"}),
        ("<the> {state}", {"the shut", "the closed", "my shut", "my closed"}),
        ("light[s] on", {"light on", "lights on"}),
        ("{level}( |-)hour", {f"{n}{gap}hour" for n in range(4) for gap in " -"}),
        ("say {open:message}", {"say some words"}),
    ],
)
def test_a_walk_reaches_every_utterance_of_a_template_and_no_other(template: str, texts: set[str]) -> None:
    assert {text for text, _ in walk_of(template)} == texts


def test_a_walk_knows_what_it_meant() -> None:
    assert walk_of("set {level:brightness} on {name}", domains=frozenset({"light"})) == {
        (f"set {n} on lamp", json.dumps({"brightness": n, "name": "lamp"})) for n in range(4)
    }
    assert {slots for _, slots in walk_of("{state:value}")} == {'{"value": "off"}'}


def test_shares_of_optional_words_and_spoken_numbers_are_kept() -> None:
    assert {text for text, _ in walk_of("[x] y", optional_share=0.0)} == {"y"}
    assert {text for text, _ in walk_of("[x] y", optional_share=1.0)} == {"x y"}
    words = {text for text, _ in walk_of("{level}", number_words_share=1.0)}
    assert {"zero", "one", "two", "three"} <= words
    assert not any(re.search(r"[0-9]", word) for word in words)


def test_a_phrasing_is_the_utterance_without_its_values() -> None:
    rows, _ = sampled(1, 17)
    for row in rows:
        pattern = re.escape(row.tags["phrasing"])
        pattern = re.sub(r"\\\{[^}]*\\\}", ".+", pattern)
        assert re.fullmatch(pattern, row.messages[-2]["content"].casefold()), row.tags


def test_a_row_says_where_it_comes_from(shipped_build: DatasetBuild) -> None:
    (row,) = shipped_build.rows("test")[:1]
    assert row.source == "home_intents"
    assert row.group.startswith(row.tags["intent"])
    assert [turn["role"] for turn in row.messages] == ["system", "user", "assistant"]
    assert Path(shipped_build.folder, "ledger.jsonl").stat().st_size > 0
