"""What an answer takes in either arm: tokens, time and money, as paired ratios with intervals over the same items.

A ratio is the geometric mean of the items' own ratios arm / baseline: log ratios are compared like scores, clusters
included, so a ratio has the interval of a paired difference. Percentiles of latency have no value an item; their ratio
gets a bootstrap interval over whole clusters.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from finetune.evaluation.records import ArmSummary, Record
from finetune.evaluation.scoring import clusters_of
from finetune.plan.cost import break_even_queries, query_cost, training_cost
from finetune.recipe.schema import PricesSection
from finetune.stats import compare
from finetune.stats.resample import quantile_ratio

PERCENTILES = {"p50": 0.50, "p95": 0.95}


@dataclass(frozen=True)
class _Side:
    """One arm: a number an item for every measure, in the items' order; None where an item has no positive number."""

    summary: ArmSummary
    records: Sequence[Record]
    prices: list[float | None]

    def values(self, measure: str) -> list[float | None]:
        if measure == "price":
            return self.prices
        if measure == "output_tokens_per_second":
            return [_over(one["output_tokens"], one["latency_seconds"]) for one in self.records]
        return [_positive(one[measure]) for one in self.records]


@dataclass(frozen=True)
class Spent:
    """What the user pays, and how long the tuning took (priced with `prices.per_hour`). No prices: no price is given."""

    prices: PricesSection = field(default_factory=PricesSection)
    training_seconds: float | None = None

    @property
    def tuning(self) -> float:
        hours = training_cost(self.training_seconds or 0.0, self.prices.per_hour or 0.0)
        return self.prices.tuning + hours


def cost_of(
    baseline: ArmSummary,
    arm: ArmSummary,
    left: Sequence[Record],
    right: Sequence[Record],
    *,
    confidence: float = 0.95,
    spent: Spent | None = None,
) -> dict[str, Any]:
    """Both arms, and the ratios arm / baseline. left, right: their records of the same items, in one order.

    Every ratio is {"ratio", "low", "high", "confidence", "n", "left_out"}, null without items that have a number on
    both sides; items that lack one are counted in `left_out`. Of a single cluster the interval is null.
    """
    spent = spent or Spent()
    sides = (
        _Side(baseline, left, _prices(baseline, left, spent.prices, is_baseline=True)),
        _Side(arm, right, _prices(arm, right, spent.prices, is_baseline=False)),
    )
    clusters = clusters_of(left)
    measures = ["output_tokens", "prompt_tokens", "latency_seconds", "output_tokens_per_second", "price"]
    ratios = {name: _paired_ratio(*sides, name, clusters, confidence) for name in measures}
    for name, share in PERCENTILES.items():
        ratios[f"latency_seconds_{name}"] = _percentile_ratio(*sides, share, clusters, confidence)
    found: dict[str, Any] = {
        "baseline": _taken(sides[0]),
        "arm": _taken(sides[1]),
        "ratios": ratios,
        "seconds_ratio": _over(arm.seconds, baseline.seconds),
    }
    queries = [found[side]["price_per_query"] for side in ("baseline", "arm")]
    if None not in queries:
        even = break_even_queries(
            tuning_cost=spent.tuning,
            amortise_months=spent.prices.months,
            baseline_query_price=queries[0],
            tuned_query_price=queries[1],
            serving_per_month=spent.prices.serving_per_month,
        )
        months = spent.prices.months
        found["break_even"] = {**even.to_dict(), "tuning_cost": spent.tuning, "months": months}
    return found


def _taken(side: _Side) -> dict[str, Any]:
    summary = side.summary
    known = [price for price in side.prices if price is not None]
    return {
        "output_tokens_per_item": summary.output_tokens / summary.n,
        "prompt_tokens_per_item": summary.prompt_tokens / summary.n,
        "seconds_per_item": summary.seconds / summary.n,
        "output_tokens_per_second": _over(summary.output_tokens, summary.seconds),
        "latency_seconds": summary.latency_seconds,
        "price_per_query": sum(known) / len(known) if known else None,
    }


def _prices(
    summary: ArmSummary, records: Sequence[Record], prices: PricesSection, *, is_baseline: bool
) -> list[float | None]:
    """The price of every item.

    By the hour, the arm's whole time is shared out in proportion to the latencies: rows that are decoded together
    share the machine, so latency alone would count the same second many times.
    """
    given, output = prices.input_per_million, prices.output_per_million
    if is_baseline and prices.baseline_input_per_million is not None:
        given, output = prices.baseline_input_per_million, prices.baseline_output_per_million
    if given is not None:
        return [
            query_cost(
                one["prompt_tokens"],
                one["output_tokens"],
                input_price_per_million=given,
                output_price_per_million=output,
            )
            for one in records
        ]
    waited = sum(one["latency_seconds"] for one in records)
    if prices.per_hour is None or not waited:
        return [None] * len(records)
    per_second = summary.seconds * len(records) / summary.n / waited
    return [training_cost(one["latency_seconds"] * per_second, prices.per_hour) for one in records]


_Ends = tuple[float | None, float | None, float | None]
_UNKNOWN: _Ends = (None, None, None)


def _paired_ratio(
    before: _Side, after: _Side, measure: str, clusters: Sequence[Hashable], confidence: float
) -> dict[str, Any]:
    """Geometric mean over the items of after / before."""
    pairs = _known_pairs(before, after, measure, clusters)
    if not pairs:
        return _ratio(_UNKNOWN, confidence, 0, len(clusters))
    first, second, labels = zip(*pairs, strict=True)
    if len(set(labels)) < 2:  # the items' own ratio, without a margin that one unit cannot give
        own = math.exp(float(np.mean(np.log(second) - np.log(first))))
        return _ratio((own, None, None), confidence, len(pairs), len(clusters))
    found = compare(np.log(first), np.log(second), clusters=labels, confidence=confidence)
    ends = math.exp(found.difference), math.exp(found.low), math.exp(found.high)
    return _ratio(ends, confidence, len(pairs), len(clusters))


def _percentile_ratio(
    before: _Side, after: _Side, share: float, clusters: Sequence[Hashable], confidence: float
) -> dict[str, Any]:
    pairs = _known_pairs(before, after, "latency_seconds", clusters)
    if not pairs:
        return _ratio(_UNKNOWN, confidence, 0, len(clusters))
    first, second, labels = zip(*pairs, strict=True)
    found = quantile_ratio(first, second, share, clusters=labels, confidence=confidence)
    return _ratio((found.value, found.low, found.high), confidence, len(pairs), len(clusters))


def _known_pairs(
    before: _Side, after: _Side, measure: str, clusters: Sequence[Hashable]
) -> list[tuple[float, float, Hashable]]:
    """(baseline, arm, cluster) of the items that have a positive number on both sides."""
    return [
        (first, second, cluster)
        for first, second, cluster in zip(
            before.values(measure), after.values(measure), clusters, strict=True
        )
        if first and second
    ]


def _ratio(ends: _Ends, confidence: float, n: int, n_items: int) -> dict[str, Any]:
    found = dict(zip(("ratio", "low", "high"), ends, strict=True))
    return {**found, "confidence": confidence, "n": n, "left_out": n_items - n}


def _positive(value: Any) -> float | None:
    return float(value) if value and np.isfinite(value) and value > 0 else None


def _over(value: float, base: float) -> float | None:
    return value / base if base else None
