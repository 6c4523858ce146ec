"""Power: published sample sizes, the exact power by enumeration, and the traps of other tools."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats
from statsmodels.stats.power import TTestPower
from statsmodels.stats.proportion import power_proportions_2indep, samplesize_proportions_2indep_onetail

from finetune.errors import UserError
from finetune.stats.binary import mcnemar_mid_p
from finetune.stats.plan import ASSUMED_DISCORDANCE, plan_power
from finetune.stats.power import (
    cluster_design,
    items_needed_mean,
    items_needed_noninferiority,
    items_needed_paired,
    items_needed_unpaired,
    least_detectable_mean,
    least_detectable_paired,
    least_detectable_unpaired,
    power_mean,
    power_paired,
    power_unpaired,
)


def test_unpaired_two_points() -> None:
    assert items_needed_unpaired(0.70, 0.72, pooled=False) == 8077
    assert items_needed_unpaired(0.70, 0.72) == 8080


def test_unpaired_is_two_sided_whatever_a_name_says() -> None:
    """statsmodels' '…_onetail' is two-sided by default: its alpha must be .05, not .025, for the same question."""
    theirs = samplesize_proportions_2indep_onetail(0.02, 0.70, 0.80, alpha=0.05)
    assert abs(items_needed_unpaired(0.70, 0.72) - theirs) < 2
    halved = samplesize_proportions_2indep_onetail(0.02, 0.70, 0.80, alpha=0.025)
    assert halved == pytest.approx(9784, abs=1)


@pytest.mark.parametrize(
    ("discordance", "n"), [(0.05, 979), (0.10, 1960), (0.15, 2941), (0.20, 3923), (0.30, 5885), (0.412, 8082)]
)
def test_paired_two_points(discordance: float, n: int) -> None:
    assert items_needed_paired(0.02, discordance) == n
    assert items_needed_paired(-0.02, discordance) == n


def test_pairing_is_worth_nothing_at_the_discordance_of_independent_answers() -> None:
    """0.7·0.28 + 0.3·0.72 = 41.2 % discordant when the arms answer independently: as many items as unpaired."""
    assert abs(items_needed_paired(0.02, 0.412) - items_needed_unpaired(0.70, 0.72)) < 10


@pytest.mark.parametrize(("n", "points"), [(200, 6.2), (500, 3.9), (1000, 2.8), (2000, 2.0)])
def test_least_detectable_at_ten_percent_discordant(n: int, points: float) -> None:
    assert 100 * least_detectable_paired(n, 0.10) == pytest.approx(points, abs=0.06)


@pytest.mark.parametrize(("discordance", "n"), [(0.05, 773), (0.10, 1546), (0.20, 3092)])
def test_noninferiority_two_points(discordance: float, n: int) -> None:
    assert items_needed_noninferiority(0.02, discordance) == n


def test_connor_1987() -> None:
    assert items_needed_paired(0.40, 0.50) == 23


def test_miller_2024() -> None:
    assert items_needed_mean(0.03, 1 / 9) == 969
    assert (
        items_needed_mean(0.03, 1 / 9, sampling_variance_a=1 / 6, sampling_variance_b=1 / 6, samples=3)
        == 1938
    )


def test_least_detectable_is_the_inverse() -> None:
    for n, discordance in ((150, 0.2), (3000, 0.07)):
        effect = least_detectable_paired(n, discordance)
        assert items_needed_paired(effect * (1 + 1e-9), discordance) <= n
        assert items_needed_paired(effect * 0.999, discordance) > n
    assert items_needed_unpaired(0.7, 0.7 + least_detectable_unpaired(8077, 0.7), pooled=False) == 8077


def test_a_pilot_without_discordant_items_still_gives_a_limit() -> None:
    both = stats.norm.ppf(0.975) + stats.norm.ppf(0.8)
    assert least_detectable_paired(200, 0.0) == pytest.approx(both**2 / 200, rel=0.02)
    assert least_detectable_paired(2, 0.0) == 1.0


def enumerated_power(n: int, effect: float, discordance: float) -> float:
    total = 0.0
    for fixed in range(n + 1):
        for broken in range(n + 1 - fixed):
            if mcnemar_mid_p(fixed, broken) <= 0.05:
                shares = [(discordance + effect) / 2, (discordance - effect) / 2, 1 - discordance]
                total += stats.multinomial.pmf([fixed, broken, n - fixed - broken], n, shares)
    return total


@pytest.mark.parametrize(("n", "effect", "discordance"), [(20, 0.2, 0.3), (30, 0.0, 0.4), (35, -0.1, 0.15)])
def test_exact_power_by_enumeration(n: int, effect: float, discordance: float) -> None:
    assert power_paired(n, effect, discordance) == pytest.approx(
        enumerated_power(n, effect, discordance), abs=1e-9
    )


def test_exact_and_approximate_power_meet() -> None:
    assert power_paired(20_000, 0.005, 0.05) == pytest.approx(power_paired(20_001, 0.005, 0.05), abs=0.002)
    assert power_paired(100, 0.0, 0.0) == 0.0


def test_planned_items_have_the_wished_power() -> None:
    for discordance in (0.05, 0.2, 0.4):
        n = items_needed_paired(0.02, discordance)
        assert power_paired(n, 0.02, discordance) == pytest.approx(0.8, abs=0.02)
    assert power_unpaired(8080, 0.70, 0.72) == pytest.approx(0.8, abs=1e-3)
    assert power_mean(969, 0.03, 1 / 3) == pytest.approx(0.8, abs=2e-3)


def test_t_power_against_statsmodels() -> None:
    assert power_mean(40, 0.3, 1.0) == pytest.approx(TTestPower().power(0.3, 40, 0.05), abs=1e-6)
    assert power_mean(40, -0.3, 1.0) == power_mean(40, 0.3, 1.0)
    assert power_mean(10_000, 5.0, 1.0) == 1.0


def test_unpaired_power_against_statsmodels() -> None:
    theirs = power_proportions_2indep(0.05, 0.60, 500, alpha=0.05, return_results=False)
    assert power_unpaired(500, 0.60, 0.65) == pytest.approx(theirs, abs=1e-3)


def test_clusters_cost_power() -> None:
    even, odd = cluster_design([10] * 30, 0.2), cluster_design([1] * 15 + [19] * 15, 0.2)
    assert even.design_effect == pytest.approx(1 + 9 * 0.2)
    assert even.degrees_of_freedom == pytest.approx(29.0)
    assert odd.design_effect > even.design_effect
    assert odd.degrees_of_freedom < 29.0
    powers = [power_paired(300, 0.08, 0.3, design=design) for design in (None, even, odd)]
    assert powers[0] > powers[1] > powers[2]
    independent = cluster_design([1] * 400, 0.5)
    assert power_mean(400, 0.1, 0.6, design=independent) == pytest.approx(power_mean(400, 0.1, 0.6))


def test_design_effect_multiplies_items() -> None:
    assert items_needed_paired(0.02, 0.1, design_effect=2.0) == pytest.approx(2 * 1960, abs=1)
    assert least_detectable_paired(4000, 0.1, design_effect=2.0) == pytest.approx(
        least_detectable_paired(2000, 0.1), rel=1e-3
    )


def test_least_detectable_mean() -> None:
    expected = (stats.t.ppf(0.975, 49) + stats.t.ppf(0.8, 49)) * 0.01
    assert least_detectable_mean(0.01, 49) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: items_needed_paired(0.0, 0.1), "effect of 0"),
        (lambda: items_needed_paired(0.2, 0.1), "at least that share of discordant"),
        (lambda: items_needed_paired(0.02, 10), "discordance 10 must lie between 0 and 1"),
        (lambda: items_needed_paired(0.02, 0.1, power=80), "must lie between 0 and 1"),
        (lambda: items_needed_unpaired(0.7, 0.7), "effect of 0"),
        (lambda: items_needed_noninferiority(0.0, 0.1), "cannot be shown"),
        (lambda: items_needed_noninferiority(0.02, 0.1, true_difference=-0.03), "cannot be shown"),
        (lambda: items_needed_mean(0.0, 1.0), "effect of 0"),
        (lambda: items_needed_mean(0.1, -1.0), "must not be negative"),
        (lambda: power_paired(100, 0.2, 0.1), "at least that share of discordant"),
        (lambda: power_mean(1, 0.1, 1.0), "at least 2 items"),
        (lambda: cluster_design([5], 0.1), "at least 2 clusters"),
        (lambda: cluster_design([5, 5], 2.0), "intra-cluster correlation 2"),
        (lambda: plan_power(effect=1e-300), "effect 1e-300"),
        (lambda: plan_power(effect=float("nan")), "effect nan"),
        (lambda: plan_power(effect=0.02, margin=float("nan")), "margin nan"),
        (lambda: plan_power(effect=0.02, margin=2.0), "margin 2.0"),
        (lambda: plan_power(effect=0.02, icc=-1.0), "icc -1"),
        (lambda: plan_power(effect=0.02, accuracy=1.2), "accuracy 1.2"),
        (lambda: plan_power(effect=0.02, icc=float("nan"), cluster_size=5), "icc nan"),
        (lambda: plan_power(effect=0.02, alpha=1e-300), "alpha 1e-300 is too small"),
    ],
)
def test_bad_questions(call: object, message: str) -> None:
    with pytest.raises(UserError, match=message):
        call()  # type: ignore[operator]


def test_plan_side_by_side() -> None:
    plan = plan_power(effect=0.02, discordance=0.1, items=500, margin=0.02)
    assert (plan.items_paired, plan.items_unpaired_per_arm, plan.items_noninferiority) == (1960, 8080, 1546)
    assert plan.least_detectable_paired == pytest.approx(least_detectable_paired(500, 0.1))
    assert plan.power_paired == pytest.approx(power_paired(500, 0.02, 0.1))
    assert plan.warning is not None
    assert "too few" in plan.warning
    assert "500 items cannot tell a difference below 4.0 points paired" in "\n".join(plan.lines())
    assert plan_power(effect=0.02, discordance=0.1, items=3000).warning is None


def test_plan_without_a_pilot_says_what_it_assumes() -> None:
    plan = plan_power(effect=0.02)
    assert (plan.discordance, plan.assumed_discordance) == (ASSUMED_DISCORDANCE, True)
    assert "assumed" in plan.lines()[1]
    assert plan_power(effect=0.3).discordance == 0.3


def test_plan_at_the_ends_of_the_scale() -> None:
    plan = plan_power(effect=0.02, discordance=0.1, accuracy=0.99, items=100)
    assert plan.items_unpaired_per_arm is None
    assert plan.power_unpaired is None
    assert "unpaired  not possible" in "\n".join(plan.lines())
    with pytest.raises(UserError, match="write two points"):
        plan_power(effect=2)


def test_plan_with_clusters() -> None:
    plan = plan_power(effect=0.02, discordance=0.1, items=1000, cluster_size=5, icc=0.25)
    assert plan.design_effect == 2.0
    assert plan.items_paired == pytest.approx(2 * 1960, abs=1)
    assert plan.power_paired is not None
    assert plan.power_paired < power_paired(1000, 0.02, 0.1)
    assert any("clusters make 2.00 times" in line for line in plan.lines())


def test_power_grows_with_items() -> None:
    powers = [power_paired(n, 0.05, 0.2) for n in (50, 100, 200, 400, 800)]
    assert np.all(np.diff(powers) > 0)
