"""The plan before a run: paired against unpaired, what the items at hand can tell, and what they cannot."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from finetune.errors import UserError
from finetune.stats.power import (
    cluster_design,
    items_needed_noninferiority,
    items_needed_paired,
    items_needed_unpaired,
    least_detectable_paired,
    least_detectable_unpaired,
    power_paired,
    power_unpaired,
)

ASSUMED_DISCORDANCE = 0.15
_SMALLEST = 1e-6  # of an effect or margin: what would need a million million items is no plan


@dataclass(frozen=True, slots=True)
class PowerPlan:
    """Answers of `plan_power`; shares and effects are fractions. What was not asked for is None.

    warning: set when the items at hand are too few for the wished effect.
    """

    effect: float
    discordance: float
    assumed_discordance: bool
    accuracy: float
    alpha: float
    power: float
    design_effect: float
    items_paired: int
    items_unpaired_per_arm: int | None
    items_noninferiority: int | None
    margin: float | None
    items: int | None
    power_paired: float | None
    power_unpaired: float | None
    least_detectable_paired: float | None
    least_detectable_unpaired: float | None
    warning: str | None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self) -> list[str]:
        """For the screen."""
        points = f"{100 * self.effect:+.1f} points"
        assumed = " (assumed; a pilot would tell)" if self.assumed_discordance else ""
        per_arm, reached = self.items_unpaired_per_arm, self.power_unpaired
        unpaired = "not possible" if per_arm is None else f"{per_arm:,} per arm"
        found = [
            f"to find {points} with {self.power:.0%} power at {self.alpha:.0%}:",
            f"  paired    {self.items_paired:,} items, at {self.discordance:.1%} discordant items{assumed}",
            f"  unpaired  {unpaired}, from an accuracy of {self.accuracy:.1%}",
        ]
        if self.design_effect != 1.0:
            found.append(
                f"  clusters make {self.design_effect:.2f} times as many items necessary (included, paired)"
            )
        if self.items_noninferiority is not None and self.margin is not None:
            found.append(
                f"  to exclude a loss of {100 * self.margin:.1f} points when there is none: {self.items_noninferiority:,} items"
            )
        if self.items is not None:
            detectable = [self.least_detectable_paired or 0.0, self.least_detectable_unpaired or 0.0]
            found += [
                f"{self.items:,} items find {points} with {self.power_paired:.0%} power paired"
                + ("" if reached is None else f", {reached:.0%} unpaired"),
                f"{self.items:,} items cannot tell a difference below {100 * detectable[0]:.1f} points paired, "
                f"{100 * detectable[1]:.1f} unpaired",
            ]
        return [*found, f"warning: {self.warning}"] if self.warning else found


def plan_power(
    *,
    effect: float,
    discordance: float | None = None,
    accuracy: float = 0.7,
    items: int | None = None,
    margin: float | None = None,
    cluster_size: int = 1,
    icc: float = 0.0,
    alpha: float = 0.05,
    power: float = 0.8,
) -> PowerPlan:
    """Plan for right/wrong items. Without a pilot's `discordance` 15 % is assumed (more if the effect itself is larger) and said so.

    cluster_size, icc: items that share a cluster, and how alike their differences are; they apply to the paired design.
    """
    _check_wishes(effect, margin, icc)
    if not 0.0 <= accuracy <= 1.0:
        raise UserError(f"accuracy {accuracy} must lie between 0 and 1", fix="write 70 % as 0.7")
    share = max(ASSUMED_DISCORDANCE, abs(effect)) if discordance is None else discordance
    target = accuracy + effect
    reachable = 0.0 <= target <= 1.0
    inflation = 1.0 + (cluster_size - 1.0) * icc
    design = None
    if cluster_size > 1 and items is not None and items // cluster_size >= 2:
        design = cluster_design([cluster_size] * (items // cluster_size), icc)
    detectable = (
        None
        if items is None
        else least_detectable_paired(items, share, design_effect=inflation, alpha=alpha, power=power)
    )
    return PowerPlan(
        effect=effect,
        discordance=share,
        assumed_discordance=discordance is None,
        accuracy=accuracy,
        alpha=alpha,
        power=power,
        design_effect=inflation,
        items_paired=items_needed_paired(effect, share, design_effect=inflation, alpha=alpha, power=power),
        items_unpaired_per_arm=items_needed_unpaired(accuracy, target, alpha=alpha, power=power)
        if reachable
        else None,
        items_noninferiority=None
        if margin is None
        else items_needed_noninferiority(margin, share, design_effect=inflation, alpha=alpha, power=power),
        margin=margin,
        items=items,
        power_paired=None
        if items is None
        else power_paired(items, effect, share, alpha=alpha, design=design),
        power_unpaired=power_unpaired(items, accuracy, target, alpha=alpha) if items and reachable else None,
        least_detectable_paired=detectable,
        least_detectable_unpaired=None
        if items is None
        else least_detectable_unpaired(items, accuracy, alpha=alpha, power=power),
        warning=_too_few(items, effect, detectable, power),
    )


def _check_wishes(effect: float, margin: float | None, icc: float) -> None:
    if not _SMALLEST <= abs(effect) < 1.0:
        raise UserError(f"effect {effect} must be a share other than 0", fix="write two points as 0.02")
    if margin is not None and not _SMALLEST <= margin <= 1.0:
        raise UserError(f"margin {margin} must be a share above 0", fix="write two points as 0.02")
    if not 0.0 <= icc <= 1.0:
        raise UserError(
            f"icc {icc} must lie between 0 and 1", fix="0 for items that do not resemble each other"
        )


def _too_few(items: int | None, effect: float, detectable: float | None, power: float) -> str | None:
    if items is None or detectable is None or detectable <= abs(effect) + 1e-12:
        return None
    return (
        f"{items:,} items are too few for {100 * abs(effect):.1f} points: a true difference below {100 * detectable:.1f} "
        f"points is missed more often than {1 - power:.0%} of the time"
    )
