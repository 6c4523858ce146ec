"""Agreement and kappa against hand-made tables, with intervals that stay honest when every pair agrees."""

from __future__ import annotations

import pytest

from finetune.stats.agreement import agreement, cohens_kappa


def test_kappa_by_hand() -> None:
    pairs = [("a", "a")] * 20 + [("b", "b")] * 15 + [("a", "b")] * 5 + [("b", "a")] * 10
    assert cohens_kappa(pairs) == pytest.approx(0.4)  # observed 0.7, chance 0.5
    assert cohens_kappa([("a", "a")]) is None
    assert cohens_kappa([]) is None


def test_both_come_with_intervals() -> None:
    pairs = [(True, True)] * 40 + [(False, False)] * 30 + [(True, False)] * 5 + [(False, True)] * 5
    found = agreement(pairs)
    assert (found.n, found.agreed, found.agreement) == (80, 70, 0.875)
    assert found.low < 0.875 < found.high  # type: ignore[operator]
    # Cohen (1960): the standard error is √(p(1 - p)/n) / (1 - chance) = 0.075
    assert found.kappa == pytest.approx(0.746, abs=1e-3)
    assert found.kappa_low == pytest.approx(0.746 - 1.96 * 0.075, abs=0.03)
    assert found.kappa_high == pytest.approx(0.746 + 1.96 * 0.075, abs=0.03)
    assert agreement(pairs) == found  # seeded


def test_perfect_agreement_of_a_few_is_not_certainty() -> None:
    few = agreement([(True, True)] * 3 + [(False, False)] * 3)
    many = agreement([(True, True)] * 60 + [(False, False)] * 60)
    assert few.kappa == many.kappa == 1.0
    assert few.kappa_low is not None and few.kappa_low < 0.5
    assert many.kappa_low is not None and many.kappa_low > 0.9


def test_one_label_shows_no_skill_and_nothing_shows_nothing() -> None:
    same = agreement([(True, True)] * 30)
    assert (same.agreement, same.kappa, same.kappa_low) == (1.0, None, None)
    assert agreement([]).agreement is None


def test_pairs_of_one_item_are_not_independent() -> None:
    pairs = [(True, True)] * 30 + [(False, False)] * 30 + [(True, False)] * 20
    alone = agreement(pairs)
    together = agreement(pairs, clusters=[place // 10 for place in range(80)])
    assert together.kappa_high - together.kappa_low > alone.kappa_high - alone.kappa_low  # type: ignore[operator]
