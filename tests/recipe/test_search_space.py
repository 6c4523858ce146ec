"""`--over`: lists, ranges, and what is neither."""

from __future__ import annotations

import pytest

from finetune.errors import UserError
from finetune.recipe.search_space import parse_axes


def test_ranges_and_lists() -> None:
    rate, rank, share = parse_axes(
        ["train.learning_rate=1e-5..1e-3:log3", "adapter.rank=8, 16,32", "train.warmup_share=0..0.2:3"]
    )
    assert rate.key == "train.learning_rate" and rate.values == ("1e-05", "0.0001", "0.001")
    assert rank.values == ("8", "16", "32")
    assert share.values == ("0", "0.1", "0.2")
    (targets,) = parse_axes(["adapter.target_modules=[q_proj], [q_proj,v_proj],all-linear"])
    assert targets.values == ("[q_proj]", "[q_proj,v_proj]", "all-linear")


@pytest.mark.parametrize(
    ("argument", "told"),
    [
        ("train.learning_rate", "not of the form"),
        ("=1,2", "not of the form"),
        ("a=", "not of the form"),
        ("a=1,,2", "empty"),
        ("a=1,1", "given twice"),
        ("a=1..2", "LOW..HIGH:N"),
        ("a=2..1:3", "must rise"),
        ("a=nan..1:3", "must rise"),
        ("a=0..1:log3", "above 0"),
        ("a=0..1:1", "2 to"),
        ("a=x..1:3", "ends of a range are numbers"),
        ("a=1..1.00001:3", "too close"),
        ("a=[b,c", "not closed"),
    ],
)
def test_what_is_no_space_is_told(argument: str, told: str) -> None:
    with pytest.raises(UserError, match=told):
        parse_axes([argument])


def test_all_faults_at_once_and_a_key_only_once() -> None:
    with pytest.raises(UserError) as caught:
        parse_axes(["a=1,2", "a=3,4", "b"])
    assert len(caught.value.faults) == 2
