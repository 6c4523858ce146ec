"""Numbers as the page prints them."""

from __future__ import annotations

import pytest

from finetune.report.numbers import Unit, finite, p_value, significant, unit_of, whole


@pytest.mark.parametrize("value", [None, "nan", "3", True, float("nan"), float("inf"), -float("inf"), [], {}])
def test_what_is_no_finite_number_is_missing_and_never_zero(value: object) -> None:
    assert finite(value) is None
    assert whole(value) is None
    assert significant(value) is None
    assert p_value(value) is None
    for unit in (Unit(is_share=True), Unit(is_share=False), Unit(is_share=False, decimals=2)):
        assert unit.value(value) is None
        assert unit.difference(value) is None
        assert unit.size(value) is None
        assert unit.interval(0.1, value) is None
        assert unit.range(value, 0.1) is None


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.0002134, "2.13e\u22124"),
        (0.5, "0.500"),
        (1234.5, "1,230"),
        (-2.345, "\u22122.35"),
        (3e12, "3e12"),
    ],
)
def test_significant_digits(value: float, text: str) -> None:
    assert significant(value) == text


def test_a_p_value_is_never_printed_as_zero_or_above_one() -> None:
    assert p_value(0.0) == "p\u00a0<\u00a00.001"
    assert p_value(0.0404) == "p\u00a0=\u00a00.040"
    assert p_value(1.0000001) == "p\u00a0=\u00a01.000"


def test_shares_are_points_and_open_ended_metrics_are_bare() -> None:
    share = unit_of("exact_match", [0.613, 0.539, 0.682, 0.02])
    assert share.difference(0.613) == "+61.3\u00a0points"
    assert share.interval(-0.02, 0.682) == "\u22122.0 to +68.2"
    assert share.size(-0.04) == "4.0\u00a0points"
    assert share.difference(0.0) == "0.0\u00a0points"
    nll = unit_of("nll_per_token", [0.021, -0.004, 0.046])
    assert nll.interval(-0.004, 0.046) == "\u22120.0040 to +0.0460"
    assert unit_of("score", [12.5, 14.0]).value(12.5) == "12.5"


def test_a_level_and_its_interval_have_the_same_digits() -> None:
    unit = unit_of("perplexity", [8.125, 7.9, 8.4])
    assert unit.value(8.125) == "8.12"
    assert unit.range(7.9, 8.4) == "7.90–8.40"
    assert unit_of("valid_json", [0.5]).range(0.4, 0.6) == "40.0–60.0\u00a0%"
