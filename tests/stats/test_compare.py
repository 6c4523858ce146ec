"""`compare`: the right test for the data, the verdict table, and the properties that no data may break."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from finetune.errors import ExitCode, UserError
from finetune.stats import Comparison, compare
from finetune.stats.binary import mcnemar, tango_interval
from finetune.stats.compare import decide


def arms(fixed: int, broken: int, right: int, wrong: int) -> tuple[list[float], list[float]]:
    a = [0.0] * fixed + [1.0] * broken + [1.0] * right + [0.0] * wrong
    b = [1.0] * fixed + [0.0] * broken + [1.0] * right + [0.0] * wrong
    return a, b


def test_right_or_wrong_items() -> None:
    found = compare(*arms(40, 20, 60, 40), margin=0.02)
    assert (found.n, found.fixed, found.broken, found.both_right, found.both_wrong) == (160, 40, 20, 60, 40)
    assert found.difference == pytest.approx(0.125)
    assert found.mean_b - found.mean_a == pytest.approx(0.125)
    assert (found.low, found.high) == (pytest.approx(0.03086, abs=5e-6), pytest.approx(0.21806, abs=5e-6))
    assert found.p_value == mcnemar(40, 20).mid_p
    assert (found.test, found.interval, found.clusters, found.scale) == (
        "McNemar mid-p",
        "Tango score",
        None,
        "share",
    )
    assert "discordant" in found.reason
    assert (found.verdict, found.exit_code, found.noninferiority) == ("improved", ExitCode.DONE, "pass")


@pytest.mark.parametrize(
    ("table", "margin", "verdict", "code", "noninferiority"),
    [
        ((60, 20, 500, 420), 0.02, "improved", 0, "pass"),
        ((20, 60, 500, 420), 0.02, "regressed", 10, "regressed"),
        ((10, 10, 900, 580), 0.02, "no-evidence", 12, "pass"),
        ((5, 8, 60, 27), 0.02, "inconclusive", 11, "inconclusive"),
        ((5, 8, 60, 27), None, "no-evidence", 12, None),
        ((2, 14, 4000, 3000), 0.02, "regressed", 10, "pass"),
    ],
)
def test_verdicts(
    table: tuple[int, int, int, int],
    margin: float | None,
    verdict: str,
    code: int,
    noninferiority: str | None,
) -> None:
    found = compare(*arms(*table), margin=margin)
    assert (found.verdict, int(found.exit_code), found.noninferiority) == (verdict, code, noninferiority)


def test_a_small_proven_loss_is_regressed_and_yet_within_the_margin() -> None:
    """Two questions, two answers: is there a loss (yes), is it as large as the margin (no)?"""
    found = compare(*arms(2, 14, 4000, 3000), margin=0.02)
    assert found.high < 0.0
    assert found.one_sided_low > -0.02


def test_interval_and_test_disagree_on_a_handful_of_items() -> None:
    found = compare(*arms(4, 0, 60, 36), margin=0.02)
    assert found.low > 0.0
    assert found.p_value == pytest.approx(0.0625)
    assert found.verdict == "no-evidence"
    assert compare(*arms(0, 4, 60, 36), margin=0.02).verdict == "inconclusive"


def test_decide_table() -> None:
    assert decide(0.01, 0.05, True, 0.02) == "improved"
    assert decide(0.01, 0.05, False, 0.02) == "no-evidence"
    assert decide(-0.05, -0.01, True, None) == "regressed"
    assert decide(-0.05, -0.01, False, 0.02) == "inconclusive"
    assert decide(-0.02, 0.05, False, 0.02) == "inconclusive"
    assert decide(-0.0199, 0.05, False, 0.02) == "no-evidence"
    assert decide(0.0, 0.05, True, 0.02) == "no-evidence"


def test_graded_items() -> None:
    generator = np.random.default_rng(0)
    a = generator.random(200)
    found = compare(a, np.clip(a + generator.normal(0.05, 0.1, 200), 0, 1))
    assert (found.test, found.interval) == ("paired t", "paired t interval")
    assert found.verdict == "improved"
    assert found.fixed is found.broken is found.both_right is found.both_wrong is None


def test_skewed_items_use_the_bootstrap_both_ways() -> None:
    generator = np.random.default_rng(1)
    gains = generator.exponential(0.2, 300) * (generator.random(300) < 0.1)
    forwards, backwards = compare(np.zeros(300), gains), compare(gains, np.zeros(300))
    assert forwards.test == "symmetric bootstrap-t of items (seed 0)"
    assert "skewed" in forwards.reason
    assert forwards.p_value == backwards.p_value
    assert forwards.low == pytest.approx(-backwards.high)
    assert (forwards.verdict, backwards.verdict) == ("improved", "regressed")


def test_clusters_of_right_or_wrong_items() -> None:
    """30 templates that are fixed or broken as a whole: 300 items, but the evidence of 30."""
    a, b, clusters = [], [], []
    for template in range(60):
        outcome = (0.0, 1.0) if template < 12 else (1.0, 0.0) if template < 18 else (1.0, 1.0)
        a += [outcome[0]] * 10
        b += [outcome[1]] * 10
        clusters += [f"t{template}"] * 10
    together, alone = compare(a, b, clusters=clusters), compare(a, b)
    assert alone.verdict == "improved"
    assert together.verdict == "no-evidence"
    assert together.clusters == 60
    assert together.p_value == pytest.approx(mcnemar(12, 6).mid_p, abs=1e-9)
    assert together.test == "whole-cluster McNemar mid-p"
    low, high = tango_interval(12, 6, 60)
    assert (together.low, together.high) == (pytest.approx(low, abs=0.01), pytest.approx(high, abs=0.01))
    assert (together.fixed, together.broken) == (120, 60)


def test_few_clusters_are_said_to_be_few() -> None:
    generator = np.random.default_rng(2)
    a = generator.integers(0, 2, 100)
    b = generator.integers(0, 2, 100)
    found = compare(a, b, clusters=[index // 20 for index in range(100)])
    assert found.clusters == 5
    assert found.notes[0].startswith("only 5 clusters")
    assert found.test == "whole-cluster exact McNemar"
    assert compare(a, b).notes == ()


def test_five_clusters_cannot_reject() -> None:
    found = compare([0.0] * 50, [1.0] * 50, clusters=[index // 10 for index in range(50)])
    assert found.p_value == pytest.approx(0.0625)
    assert found.verdict == "no-evidence"


@pytest.mark.parametrize("scores", [([0.0, 1.0, 0.0], [1.0, 1.0, 1.0]), ([0.1, 0.9, 0.3], [0.4, 0.9, 1.0])])
def test_one_cluster_shows_nothing(scores: tuple[list[float], list[float]]) -> None:
    found = compare(*scores, clusters=["t"] * 3, margin=0.02)
    assert (found.low, found.high, found.p_value, found.verdict) == (-1.0, 1.0, 1.0, "inconclusive")
    assert found.items_to_settle is None


def test_one_unbounded_item_is_refused() -> None:
    with pytest.raises(UserError, match="one item gives no margin"):
        compare([3.0], [5.0])
    with pytest.raises(UserError, match="finer cluster key"):
        compare([3.0, 4.0], [5.0, 7.0], clusters=["t", "t"])


def test_single_right_or_wrong_item_proves_nothing() -> None:
    found = compare([0.0], [1.0], margin=0.5)
    assert found.verdict != "improved"


def test_graded_clusters() -> None:
    generator = np.random.default_rng(3)
    clusters = np.repeat(np.arange(50), 6)
    shared = generator.normal(0, 0.2, 50)[clusters]
    a = generator.random(300)
    found = compare(a, a + shared + 0.01, clusters=clusters.tolist())
    assert found.test == "cluster-robust t"
    assert found.high - found.low > 2 * (
        compare(a, a + shared + 0.01).high - compare(a, a + shared + 0.01).low
    )
    few = compare(a[:90], (a + shared)[:90], clusters=clusters[:90].tolist())
    assert few.test == "sign-flip permutation of clusters (exact)"


def test_negated_right_or_wrong_scores_stay_right_or_wrong() -> None:
    """A metric where lower is better arrives negated."""
    a, b = arms(14, 5, 30, 51)
    negated = compare([-x for x in b], [-x for x in a])
    plain = compare(a, b)
    assert (negated.fixed, negated.broken, negated.test) == (14, 5, plain.test)
    assert negated.low == plain.low
    assert negated.mean_b == pytest.approx(-plain.mean_a)


def test_repeated_samples_are_averaged_first() -> None:
    once = compare([0.5, 1.0, 0.0], [1.0, 1.0, 0.5])
    assert compare([[0.0, 1.0], [1.0, 1.0], [0.0, 0.0]], [1.0, 1.0, 0.5]) == once


def test_cannot_tell_below() -> None:
    found = compare(*arms(10, 10, 100, 80), margin=0.02)
    assert found.least_detectable == pytest.approx(0.0623, abs=5e-4)
    assert "200 items cannot tell a difference below 6.2 points" in found.limits()
    assert "more would settle it" in found.limits()


@pytest.mark.parametrize("table", [(5, 8, 60, 27), (0, 0, 12, 8), (6, 3, 20, 11), (14, 15, 80, 41)])
def test_that_many_more_items_do_settle_it(table: tuple[int, int, int, int]) -> None:
    found = compare(*arms(*table), margin=0.02)
    assert found.verdict == "inconclusive"
    assert found.items_to_settle is not None
    times = math.ceil((found.n + found.items_to_settle) / found.n)
    later = compare(*arms(*(count * times for count in table)), margin=0.02)
    assert later.verdict != "inconclusive"


def test_more_graded_items_by_the_square_root_law() -> None:
    generator = np.random.default_rng(4)
    a, b = generator.random(60), generator.random(60)
    found = compare(a, b, margin=0.02)
    assert found.verdict == "inconclusive"
    error = (b - a).std(ddof=1) / np.sqrt(60)
    wanted = 60 * ((stats.t.ppf(0.975, 59) + stats.norm.ppf(0.8)) * error / abs(found.difference)) ** 2
    assert found.items_to_settle == math.ceil(wanted - 60)


def test_a_constant_gain_is_strong_evidence_but_not_certainty() -> None:
    found = compare([3.0] * 40, [3.5] * 40)
    assert 0.0 < found.p_value < 1e-9
    assert found.verdict == "improved"
    assert "no width" in found.notes[0]
    assert "below 0" not in found.limits()


def test_on_the_margin_no_number_settles_it() -> None:
    found = compare(*arms(10, 10, 100, 80), margin=0.0)
    assert found.verdict == "inconclusive"
    assert found.items_to_settle is None
    assert "no number of items would settle it" in found.limits()


def test_to_dict_is_strict_json() -> None:
    found = compare(*arms(3, 4, 20, 13), margin=0.02, clusters=[index % 12 for index in range(40)])
    text = json.dumps(found.to_dict(), allow_nan=False)
    back = json.loads(text)
    assert back["verdict"] == found.verdict
    assert back["limits"] == found.limits()
    assert isinstance(back["notes"], list)


def test_every_number_is_a_plain_python_number() -> None:
    generator = np.random.default_rng(5)
    for scale in (1.0, 3.0):
        for n in (9, 20, 50):
            scores = generator.random(n) * scale
            for clusters in (None, [index // 3 for index in range(n)]):
                found = compare(scores, scores[::-1].copy(), clusters=clusters, margin=0.1)
                numbers = [value for value in found.to_dict().values() if isinstance(value, (int, float))]
                assert all(type(value) in (int, float, bool) for value in numbers)
                assert all(math.isfinite(value) for value in numbers)


@pytest.mark.parametrize(
    ("a", "b", "options", "message"),
    [
        ([], [], {}, "scores of arm A are empty"),
        ([1.0], [1.0, 0.0], {}, "arm A has 1 items and arm B 2"),
        ([1.0, float("nan")], [1.0, 0.0], {}, "1 of 2 scores of arm A are not finite"),
        ([1.0, 0.0], [1.0, 0.0], {"margin": -0.1}, "margin -0.1"),
        ([1.0, 0.0], [1.0, 0.0], {"margin": float("nan")}, "margin nan"),
        ([1.0, 0.0], [1.0, 0.0], {"margin": 2.0}, "for 2 points write 0.02"),
        ([1.0, 0.0], [1.0, 0.0], {"seed": -1}, "seed -1"),
        ([1e308, -1e308], [-1e308, 1e308], {}, "reach 1e[+]308, too large"),
        ([1.0, 0.0], [1.0, 0.0], {"confidence": 1.0}, "confidence 1.0"),
        ([1.0, 0.0], [1.0, 0.0], {"clusters": ["a"]}, "1 cluster labels for 2 items"),
    ],
)
def test_bad_input(a: list[float], b: list[float], options: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        compare(a, b, **options)  # type: ignore[arg-type]


BINARY = st.lists(
    st.tuples(st.sampled_from([0.0, 1.0]), st.sampled_from([0.0, 1.0])), min_size=1, max_size=60
)
SHARES = st.integers(0, 20).map(lambda twentieths: twentieths / 20)
GRADED = st.lists(st.tuples(SHARES, SHARES), min_size=2, max_size=45)
EITHER = st.one_of(BINARY, GRADED)


def _clusters(n: int, grouped: bool) -> list[int] | None:
    return [index // 3 for index in range(n)] if grouped else None


@settings(max_examples=40, deadline=None)
@given(EITHER, st.booleans())
def test_identical_arms(pairs: list[tuple[float, float]], grouped: bool) -> None:
    a = [one for one, _ in pairs]
    found = compare(a, a, clusters=_clusters(len(a), grouped), margin=0.02)
    assert (found.difference, found.p_value) == (0.0, 1.0)
    assert found.low < 0.0 < found.high
    assert found.verdict in ("no-evidence", "inconclusive")


@settings(max_examples=80, deadline=None)
@given(EITHER, st.booleans())
def test_swapping_the_arms_negates(pairs: list[tuple[float, float]], grouped: bool) -> None:
    a, b = [one for one, _ in pairs], [two for _, two in pairs]
    clusters = _clusters(len(a), grouped)
    forwards, backwards = compare(a, b, clusters=clusters), compare(b, a, clusters=clusters)
    assert forwards.difference == pytest.approx(-backwards.difference, abs=1e-12)
    assert forwards.low == pytest.approx(-backwards.high, abs=1e-9)
    assert forwards.high == pytest.approx(-backwards.low, abs=1e-9)
    assert forwards.p_value == pytest.approx(backwards.p_value, abs=1e-9)
    assert (forwards.fixed, forwards.broken) == (backwards.broken, backwards.fixed)
    mirror = {"improved": "regressed", "regressed": "improved", "no-evidence": "no-evidence"}
    assert mirror[forwards.verdict] == backwards.verdict


@settings(max_examples=40, deadline=None)
@given(EITHER, st.booleans(), st.randoms(use_true_random=False))
def test_order_of_items_changes_nothing(
    pairs: list[tuple[float, float]], grouped: bool, random: object
) -> None:
    labels = _clusters(len(pairs), grouped)
    rows = list(zip(pairs, labels or range(len(pairs)), strict=True))
    shuffled = list(rows)
    random.shuffle(shuffled)  # type: ignore[attr-defined]

    def run(order: list[tuple[tuple[float, float], int]]) -> Comparison:
        clusters = [f"c{label}" for _, label in order] if grouped else None
        return compare(
            [pair[0] for pair, _ in order], [pair[1] for pair, _ in order], clusters=clusters, margin=0.05
        )

    assert run(shuffled) == run(rows)


@settings(max_examples=40, deadline=None)
@given(EITHER, st.booleans())
def test_estimate_lies_in_its_interval(pairs: list[tuple[float, float]], grouped: bool) -> None:
    found = compare(
        [one for one, _ in pairs],
        [two for _, two in pairs],
        clusters=_clusters(len(pairs), grouped),
        margin=0.02,
    )
    assert -1.0 <= found.low <= found.difference + 1e-9
    assert found.difference - 1e-9 <= found.high <= 1.0
    assert found.low <= found.one_sided_low + 1e-9
    assert 0.0 < found.p_value <= 1.0
    assert 0.0 < found.least_detectable <= 1.0
    if found.verdict in ("improved", "regressed"):
        assert found.p_value <= 0.05 + 1e-12


def test_rounding_of_scores_is_no_evidence() -> None:
    """Two machines, or two orders of a sum, give scores that differ in their last digit."""
    rng = np.random.default_rng(1)
    a = rng.random(40)
    same, noisy = compare(a, a, margin=1e-4), compare(a, a + rng.choice([0.0, 1.1e-16], 40), margin=1e-4)
    assert same.verdict == noisy.verdict == "inconclusive"
    assert (noisy.p_value, noisy.difference) == (1.0, 0.0)
    assert (noisy.low, noisy.high) == pytest.approx((same.low, same.high))


@pytest.mark.parametrize(("one", "other"), [(0.5, 0.7), (0.1, 0.3), (0.3, 0.9)])
@pytest.mark.parametrize("n", [5, 50, 777])
def test_a_difference_that_is_always_the_same_leaves_an_interval(one: float, other: float, n: int) -> None:
    found = compare([one] * n, [other] * n)
    assert found.difference == pytest.approx(other - one, abs=1e-9)
    assert found.high - found.low > 1e-3
    steps = np.arange(n) / (10.0 * n)
    assert compare(one + steps, other + steps).high - found.difference > 5e-4
