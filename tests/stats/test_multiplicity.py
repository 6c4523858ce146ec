"""Corrections for many looks, against the example of Benjamini & Hochberg and against statsmodels."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from statsmodels.stats.multitest import multipletests

from finetune.errors import UserError
from finetune.stats.multiplicity import METHODS, adjust, explain

BENJAMINI_HOCHBERG_1995 = [
    0.0001, 0.0004, 0.0019, 0.0095, 0.0201, 0.0278, 0.0298, 0.0344, 0.0459, 0.324, 0.4262, 0.5719, 0.6528, 0.759, 1.0,
]  # fmt: skip


@pytest.mark.parametrize(("method", "rejected"), [("bh", 4), ("holm", 3), ("bonferroni", 3)])
def test_benjamini_hochberg_1995(method: str, rejected: int) -> None:
    assert sum(p <= 0.05 for p in adjust(BENJAMINI_HOCHBERG_1995, method)) == rejected  # type: ignore[arg-type]


@given(st.lists(st.floats(0, 1), min_size=1, max_size=30))
def test_against_statsmodels(p_values: list[float]) -> None:
    for ours, theirs in (("holm", "holm"), ("bh", "fdr_bh"), ("bonferroni", "bonferroni")):
        expected = multipletests(p_values, method=theirs)[1].tolist()
        assert adjust(p_values, ours) == pytest.approx(expected)  # type: ignore[arg-type]


def test_all_must_pass_needs_no_correction_and_says_so() -> None:
    assert adjust([0.04, 0.2], "all-must-pass") == [0.04, 0.2]
    assert "no correction is needed" in explain("all-must-pass")
    assert all(explain(method) for method in METHODS)


def test_edges() -> None:
    assert adjust([], "holm") == []
    assert adjust([0.03], "holm") == [0.03]
    with pytest.raises(UserError, match="between 0 and 1"):
        adjust([0.5, float("nan")])
    with pytest.raises(UserError, match="unknown correction"):
        adjust([0.5], "sidak")  # type: ignore[arg-type]
