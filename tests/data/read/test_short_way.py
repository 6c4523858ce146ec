"""What is done a short way for speed gives what the long way gives."""

from __future__ import annotations

import unicodedata
from collections import Counter
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from finetune.data.fold import _UNSEEN, fold_text, squeeze_text
from finetune.data.read.record import Record, RowError
from finetune.data.read.row_maker import RowMaker
from finetune.data.rows import Row
from finetune.data.spec_source import FilesSource

letters = st.characters(exclude_categories=["Cs"])
ascii_text = st.text(st.characters(max_codepoint=127), max_size=20)


@given(ascii_text | st.text("aB \n\x1f", max_size=60) | st.text(letters, max_size=20))
def test_folding(text: str) -> None:
    assert fold_text(text) == " ".join(
        unicodedata.normalize("NFKC", "".join(letter for letter in text if not _UNSEEN.match(letter)))
        .casefold()
        .split()
    )
    assert fold_text(fold_text(text)) == fold_text(text)
    assert squeeze_text(text) == "".join(fold_text(text).split())


turn = st.fixed_dictionaries(
    {},
    optional={
        "role": st.sampled_from(["user", "assistant", "system", "tool", "gpt", "", None, 1]),
        "content": ascii_text | st.none() | st.integers() | st.just([{"type": "text", "text": "part"}]),
        "train": st.booleans() | st.just("no"),
        "tool_calls": st.just([{"function": {"name": "f"}}]),
    },
)
good_turn = st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": ascii_text})
record = st.fixed_dictionaries(
    {"messages": st.lists(good_turn | turn, max_size=4) | st.none() | st.just("text")},
    optional={
        "system": ascii_text,
        "tools": st.just([{"type": "function"}]) | st.just("no list"),
        "prompt": ascii_text,
        "completion": ascii_text,
        "chosen": ascii_text,
        "rejected": ascii_text,
        "input_ids": st.lists(st.integers(0, 3), max_size=2),
        "topic": ascii_text,
    },
)


def made(source: FilesSource, value: dict[str, Any]) -> tuple[Row | str, Counter[str]]:
    ignored: Counter[str] = Counter()
    try:
        return RowMaker(source, "f", ignored)(Record(1, 0, b"", value)), ignored
    except RowError as fault:
        return str(fault), ignored


@given(record)
def test_records_of_plain_turns(value: dict[str, Any]) -> None:
    given_as: dict[str, Any] = {"kind": "files", "files": ["f"], "tags": ["topic"], "system": "s"}
    short = FilesSource(**given_as)
    long = FilesSource(
        **given_as, roles={"nobody": "user"}
    )  # a name of a role takes every record the long way
    assert made(short, value) == made(long, value)
