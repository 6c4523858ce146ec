"""Whether a suite can show what a tuning is likely to bring."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from finetune.doctor.finding import Finding, ok, warning
from finetune.evaluation.power import PLAUSIBLE_SHARE_MENDED, SuitePower, plan_suite
from finetune.evaluation.records import Record
from finetune.evaluation.suite_data import SuiteData
from finetune.stats.plan import ASSUMED_DISCORDANCE
from finetune.stats.power import items_needed_noninferiority, items_needed_paired, least_detectable_paired

_POWER = 0.80
_SMALLEST_MARGIN = 1e-6


def check_power(data: SuiteData, untuned: Sequence[Sequence[Record]] = ()) -> Iterator[Finding]:
    """By the untuned arms' answers where a run has them; before that by what a planner assumes of right-or-wrong items."""
    name = f"power of {data.suite.name}"
    if untuned and all(untuned):
        found = _of_plan(name, plan_suite(data.suite, untuned))
    else:
        found = _assumed(name, data)
    yield replace(found, where=str(data.suite.path))


def _of_plan(name: str, planned: SuitePower) -> Finding:
    first, *rest = (line.partition(": ")[2] for line in planned.lines())
    if rest:
        return warning(name, f"{first}; {rest[0]}", "add items, or expect an inconclusive verdict")
    return ok(name, first)


def _assumed(name: str, data: SuiteData) -> Finding:
    """Every cluster counts as one item, the worst case; the base is taken to be wrong throughout."""
    suite = data.suite
    n = len({item.cluster for item in data.items})
    alpha = 1.0 - suite.confidence
    basis = f"{ASSUMED_DISCORDANCE:.0%} discordant items assumed, for nothing has been answered yet"
    size = f"{len(data.items)} items" + (f" in {n} clusters" if n < len(data.items) else "")
    if suite.role == "task":
        wanted = PLAUSIBLE_SHARE_MENDED
        needed = items_needed_paired(wanted, max(ASSUMED_DISCORDANCE, wanted), alpha=alpha, power=_POWER)
        least = least_detectable_paired(n, max(ASSUMED_DISCORDANCE, wanted), alpha=alpha, power=_POWER)
        said = f"{size} can tell {least * 100:.1f} points (80 % power, {basis})"
        if n < needed:
            return warning(
                name,
                f"{said}; mending a quarter of what is wrong would be {wanted * 100:.0f} points",
                f"about {needed - n:,} more items would do",
            )
        return ok(name, said)
    if suite.margin <= _SMALLEST_MARGIN:
        return ok(name, f"{size}; a margin of 0 can be excluded by no number of items")
    needed = items_needed_noninferiority(suite.margin, ASSUMED_DISCORDANCE, alpha=alpha, power=_POWER)
    if n < needed:
        return warning(
            name,
            f"{size} cannot exclude a loss of the margin of {suite.margin * 100:.1f} points (80 % power, {basis})",
            f"about {needed - n:,} more items would do, or a wider margin",
        )
    return ok(name, f"{size} can exclude a loss of {suite.margin * 100:.1f} points (80 % power, {basis})")
