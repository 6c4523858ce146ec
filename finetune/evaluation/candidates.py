"""Several merged models judged at once: each beside every parent and the base, item by item, with the many looks counted.

The choice is made on one side of every suite, the confirmation on the other. A dataset's suite has its validation and its
test split; any other suite is parted in two by a hash of its clusters, so that no item that chose ever confirms.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from finetune.digest import digest_json
from finetune.errors import UserError
from finetune.evaluation.claims import primary_of
from finetune.evaluation.compare import compare_saved
from finetune.evaluation.saved_arms import SavedArm
from finetune.evaluation.suite import Suite
from finetune.evaluation.suite_data import SuiteData, load_suite_data
from finetune.recipe.merge_search_section import ChooseSection
from finetune.stats.multiplicity import adjust

Side = Literal["choose", "confirm"]
Finding = Literal["better", "worse", "not told apart"]
Answers = Mapping[str, Mapping[str, SavedArm]]
"""Model -> suite -> its answers, all of one side."""

_LEVEL = 0.05  # at which a difference among all is called shown


def side_of(suite: Suite, side: Side, max_items: int | None) -> SuiteData:
    """The items that choose, or those that confirm. Raises UserError when a side has none."""
    if suite.items.spec is not None:
        split = "validation" if side == "choose" else suite.items.split
        if side == "confirm" and split == "validation":
            raise UserError(
                f"the suite {suite.name} asks the validation split, which chooses the merge",
                where=str(suite.path),
                fix="set items.split: test, so that other items confirm it",
            )
        items = suite.items.model_copy(update={"split": split})
        return load_suite_data(suite.model_copy(update={"items": items}), max_items=max_items)
    data = load_suite_data(suite)
    clusters = sorted({item.cluster for item in data.items}, key=lambda name: digest_json([suite.name, name]))
    chosen = set(clusters[::2] if side == "choose" else clusters[1::2])
    kept = tuple(item for item in data.items if item.cluster in chosen)[:max_items]
    if not kept:
        raise UserError(
            f"the suite {suite.name} has one cluster of items",
            where=str(suite.path),
            why="half of a suite chooses the merge, the other half confirms it, and a cluster is not cut",
            fix="give the suite more items, or leave it out",
        )
    return replace(data, items=kept)


def describe_side(suite: Suite, side: Side) -> str:
    """'validation split', or which half of the items."""
    if suite.items.spec is not None:
        return f"{'validation' if side == 'choose' else suite.items.split} split"
    return "one half of the items" if side == "choose" else "the other half of the items"


@dataclass(frozen=True, slots=True)
class Beside:
    """One model beside another on one suite, by the primary metric: `difference` is the model's minus the other's.

    p_adjusted: Holm over every difference of the search. finding: whether a gain or a loss is shown after that.
    """

    model: str
    against: str
    suite: str
    metric: str
    n: int
    difference: float
    low: float
    high: float
    higher_is_better: bool
    open_ended: bool
    p_value: float
    p_adjusted: float
    finding: Finding

    @property
    def gain(self) -> float:
        """The difference, positive when the model is better."""
        return self.difference if self.higher_is_better else -self.difference

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def compare_beside(
    suites: Sequence[Suite], answers: Answers, models: Sequence[str], references: Sequence[str]
) -> list[Beside]:
    """Every model beside every reference on every suite; p-values are corrected over all of them (Holm)."""
    found: list[Beside] = []
    for suite in suites:
        for model in models:
            for against in references:
                one = primary_of(
                    compare_saved(
                        suite,
                        answers[against][suite.name],
                        answers[model][suite.name],
                        slices=False,
                        costs=False,
                    )
                )
                found.append(_beside(model, against, one))
    adjusted = adjust([one.p_value for one in found], "holm")
    return [_judged(one, p) for one, p in zip(found, adjusted, strict=True)]


_TAKEN = ("suite", "metric", "n", "difference", "low", "high", "higher_is_better", "open_ended")


def _beside(model: str, against: str, one: Mapping[str, Any]) -> Beside:
    p_value = 1.0 if one["p_value"] is None else one["p_value"]
    taken = {name: one[name] for name in _TAKEN}
    return Beside(model, against, **taken, p_value=p_value, p_adjusted=p_value, finding="not told apart")


def _judged(one: Beside, p_adjusted: float) -> Beside:
    finding: Finding = "not told apart"
    if p_adjusted <= _LEVEL and one.gain != 0.0:
        finding = "better" if one.gain > 0.0 else "worse"
    return replace(one, p_adjusted=p_adjusted, finding=finding)


@dataclass(frozen=True, slots=True)
class Choice:
    """The winner, every candidate's mark on the chosen suites, and why some could not be chosen."""

    winner: str
    best: tuple[str, ...]
    marks: dict[str, float]
    kept_out: dict[str, str]
    best_parent: dict[str, str]

    @property
    def none_was_allowed(self) -> bool:
        return len(self.kept_out) == len(self.marks)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def suites_to_win(suites: Sequence[Suite], section: ChooseSection) -> list[Suite]:
    """Those whose primary metrics decide. Raises UserError for unknown names and for metrics that have no common unit."""
    named = {suite.name: suite for suite in suites}
    for name in (*section.best, *section.lose_at_most):
        if name not in named:
            raise UserError(f"choose: '{name}' is no suite of this search", fix=f"one of: {', '.join(named)}")
    deciding = [named[name] for name in section.best] or [suite for suite in suites if suite.role == "task"]
    if not deciding:
        raise UserError(
            "no suite has the role task", where="choose.best", fix="name the suites that must be best"
        )
    if len(deciding) > 1 and any(suite.scorer_of(suite.primary_metric).open_ended for suite in deciding):
        raise UserError(
            f"the metrics of {', '.join(suite.name for suite in deciding)} have no mean: they differ in unit",
            where="choose.best",
            fix="name one suite, or suites whose metrics are shares",
        )
    return deciding


def choose(
    suites: Sequence[Suite],
    means: Mapping[str, Mapping[str, float]],
    candidates: Sequence[str],
    parents: Sequence[str],
    section: ChooseSection,
) -> Choice:
    """The candidate whose mean primary metric over the deciding suites is best, among those that lose no more than they may.

    means: model -> suite -> mean of its primary metric on the choosing side. Ties go to the first candidate. Where none is
    allowed, the one that is best is chosen all the same, and `kept_out` says so of all.
    """
    sign = {s.name: 1.0 if s.scorer_of(s.primary_metric).higher_is_better else -1.0 for s in suites}
    deciding = suites_to_win(suites, section)
    best_parent = {s.name: max(parents, key=lambda name: sign[s.name] * means[name][s.name]) for s in suites}
    marks = {
        name: math.fsum(sign[s.name] * means[name][s.name] for s in deciding) / len(deciding)
        for name in candidates
    }
    kept_out: dict[str, str] = {}
    for name in candidates:
        for suite, allowed in section.lose_at_most.items():
            lost = sign[suite] * (means[best_parent[suite]][suite] - means[name][suite])
            if lost > allowed + 1e-12:
                kept_out.setdefault(name, f"loses {lost:.3g} on {suite}, {allowed:.3g} allowed")
    allowed_ones = [name for name in candidates if name not in kept_out] or list(candidates)
    winner = max(allowed_ones, key=lambda name: marks[name])
    return Choice(winner, tuple(s.name for s in deciding), marks, kept_out, best_parent)
