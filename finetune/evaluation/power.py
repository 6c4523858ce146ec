"""Before the tuning: what the items of a suite will be able to show, and how many more a plausible gain would need.

The untuned arms are the pilot. How many items will be discordant is what zero-shot and few-shot answers show of each other,
but never less than a planner assumes without a pilot: a base model that gets everything wrong has no discordant
items, and says nothing about how a tuned one will differ. Clusters count as the pilot's differences show them to.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from finetune.evaluation.pairing import pair_records
from finetune.evaluation.records import Record
from finetune.evaluation.scoring import both_scored, clusters_of, scores_of
from finetune.evaluation.suite import Suite
from finetune.stats.clusters import effective_items, robust_mean, unit_totals
from finetune.stats.distributions import FloatArray, normal_quantile
from finetune.stats.plan import ASSUMED_DISCORDANCE
from finetune.stats.power import (
    items_needed_mean,
    items_needed_noninferiority,
    items_needed_paired,
    least_detectable_mean,
    least_detectable_paired,
)
from finetune.stats.validate import is_binary, is_bounded

PLAUSIBLE_SHARE_MENDED = 0.25  # a tuning that mends a quarter of what is wrong is worth finding
_POWER = 0.80
_SMALLEST_MARGIN = 1e-6  # below, no number of items is a plan


@dataclass(frozen=True, slots=True)
class SuitePower:
    """What the suite can tell. Differences are fractions for shares, else in units of the score.

    least_detectable: smallest true difference found with 80 % power; for suites that guard, the smallest loss that can
    be excluded when there is none. wanted: what should be found or excluded. more_items: how many more that needs.
    discordance: share of discordant items that was planned with; None for graded scores. basis: where it comes from.
    """

    suite: str
    role: str
    metric: str
    n: int
    clusters: int
    is_share: bool
    discordance: float | None
    basis: str
    least_detectable: float | None
    wanted: float | None
    more_items: int | None

    @property
    def is_too_small(self) -> bool:
        return bool(self.more_items)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "lines": self.lines()}

    def lines(self) -> list[str]:
        """For people: what cannot be told, and a warning when that is more than is plausible."""
        size = f"{self.suite}, {self.n} items" + (
            f" in {self.clusters} clusters" if self.clusters < self.n else ""
        )
        if self.least_detectable is None:
            return [f"power: {size}: not known before the tuning ({self.basis})"]
        guards = self.role != "task"
        verb = "exclude a loss" if guards else "tell a difference"
        found = [
            f"power: {size}: cannot {verb} below {self._amount(self.least_detectable)} (80 % power, {self.basis})"
        ]
        if self.more_items and self.wanted is not None:
            wanted = self._amount(self.wanted)
            what = (
                f"the margin is {wanted}"
                if guards
                else f"mending a quarter of what is wrong would be {wanted}"
            )
            found.append(
                f"warning: {what}, which {self.suite} will probably not show: the verdict may be inconclusive; "
                f"about {self.more_items:,} more items would do"
            )
        return found

    def _amount(self, value: float) -> str:
        return f"{value * 100:.1f} points" if self.is_share else f"{value:.3g}"


def plan_suite(suite: Suite, untuned: Sequence[Sequence[Record]]) -> SuitePower:
    """What the suite can tell of a tuned model. untuned: records of the untuned arms, zero-shot and few-shot or one of them."""
    metric = suite.primary_metric
    first, last = pair_records(untuned[0], untuned[-1], inner=True)
    first, last = both_scored(first, last, metric)
    before, after = (np.asarray(scores_of(records, metric), dtype=np.float64) for records in (first, last))
    n, labels = len(first), clusters_of(first)
    head = {"suite": suite.name, "role": suite.role, "metric": metric, "n": n, "clusters": len(set(labels))}
    head["is_share"] = n > 0 and is_bounded(before) and is_bounded(after)
    pilot = after - before if len(untuned) > 1 else None
    if len(set(labels)) < 2:
        return _unknown(head, "fewer than two clusters of items, which have no margin of error")
    if is_binary(before) and is_binary(after):
        return _plan_binary(suite, head, after, pilot, labels)
    return _plan_graded(suite, head, after, pilot, labels)


def _plan_binary(
    suite: Suite, head: dict[str, Any], scores: FloatArray, pilot: FloatArray | None, labels: Sequence[Any]
) -> SuitePower:
    n, alpha = len(scores), 1.0 - suite.confidence
    seen = float(np.mean(pilot != 0.0)) if pilot is not None else 0.0
    discordance = max(seen, ASSUMED_DISCORDANCE)
    basis = f"{discordance:.1%} of the items discordant, {'as the untuned arms are' if seen == discordance else 'assumed'}"
    design = _design_effect(pilot if pilot is not None and pilot.any() else scores, labels)
    if suite.role == "task":
        wanted = PLAUSIBLE_SHARE_MENDED * (1.0 - float(scores.mean()))
        least = least_detectable_paired(n, discordance, alpha=alpha, power=_POWER, design_effect=design)
        needed = (
            items_needed_paired(
                wanted, max(discordance, wanted), alpha=alpha, power=_POWER, design_effect=design
            )
            if wanted > 0.0
            else None
        )
    else:
        wanted = suite.margin
        z = float(normal_quantile(suite.confidence)) + float(normal_quantile(_POWER))
        least = min(1.0, z * math.sqrt(discordance * design / n))
        needed = (
            items_needed_noninferiority(wanted, discordance, alpha=alpha, power=_POWER, design_effect=design)
            if wanted > _SMALLEST_MARGIN
            else None
        )
    return _planned(head, discordance, basis, least, wanted, needed)


def _design_effect(spread: FloatArray, labels: Sequence[Any]) -> float:
    """How many times as many items the clusters make necessary, at least 1, as these values show it."""
    n = len(spread)
    if len(set(labels)) == n:
        return 1.0
    robust = robust_mean(unit_totals(spread, labels))
    items = float(effective_items(float(np.var(spread)), robust.standard_error, n, robust.units))
    return n / min(items, float(n))


def _plan_graded(
    suite: Suite, head: dict[str, Any], scores: FloatArray, pilot: FloatArray | None, labels: Sequence[Any]
) -> SuitePower:
    if pilot is None or not np.ptp(pilot):
        return _unknown(head, "a graded score, and no two untuned arms that differ")
    alpha = 1.0 - suite.confidence
    robust = robust_mean(unit_totals(pilot, labels))
    least = least_detectable_mean(
        float(robust.standard_error), float(robust.degrees_of_freedom), alpha=alpha, power=_POWER
    )
    wanted = suite.margin if suite.role != "task" else None
    if suite.role == "task" and head["is_share"]:
        wanted = PLAUSIBLE_SHARE_MENDED * (1.0 - float(scores.mean()))
    variance = float(robust.standard_error) ** 2 * len(scores)
    needed = None
    if wanted is not None and wanted > _SMALLEST_MARGIN and math.isfinite(variance):
        needed = items_needed_mean(wanted, variance, alpha=alpha, power=_POWER)
    return _planned(head, None, "differences spread as those of the untuned arms do", least, wanted, needed)


def _planned(
    head: dict[str, Any],
    discordance: float | None,
    basis: str,
    least: float,
    wanted: float | None,
    needed: int | None,
) -> SuitePower:
    more = max(0, needed - head["n"]) if needed is not None else None
    return SuitePower(
        **head, discordance=discordance, basis=basis, least_detectable=least, wanted=wanted, more_items=more
    )


def _unknown(head: dict[str, Any], basis: str) -> SuitePower:
    return SuitePower(
        **head, discordance=None, basis=basis, least_detectable=None, wanted=None, more_items=None
    )
