"""An answer's key changes with everything that decides the answer, and with nothing else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from finetune.evaluation.answer_keys import arm_key, tokenizer_digest
from finetune.evaluation.items import Item
from finetune.evaluation.run import prepare_arm
from finetune.evaluation.suite import Suite


@pytest.fixture
def keys(suite: Suite, items: list[Item], tiny_tokenizer: Any) -> Any:
    """All keys of the first two items' answers, by (item, repeat)."""

    def call(**changes: Any) -> dict[tuple[int, int], str]:
        options: dict[str, Any] = {"arm": "zero_shot", "key": "weights"} | changes
        chosen = options.pop("suite", suite)
        decoding = options.pop("decoding", {})
        if decoding:
            chosen = chosen.model_copy(update={"decoding": chosen.decoding.model_copy(update=decoding)})
        tokenizer, asked = options.pop("tokenizer", tiny_tokenizer), options.pop("items", items[:2])
        job = prepare_arm(tokenizer, chosen, asked, **options)
        return {(ask.place, ask.repeat): ask.key for ask in job.asks}

    return call


SAMPLED = {"temperature": 0.7, "top_p": 0.9, "seed": 3, "repeats": 2}


@pytest.mark.parametrize(
    "change",
    [
        {"key": "other weights or adapter"},
        {"arm": "tuned"},
        {"decoding": SAMPLED | {"temperature": 0.8}},
        {"decoding": SAMPLED | {"top_p": 0.8}},
        {"decoding": SAMPLED | {"seed": 4}},
        {"decoding": SAMPLED | {"max_new_tokens": 11}},
        {"decoding": SAMPLED | {"stop": ["x"]}},
    ],
)
def test_whatever_decides_an_answer_changes_every_key(keys: Any, change: dict[str, Any]) -> None:
    before = keys(decoding=SAMPLED)
    after = keys(**({"decoding": SAMPLED} | change))
    assert before.keys() == after.keys()
    assert not set(before.values()) & set(after.values())


def test_another_tokenizer_or_template_changes_every_key_though_the_ids_stay(
    keys: Any, make_tiny_tokenizer: Any
) -> None:
    before = set(keys().values())
    other = make_tiny_tokenizer()
    assert set(keys(tokenizer=other).values()) == before
    other.chat_template += "{# the same text #}"
    assert not set(keys(tokenizer=other).values()) & before
    wider = make_tiny_tokenizer()
    wider.add_tokens(["never asked"])
    assert not set(keys(tokenizer=wider).values()) & before


def test_padding_of_an_earlier_call_changes_no_key(make_tiny_tokenizer: Any) -> None:
    tokenizer = make_tiny_tokenizer()
    before = tokenizer_digest(tokenizer)
    tokenizer(["a", "bb"], padding=True, truncation=True, max_length=8)
    assert tokenizer_digest(tokenizer) == before


def test_each_item_and_repeat_has_a_key_of_its_own(keys: Any, items: list[Item]) -> None:
    found = keys(decoding=SAMPLED)
    assert len(set(found.values())) == 4
    renamed = keys(decoding=SAMPLED, items=[replace(items[0], id="renamed"), items[1]])
    reworded = keys(
        decoding=SAMPLED,
        items=[replace(items[0], messages=({"role": "user", "content": "else"},)), items[1]],
    )
    for other in (renamed, reworded):
        assert other[0, 0] != found[0, 0]
        assert other[1, 1] == found[1, 1]


def test_what_does_not_decide_an_answer_leaves_its_key(keys: Any, suite: Suite, items: list[Item]) -> None:
    before = keys()
    assert keys(decoding={"seed": 99}) == before  # nothing is drawn
    assert keys(suite=suite.model_copy(update={"scorers": ["exact_match"]})) == before
    assert keys(items=[replace(items[0], reference="{}", tags={}, cluster="other"), items[1]]) == before
    three = keys(decoding=SAMPLED | {"repeats": 3})
    assert {place: three[place] for place in keys(decoding=SAMPLED)} == keys(decoding=SAMPLED)


def test_a_text_is_measured_among_all_texts(keys: Any, suite: Suite) -> None:
    texts = suite.model_copy(update={"task": "text", "scorers": ["nll_per_token"]})
    items = [Item(f"t{n}", (), f"text {n}", f"t{n}") for n in range(3)]
    assert keys(suite=texts, items=items)[0, 0] != keys(suite=texts, items=items[:2])[0, 0]


def test_the_key_of_an_arm_depends_on_all_its_answers(
    suite: Suite, items: list[Item], tiny_tokenizer: Any
) -> None:
    jobs = [prepare_arm(tiny_tokenizer, suite, items[:count], arm="tuned", key="k") for count in (2, 3)]
    assert jobs[0].key != jobs[1].key
    assert jobs[0].key == arm_key(jobs[1].asks[:2])
