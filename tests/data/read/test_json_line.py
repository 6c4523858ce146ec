"""Lines become objects unchanged, or a fault with a reason; nothing in between."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finetune.data.read.json_line import parse_object
from finetune.data.read.record import RowError


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b'{"a": NaN}', "not valid JSON"),
        (b'{"a": 1e999}', "not valid JSON"),
        (b'{"a": "\\ud800"}', "surrogate"),
        (b'{"a": "\xff"}', "UTF-8"),
        (b'{"a": 1', "not valid JSON"),
        (b'{"a": 1} {"a": 2}', "not valid JSON"),
        (b"[1]", "this is a list"),
        (b"null", "this is a null"),
        (b'{"a": 1, "a": 2}', "'a' is written twice"),
        (b'{"x": {"role": "user", "role": "user"}}', "'role' is written twice"),
        (b'{"a\\u003a": ":", "b": 1, "b": 2}', "'b' is written twice"),
        (b'{"a":' * 400 + b"1" + b"}" * 400, "nested too deeply"),
        (b'{"a":' * 100000, "not valid JSON"),
    ],
)
def test_bad_lines_say_why(raw: bytes, reason: str) -> None:
    with pytest.raises(RowError, match=reason):
        parse_object(raw)


def test_long_integers_are_not_rounded() -> None:
    assert parse_object(b'{"id": 123456789012345678901234567890}') == {"id": 123456789012345678901234567890}
    assert parse_object(b'{"id": 9223372036854775809}') == {"id": 9223372036854775809}


text = st.text(st.characters(exclude_categories=["Cs"]))
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**80), 2**80) | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(text, values, max_size=4), st.booleans())
def test_every_object_comes_back_exactly(row: dict[str, object], ascii_only: bool) -> None:
    assert parse_object(json.dumps(row, ensure_ascii=ascii_only).encode()) == row


@given(st.binary())
def test_any_bytes_are_an_object_or_a_reasoned_fault(raw: bytes) -> None:
    try:
        assert isinstance(parse_object(raw), dict)
    except RowError as fault:
        assert str(fault)
