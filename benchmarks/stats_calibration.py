"""Do the statistics keep their word? Simulated comparisons with a known truth, through the code that judges real runs.

    python benchmarks/stats_calibration.py [--simulations 10000] [--seed 1] [--only TEXT] [--json FILE]

For each scenario: false positives (verdict 'improved' or 'regressed' when the arms are equally good), coverage of the 95 %
interval with and without a true difference, power against what `finetune.stats.power` predicts. Targets: false positives
at most 5.5 %, coverage 94-96.5 % from 100 items, power within 2 points. A scenario that misses one is marked '!'
with the reason where one is known; nothing is left out. Every scenario also runs its first comparisons through `compare` itself and
demands the same numbers. One file on purpose: a scenario, how it is judged and what is printed are read together.

Shapes: scores and differences are [simulations, items]; totals of clusters are [simulations, clusters].
"""

from __future__ import annotations

import argparse
import json
import math
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from finetune.stats.binary import mcnemar_mid_p, tango_interval
from finetune.stats.bootstrap import RESAMPLES, bootstrap_p_value, bootstrap_statistics, critical_value
from finetune.stats.clusters import UnitTotals, effective_items, robust_mean, skewness
from finetune.stats.compare import compare
from finetune.stats.distributions import FloatArray, t_quantile
from finetune.stats.estimate import FEW_CLUSTERS, FEW_UNITS, score_bounds, student_p_value, use_bootstrap
from finetune.stats.power import cluster_design, least_detectable_paired, power_mean, power_paired
from finetune.stats.sequential import EProcess
from finetune.stats.signflip import sign_flip_p_value

ALPHA = 0.05
MOST_FALSE_POSITIVES = 0.055
COVERAGE = (0.94, 0.965)
POWER_POINTS = 0.02
FROM_ITEMS = 100  # coverage is promised from here
CHECKED = 20  # comparisons of each scenario repeated through compare()
FEW_NOTE = "10 clusters: their sums are not yet normal, and the plan is approximate"
MOST_CELLS = 4_000_000  # scores drawn at a time


@dataclass
class Judged:
    """What the production code says about each simulated comparison; arrays of shape [simulations]."""

    difference: FloatArray
    low: FloatArray
    high: FloatArray
    p_value: FloatArray
    one_sided_low: FloatArray

    def positive(self) -> FloatArray:
        """1 where the verdict is improved or regressed: the interval excludes 0 and the test agrees."""
        return np.asarray(
            ((self.low > 0) | (self.high < 0)) & (self.p_value <= 1 - (1 - ALPHA)), dtype=np.float64
        )

    def covers(self, truth: float) -> FloatArray:
        return np.asarray((self.low <= truth + 1e-12) & (self.high >= truth - 1e-12), dtype=np.float64)


@dataclass
class Draw:
    """One block of simulated comparisons: differences [simulations, items] in {-1, 0, 1} or graded, cluster of each item."""

    differences: FloatArray
    sizes: Any = None  # [clusters]: the clusters are runs of consecutive items


@dataclass
class Scenario:
    """`draw(generator, simulations, shifted)` makes data without (False) or with (True) a true difference of `effect`."""

    name: str
    n: int
    binary: bool
    effect: float
    predicted_power: float | None
    draw: Callable[[np.random.Generator, int, bool], Draw]
    note: str = ""


@dataclass
class Result:
    name: str
    n: int
    false_positives: float
    coverage_null: float
    coverage_effect: float
    effect: float
    power: float
    predicted_power: float | None
    misses: list[str] = field(default_factory=list)
    note: str = ""


# ---- judging, vectorised over simulations, with the functions that `compare` uses ----


def judge(draw: Draw, *, binary: bool) -> Judged:
    """Every comparison of a block; the choice of method repeats finetune/stats/estimate.py and is checked against it."""
    if binary and draw.sizes is None:
        return _judge_independent_binary(draw.differences)
    totals = _totals(draw)
    return _judge_clustered_binary(draw, totals) if binary else _judge_graded(draw, totals)


def _totals(draw: Draw) -> UnitTotals:
    if draw.sizes is None:
        ordered = np.sort(draw.differences, axis=-1)
        return UnitTotals(ordered, np.ones(ordered.shape[-1]), ordered**2)
    starts = np.concatenate(([0], np.cumsum(draw.sizes)[:-1]))
    sums = np.add.reduceat(draw.differences, starts, axis=-1)
    squares = np.add.reduceat(draw.differences**2, starts, axis=-1)
    sizes = np.broadcast_to(draw.sizes.astype(np.float64), sums.shape)
    order = np.lexsort((squares, sums, sizes), axis=-1)
    return UnitTotals(*(np.take_along_axis(values, order, axis=-1) for values in (sums, sizes, squares)))


def _judge_independent_binary(differences: FloatArray) -> Judged:
    n = differences.shape[-1]
    cells = np.stack([(differences > 0).sum(axis=-1), (differences < 0).sum(axis=-1)], axis=-1)
    tables, which = np.unique(cells, axis=0, return_inverse=True)
    fixed, broken = tables[:, 0].astype(np.float64), tables[:, 1].astype(np.float64)
    low, high = tango_interval(fixed, broken, n)
    bound, _ = tango_interval(fixed, broken, n, confidence=1 - 2 * ALPHA)
    columns = ((fixed - broken) / n, low, high, mcnemar_mid_p(fixed, broken), bound)
    return Judged(*(np.asarray(column)[which.ravel()] for column in columns))


def _judge_clustered_binary(draw: Draw, totals: UnitTotals) -> Judged:
    n = draw.differences.shape[-1]
    fixed, broken = (draw.differences > 0).mean(axis=-1), (draw.differences < 0).mean(axis=-1)
    robust = robust_mean(totals)
    spread = np.maximum(fixed + broken - robust.mean**2, 0.0)
    items = effective_items(spread, robust.standard_error, n, robust.units)
    low, high = score_bounds(fixed, broken, items, robust.degrees_of_freedom, 1 - ALPHA / 2)
    bound, _ = score_bounds(fixed, broken, items, robust.degrees_of_freedom, 1 - ALPHA)
    mid = robust.units >= FEW_CLUSTERS
    p_values = np.array([sign_flip_p_value(row, mid=mid)[0] for row in totals.sums])
    return Judged(fixed - broken, low, high, p_values, bound)


def _judge_graded(draw: Draw, totals: UnitTotals) -> Judged:
    robust = robust_mean(totals)
    two = t_quantile(1 - ALPHA / 2, robust.degrees_of_freedom) * np.ones_like(robust.mean)
    one = t_quantile(1 - ALPHA, robust.degrees_of_freedom) * np.ones_like(robust.mean)
    p_values = np.array(student_p_value(robust))
    skewed = np.array([use_bootstrap(robust.units, skew) for skew in skewness(totals)])
    rows = max(1, 4_000_000 // RESAMPLES)
    for chosen in np.array_split(np.flatnonzero(skewed), max(1, math.ceil(skewed.sum() / rows))):
        if chosen.size:
            sizes = totals.sizes if totals.sizes.ndim == 1 else totals.sizes[chosen]
            statistics = bootstrap_statistics(UnitTotals(totals.sums[chosen], sizes, totals.squares[chosen]))
            two[chosen], one[chosen] = (
                critical_value(statistics, 1 - ALPHA),
                critical_value(statistics, 1 - 2 * ALPHA),
            )
            p_values[chosen] = bootstrap_p_value(
                statistics, robust.mean[chosen] / robust.standard_error[chosen]
            )
    if robust.units < FEW_UNITS:
        p_values = np.array([sign_flip_p_value(row)[0] for row in totals.sums])
    half = two * robust.standard_error
    return Judged(
        robust.mean,
        robust.mean - half,
        robust.mean + half,
        p_values,
        robust.mean - one * robust.standard_error,
    )


def check_against_compare(draw: Draw, judged: Judged, *, binary: bool) -> None:
    """The first comparisons again through `compare`: the same difference, interval and p-value, or the benchmark stops."""
    labels = None if draw.sizes is None else np.repeat(np.arange(len(draw.sizes)), draw.sizes).tolist()
    for index, differences in enumerate(draw.differences[:CHECKED]):
        # scores beyond [0, 1] keep `compare` from cutting the interval at the ends of the scale
        a = (differences < 0).astype(float) if binary else np.full(len(differences), 5.0)
        said = compare(a, a + differences, clusters=labels, confidence=1 - ALPHA)
        ours = [
            getattr(judged, name)[index] for name in ("difference", "low", "high", "p_value", "one_sided_low")
        ]
        theirs = [said.difference, said.low, said.high, said.p_value, said.one_sided_low]
        if not np.allclose(ours, theirs, rtol=1e-6, atol=1e-9):
            raise SystemExit(f"the vectorised judgement differs from compare(): {ours} against {theirs}")


# ---- scenarios ----


def binary_scenario(n: int, discordance: float) -> Scenario:
    effect = min(least_detectable_paired(n, discordance), 0.9 * discordance)

    def draw(generator: np.random.Generator, simulations: int, shifted: bool) -> Draw:
        up = 0.5 * (1 + effect / discordance) if shifted else 0.5
        fixed = generator.binomial(n, discordance, simulations)
        gains = generator.binomial(fixed, up)
        position = np.arange(n)
        return Draw(np.where(position < gains[:, None], 1.0, np.where(position < fixed[:, None], -1.0, 0.0)))

    predicted = power_paired(n, effect, discordance)
    few = n * discordance < 4
    note = "about 2 discordant items: an interval of so few outcomes over-covers" if few else ""
    return Scenario(f"binary, {discordance:.0%} discordant", n, True, effect, predicted, draw, note)


def clustered_binary_scenario(
    clusters: int, size: int, discordance: float, *, direction: float, equal: bool
) -> Scenario:
    """Discordant items of one cluster lean the same way: P(fixed | discordant) ~ Beta with this concentration."""
    sizes = np.full(clusters, size) if equal else unequal_sizes(clusters, size)
    n = int(sizes.sum())

    def correlation(up: float) -> float:
        variance = discordance - (discordance * (2 * up - 1)) ** 2
        return discordance**2 * 4 * up * (1 - up) / (direction + 1) / variance

    def inflation(up: float) -> float:
        return 1 + (float((sizes**2).sum()) / n - 1) * correlation(up)

    effect = min(2.8 * math.sqrt(inflation(0.6) * discordance / n), 0.7 * discordance)
    shifted_up = 0.5 * (1 + effect / discordance)

    def draw(generator: np.random.Generator, simulations: int, shifted: bool) -> Draw:
        up = shifted_up if shifted else 0.5
        lean = generator.beta(direction * up, direction * (1 - up), (simulations, clusters))
        chance = np.repeat(lean, sizes, axis=1)
        sign = np.where(generator.random((simulations, n)) < chance, 1.0, -1.0)
        return Draw(np.where(generator.random((simulations, n)) < discordance, sign, 0.0), sizes)

    predicted = power_paired(
        n, effect, discordance, design=cluster_design(sizes.tolist(), correlation(shifted_up))
    )
    shape = "equal" if equal else "unequal"
    name = f"binary, {clusters} {shape} clusters, {discordance:.0%} discordant, ICC {correlation(0.5):.2f}"
    return Scenario(name, n, True, effect, predicted, draw, FEW_NOTE if clusters < 20 else "")


def whole_cluster_scenario(clusters: int, size: int, discordance: float) -> Scenario:
    """Templates that are fixed or broken as a whole: the evidence is that of the clusters, not of the items."""
    n, sizes = clusters * size, np.full(clusters, size)
    effect = min(least_detectable_paired(clusters, discordance), 0.8 * discordance)

    def draw(generator: np.random.Generator, simulations: int, shifted: bool) -> Draw:
        up = 0.5 * (1 + effect / discordance) if shifted else 0.5
        sign = np.where(generator.random((simulations, clusters)) < up, 1.0, -1.0)
        moved = generator.random((simulations, clusters)) < discordance
        return Draw(np.repeat(np.where(moved, sign, 0.0), size, axis=1), sizes)

    few = clusters * discordance
    note = f"{few:.0f} discordant clusters carry all the information" if few < 15 else ""
    name = f"binary, {clusters} clusters that move as one, {discordance:.0%} discordant"
    return Scenario(name, n, True, effect, power_paired(clusters, effect, discordance), draw, note)


def graded_scenario(n: int) -> Scenario:
    """Ties: scores in quarters, seven items in ten unchanged."""
    values, weights = np.array([-0.5, -0.25, 0.0, 0.25, 0.5]), np.array([0.05, 0.1, 0.7, 0.1, 0.05])
    deviation = math.sqrt(float((weights * values**2).sum()))
    lean = min(0.9, 2.8 * deviation / math.sqrt(n) / float((weights * np.abs(values)).sum()))
    effect = lean * float((weights * np.abs(values)).sum())

    def draw(generator: np.random.Generator, simulations: int, shifted: bool) -> Draw:
        chances = weights * (1 + (lean if shifted else 0.0) * np.sign(values))
        return Draw(generator.choice(values, size=(simulations, n), p=chances))

    predicted = power_mean(n, effect, math.sqrt(deviation**2 - effect**2))
    note = "9 changed items are not yet normal" if n <= 30 else ""
    return Scenario("graded, 70 % ties", n, False, effect, predicted, draw, note)


def skewed_scenario(n: int, changed: float) -> Scenario:
    """Few items change, by exponential amounts; the null flips their signs, the alternative keeps mostly gains."""
    scale, up = 0.3, 0.9
    effect = changed * scale * (2 * up - 1)

    def draw(generator: np.random.Generator, simulations: int, shifted: bool) -> Draw:
        amount = generator.exponential(scale, (simulations, n)) * (
            generator.random((simulations, n)) < changed
        )
        sign = np.where(generator.random((simulations, n)) < (up if shifted else 0.5), 1.0, -1.0)
        return Draw(amount * sign)

    few = n * changed <= 30
    note = (
        f"{n * changed:.0f} changed items carry all the information: cautious when the arms are equal"
        if few
        else ""
    )
    return Scenario(f"skewed, {changed:.0%} of items change", n, False, effect, None, draw, note)


def asymmetric_scenario(n: int) -> Scenario:
    """Equal means without symmetry: many small gains paid for by few large losses (scaled Beta draws)."""
    effect = 0.03

    def draw(generator: np.random.Generator, simulations: int, shifted: bool) -> Draw:
        kind = generator.random((simulations, n))
        gain, loss = generator.beta(1, 3, (simulations, n)), generator.beta(3, 1, (simulations, n))
        change = np.where(kind < 0.3, gain, np.where(kind < 0.4, -loss, 0.0))
        return Draw(change + (effect if shifted else 0.0))

    return Scenario("asymmetric, equal means", n, False, effect, None, draw)


def clustered_graded_scenario(clusters: int, size: int, *, equal: bool, correlation: float = 0.2) -> Scenario:
    """Normal cluster and item effects, rounded to tenths."""
    sizes = np.full(clusters, size) if equal else unequal_sizes(clusters, size)
    n = int(sizes.sum())
    inflation = 1 + (float((sizes**2).sum()) / n - 1) * correlation
    deviation = 0.3
    effect = 2.8 * deviation * math.sqrt(inflation / n)

    def draw(generator: np.random.Generator, simulations: int, shifted: bool) -> Draw:
        shared = np.repeat(generator.normal(size=(simulations, clusters)), sizes, axis=1)
        own = generator.normal(size=(simulations, n))
        value = deviation * (math.sqrt(correlation) * shared + math.sqrt(1 - correlation) * own)
        return Draw(np.round(value, 1) + (effect if shifted else 0.0), sizes)

    predicted = power_mean(n, effect, deviation, design=cluster_design(sizes.tolist(), correlation))
    name = f"graded, {clusters} {'equal' if equal else 'unequal'} clusters, ICC {correlation:.2f}"
    return Scenario(name, n, False, effect, predicted, draw, FEW_NOTE if clusters < 20 else "")


def unequal_sizes(clusters: int, size: int) -> Any:
    """Log-normal cluster sizes around `size`, the same at every call."""
    generator = np.random.default_rng(clusters * 1_000 + size)
    return np.maximum(1, np.rint(generator.lognormal(math.log(size) - 0.32, 0.8, clusters))).astype(np.int64)


def scenarios() -> list[Scenario]:
    found = [
        binary_scenario(n, d) for n in (30, 100, 200, 500, 1000, 2000) for d in (0.02, 0.05, 0.1, 0.2, 0.4)
    ]
    for clusters, size in ((10, 20), (20, 10), (50, 10), (100, 10), (300, 5)):
        for equal in (True, False):
            found.append(clustered_binary_scenario(clusters, size, 0.3, direction=3.0, equal=equal))
    for clusters, size in ((20, 10), (50, 10), (300, 5)):
        found.append(clustered_binary_scenario(clusters, size, 0.1, direction=1.0, equal=False))
    found += [whole_cluster_scenario(g, 5, share) for g in (50, 200) for share in (0.1, 0.3)]
    found += [graded_scenario(n) for n in (30, 100, 500, 2000)]
    found += [skewed_scenario(n, share) for n in (100, 300, 1000, 2000) for share in (0.05, 0.1, 0.3)]
    found += [asymmetric_scenario(n) for n in (100, 300, 1000)]
    for clusters, size in ((10, 20), (20, 10), (50, 10), (300, 5)):
        found += [clustered_graded_scenario(clusters, size, equal=equal) for equal in (True, False)]
    return found


# ---- running ----


def run_scenario(scenario: Scenario, simulations: int, seed: int) -> Result:
    rates = {}
    for shifted in (False, True):
        generator = np.random.default_rng(
            [seed, int(shifted), scenario.n, zlib.crc32(scenario.name.encode())]
        )
        truth = scenario.effect if shifted else 0.0
        positives, covered, done = 0.0, 0.0, 0
        while done < simulations:
            block = min(simulations - done, max(1, MOST_CELLS // scenario.n))
            draw = scenario.draw(generator, block, shifted)
            judged = judge(draw, binary=scenario.binary)
            if done == 0:
                check_against_compare(draw, judged, binary=scenario.binary)
            positives += float(judged.positive().sum())
            covered += float(judged.covers(truth).sum())
            done += block
        rates[shifted] = (positives / simulations, covered / simulations)
    result = Result(
        name=scenario.name,
        n=scenario.n,
        false_positives=rates[False][0],
        coverage_null=rates[False][1],
        coverage_effect=rates[True][1],
        effect=scenario.effect,
        power=rates[True][0],
        predicted_power=scenario.predicted_power,
        note=scenario.note,
    )
    result.misses = missed_targets(result)
    return result


def missed_targets(result: Result) -> list[str]:
    misses = []
    if result.false_positives > MOST_FALSE_POSITIVES:
        misses.append("false positives")
    if result.n >= FROM_ITEMS:
        for label, share in (
            ("coverage at 0", result.coverage_null),
            ("coverage at effect", result.coverage_effect),
        ):
            if not COVERAGE[0] <= share <= COVERAGE[1]:
                misses.append(label)
    if result.predicted_power is not None and abs(result.power - result.predicted_power) > POWER_POINTS:
        misses.append("power")
    return misses


def run_peeking(simulations: int, seed: int) -> dict[str, float]:
    """2,000 equal items at 20 % discordance: a fixed-n test after every 100 items, the e-process after every single one."""
    generator, hits, naive, done = np.random.default_rng([seed, 7]), 0.0, 0.0, 0
    while done < simulations:
        block = min(simulations - done, MOST_CELLS // 2000)
        discordant = generator.random((block, 2000)) < 0.2
        up = discordant & (generator.random((block, 2000)) < 0.5)
        fixed, total = up.cumsum(axis=1), discordant.cumsum(axis=1)
        hits += float((EProcess.log_e_value(fixed, total - fixed) >= math.log(1 / ALPHA)).any(axis=1).sum())
        looks = slice(99, None, 100)
        naive += float((mcnemar_mid_p(fixed[:, looks], (total - fixed)[:, looks]) <= ALPHA).any(axis=1).sum())
        done += block
    return {"fixed_n_test_every_100": naive / simulations, "e_process_every_item": hits / simulations}


def run_noninferiority(simulations: int, seed: int) -> list[dict[str, float]]:
    """Margin 2 points: how often a true loss of exactly the margin passes, and equal arms at the planned n pass."""
    from finetune.stats.power import items_needed_noninferiority

    rows = []
    for discordance in (0.05, 0.1, 0.2):
        n, row = items_needed_noninferiority(0.02, discordance), {"discordance": discordance}
        row["n"] = n
        for label, truth in (("false_pass", -0.02), ("power", 0.0)):
            generator = np.random.default_rng([seed, n])
            total = generator.binomial(n, discordance, simulations)
            fixed = generator.binomial(total, 0.5 * (1 + truth / discordance))
            low, _ = tango_interval(fixed, total - fixed, n, confidence=1 - 2 * ALPHA)
            row[label] = float((low > -0.02).mean())
        rows.append(row)
    return rows


def table(results: Sequence[Result]) -> str:
    lines = [
        f"{'scenario':52} {'n':>5}  {'false +':>7}  {'cover 0':>7}  {'effect':>6}  {'cover d':>7}  {'power':>6}  predicted"
    ]
    for r in results:
        predicted = "    -" if r.predicted_power is None else f"{r.predicted_power:6.1%}"
        mark = f"  ! {', '.join(r.misses)}" + (f" ({r.note})" if r.note else "") if r.misses else ""
        lines.append(
            f"{r.name:52} {r.n:5d}  {r.false_positives:7.2%}  {r.coverage_null:7.2%}  {100 * r.effect:5.1f}p"
            f"  {r.coverage_effect:7.2%}  {r.power:6.1%}  {predicted}{mark}"
        )
    return "\n".join(lines)


def summary(
    results: Sequence[Result],
    peeking: dict[str, float],
    margins: Sequence[dict[str, float]],
    simulations: int,
    seconds: float,
) -> list[str]:
    """Markdown: how many scenarios keep every target, those that do not and why, non-inferiority and peeking."""
    missed = [result for result in results if result.misses]
    noise = 100 * math.sqrt(0.05 * 0.95 / simulations)
    worst = max(result.false_positives for result in results)
    return [
        f"{len(results) - len(missed)} of {len(results)} scenarios keep every target ({simulations:,} simulations each, standard error "
        f"of a 5 % rate {noise:.2f} points; {seconds:.0f} s). Most false positives: {worst:.2%}. Those that miss one:",
        "",
        *(
            f"- {result.name}, n = {result.n}: {', '.join(result.misses)}"
            + (f" ({result.note})" if result.note else "")
            for result in missed
        ),
        "",
        "Non-inferiority, margin 2 points, one-sided 5 %, n planned for 80 % power:",
        "",
        *(
            f"- {row['discordance']:.0%} discordant, n = {row['n']:.0f}: passes {row['false_pass']:.2%} at a loss of 2 points, "
            f"{row['power']:.1%} at no loss"
            for row in margins
        ),
        "",
        f"Peeking during 2,000 equal items: a fixed-n test after every 100 gives {peeking['fixed_n_test_every_100']:.1%} "
        f"false positives, the e-process after every item {peeking['e_process_every_item']:.1%}.",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--simulations", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="run the scenarios whose name contains this text")
    parser.add_argument("--json", type=Path, default=None, help="also write the numbers here")
    arguments = parser.parse_args()
    began, results = time.perf_counter(), []
    for scenario in scenarios():
        if arguments.only in scenario.name:
            results.append(run_scenario(scenario, arguments.simulations, arguments.seed))
            print(table(results[-1:]).splitlines()[-1] if len(results) > 1 else table(results), flush=True)
    peeking = run_peeking(arguments.simulations, arguments.seed)
    margins = run_noninferiority(arguments.simulations, arguments.seed)
    lines = summary(results, peeking, margins, arguments.simulations, time.perf_counter() - began)
    if arguments.only:
        print("\n".join(lines))
    else:
        from results import write_section  # beside this file; the tests load this file from elsewhere

        write_section("Statistics: error rates by simulation", ["```", table(results), "```", "", *lines])
    if arguments.json:
        payload = {
            "simulations": arguments.simulations,
            "scenarios": [asdict(result) for result in results],
            "peeking": peeking,
            "noninferiority": margins,
        }
        arguments.json.write_text(json.dumps(payload, indent=2) + "\n")


if __name__ == "__main__":
    main()
