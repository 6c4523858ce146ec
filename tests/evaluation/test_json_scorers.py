"""What counts as the right JSON object, at every edge that the docstrings state."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finetune.errors import UserError
from finetune.evaluation.items import Item
from finetune.evaluation.scorers.json_object import (
    exact_match,
    intent_accuracy,
    parse_object,
    same_value,
    slot_f1,
    valid_json,
)
from finetune.evaluation.scorers.registry import make_scorer
from finetune.evaluation.scoring import check_references
from finetune.evaluation.suite import Suite

REFERENCE = '{"intent":"HassLightSet","brightness":5,"name":"floor lamp"}'


@pytest.mark.parametrize(
    "output",
    [
        REFERENCE,
        ' \n{ "name" : "floor lamp",\t"brightness": 5, "intent": "HassLightSet" }\n',
        '{"intent":"HassLightSet","brightness":5.0,"name":"floor lamp"}',
        '{"intent":"HassLightSet","brightness":5e0,"name":"floor\\u0020lamp"}',
    ],
)
def test_spelling_does_not_matter(output: str) -> None:
    assert exact_match(output, REFERENCE) == 1.0


@pytest.mark.parametrize(
    "output",
    [
        f"```json\n{REFERENCE}\n```",
        f"Sure! {REFERENCE}",
        REFERENCE + REFERENCE,
        REFERENCE + " Done.",
        f"[{REFERENCE}]",
        REFERENCE[:-1],
        REFERENCE.replace('"', "'"),
        '{"intent":"HassLightSet","brightness":1,"brightness":5,"name":"floor lamp"}',
        '{"intent":"HassLightSet","brightness":NaN,"name":"floor lamp"}',
        '{"intent":"HassLightSet","brightness":1e999,"name":"floor lamp"}',
        "",
        "null",
        '"text"',
        "[" * 100_000,
        '{"a":' * 5_000 + "1" + "}" * 5_000,
        '{"a":' + "9" * 5_000 + "}",
    ],
)
def test_anything_but_one_object_is_a_format_failure(output: str) -> None:
    assert valid_json(output, REFERENCE) == 0.0
    assert exact_match(output, REFERENCE) == 0.0
    assert intent_accuracy(output, REFERENCE) == 0.0
    assert slot_f1(output, REFERENCE) == 0.0


@pytest.mark.parametrize(
    "output",
    [
        '{"intent":"HassLightSet","brightness":"5","name":"floor lamp"}',
        '{"intent":"HassLightSet","brightness":true,"name":"floor lamp"}',
        '{"intent":"HassLightSet","brightness":5,"name":"Floor lamp"}',
        '{"intent":"HassLightSet","brightness":5,"name":"floor lamp","area":null}',
        '{"intent":"HassLightSet","brightness":5}',
    ],
)
def test_another_value_is_wrong_though_valid(output: str) -> None:
    assert valid_json(output, REFERENCE) == 1.0
    assert exact_match(output, REFERENCE) == 0.0


@pytest.mark.parametrize(
    ("left", "right"), [(True, 1), (False, 0), ([True], [1]), ({"a": 0}, {"a": False}), (5, "5")]
)
def test_types_are_told_apart_at_every_depth(left: object, right: object) -> None:
    assert not same_value(left, right)
    assert not same_value(right, left)


def test_same_value_reaches_into_lists_and_objects() -> None:
    assert same_value({"a": [1, {"b": 2.0}]}, {"a": [1.0, {"b": 2}]})
    assert not same_value([1, 2], [1])
    assert not same_value([1, 2], [2, 1])


def test_intent_is_scored_apart_from_slots() -> None:
    assert intent_accuracy('{"intent":"HassLightSet"}', REFERENCE) == 1.0
    assert intent_accuracy('{"intent":"HassTurnOn","brightness":5,"name":"floor lamp"}', REFERENCE) == 0.0
    assert intent_accuracy('{"brightness":5}', REFERENCE) == 0.0
    assert slot_f1('{"intent":"HassTurnOn","brightness":5,"name":"floor lamp"}', REFERENCE) == 1.0


@pytest.mark.parametrize(
    ("output", "reference", "expected"),
    [
        ('{"intent":"A"}', '{"intent":"A"}', 1.0),
        ('{"intent":"B"}', '{"intent":"A"}', 1.0),
        ('{"intent":"A","x":1}', '{"intent":"A"}', 0.0),
        ('{"intent":"A"}', '{"intent":"A","x":1}', 0.0),
        ('{"intent":"A","x":1}', '{"intent":"A","x":1,"y":2}', 2 / 3),
        ('{"intent":"A","x":2,"y":2}', '{"intent":"A","x":1,"y":2}', 0.5),
        ('{"intent":"A","x":1,"y":2,"z":3}', '{"intent":"A","x":1}', 0.5),
        ("no json", '{"intent":"A"}', 0.0),
    ],
)
def test_slot_f1_by_hand(output: str, reference: str, expected: float) -> None:
    assert slot_f1(output, reference) == pytest.approx(expected)


def test_a_reference_that_is_no_object_is_an_error() -> None:
    with pytest.raises(ValueError, match="not one JSON object"):
        exact_match("{}", "Paris")


def test_a_suite_of_plain_text_is_told_which_scorers_fit(suite: Suite) -> None:
    items = [Item("q1", (), "Paris", "q1"), Item("q2", (), '{"intent": "A"}', "q2")]
    with pytest.raises(UserError) as raised:
        check_references(suite, items)
    (fault,) = raised.value.faults
    assert "item q1" in fault.where and "Paris" in fault.what
    assert "text_match" in fault.fix and "normalised_match" in fault.fix


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(max_size=4), JSON_VALUES, max_size=4))
def test_every_object_matches_itself_in_any_spelling(value: dict[str, object]) -> None:
    reference = json.dumps(value)
    respelled = json.dumps(dict(reversed(value.items())), indent=3, ensure_ascii=False)
    if value:
        assert parse_object(reference) is not None
    assert exact_match(respelled, reference) == 1.0
    assert slot_f1(respelled, reference) == 1.0


@given(st.text(max_size=40))
def test_no_text_makes_a_scorer_fail_or_leave_its_range(output: str) -> None:
    for scorer in (exact_match, valid_json, intent_accuracy, slot_f1):
        assert 0.0 <= scorer(output, REFERENCE) <= 1.0


@pytest.mark.parametrize(
    ("output", "parameters", "expected"),
    [
        ('{"a":1,"b":{"c":"x","d":[1,2]}}', {}, 1.0),
        ('{"b":{"d":[1.0,2],"c":"x"},"a":1.0}', {}, 1.0),
        ('{"a":1}', {}, 2 * 1 / (1 + 3)),
        ('{"a":1,"b":{"c":"x","d":[2,1]}}', {}, 2 * 2 / 6),
        ('{"a":1,"b":{"c":"x","d":[2,1]}}', {"lists": "elements"}, 1.0),
        ('{"a":1,"b":{"c":"x","d":[1,1]}}', {"lists": "elements"}, 2 * 3 / 8),
        ('{"a":1,"b":{"c":"x"}}', {"nested": False}, 2 * 1 / 4),
        ('{"a":1,"b":{"c":"y"}}', {"ignore": ["b"]}, 1.0),
        ('{"a":true,"b":{"c":"x","d":[1,2]}}', {}, 2 * 2 / 6),
        ('{"a":"1","b":{"c":"x","d":[1,2]}}', {}, 2 * 2 / 6),
        ("{}", {}, 0.0),
        ("a: 1", {}, 0.0),
    ],
)
def test_field_f1_by_hand(output: str, parameters: dict[str, Any], expected: float) -> None:
    score = make_scorer("field_f1", parameters)
    assert score(output, '{"a":1,"b":{"c":"x","d":[1,2]}}', None) == pytest.approx(expected)


def test_field_f1_without_fields() -> None:
    score = make_scorer("field_f1", {"ignore": ["intent"]})
    assert score('{"intent":"x"}', '{"intent":"y"}', None) == 1.0
    assert score('{"intent":"x","a":1}', '{"intent":"y"}', None) == 0.0
    assert score("none", "{}", None) == 0.0
    assert make_scorer("field_f1", {})('{"a":{}}', '{"a":[]}', None) == 0.0
    with pytest.raises(ValueError, match="not one JSON object"):
        score("{}", "[]", None)


def test_field_f1_of_flat_objects_is_slot_f1() -> None:
    reference, output = '{"intent":"a","x":1,"y":"b"}', '{"intent":"z","x":1,"y":"c","w":2}'
    assert make_scorer("field_f1", {"ignore": ["intent"]})(output, reference, None) == slot_f1(
        output, reference
    )
