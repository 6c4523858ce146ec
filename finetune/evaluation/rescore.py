"""Saved answers are data: score them again, or with one more scorer, without generating anything."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from finetune.errors import UserError
from finetune.evaluation.records import ArmSummary, write_arm
from finetune.evaluation.saved_arms import SavedArm
from finetune.evaluation.scorers.registry import find_scorer
from finetune.evaluation.scoring import rescored
from finetune.evaluation.suite import ScorerSection, Suite


def parse_scorer(text: str) -> ScorerSection:
    """'regex' or 'regex:{pattern: "^A", metric: starts_with_a}' -> one scorer of a suite.

    What follows the colon is a YAML mapping of the scorer's parameters; `metric` names the metric.
    """
    name, _, given = text.partition(":")
    try:
        parameters = YAML(typ="safe").load(given) if given.strip() else {}
    except YAMLError as error:
        raise UserError(f"'{given}' is not a YAML mapping: {error}", where="--scorer") from None
    if not isinstance(parameters, dict):
        raise UserError(
            f"'{given}' is not a mapping",
            where="--scorer",
            fix="write parameters as in --scorer 'numeric:{tolerance: 0.1}'",
        )
    metric = parameters.pop("metric", None)
    if not isinstance(metric, (str, type(None))):
        raise UserError(f"metric: {metric!r} is not a name", where="--scorer", fix="write it in quotes")
    return ScorerSection(scorer=name.strip(), metric=metric, parameters=parameters)


def with_scorers(suite: Suite, added: Sequence[ScorerSection]) -> Suite:
    """The suite with more metrics. Raises UserError for a scorer of other tasks, and for another scorer under the name
    of a metric of the suite itself: gates go on reading that name as what the suite says it is."""
    unfit = [one.scorer for one in added if not fits(suite, one)]
    if unfit:
        raise UserError(
            f"'{unfit[0]}' scores suites with task: {find_scorer(unfit[0]).task}, and {suite.name} has task: {suite.task}",
            where="--scorer",
            fix="name the suites that it fits with --suite",
        )
    own = {one.name: one for one in suite.scoring}
    taken = [one.name for one in added if own.get(one.name, one) != one]
    if taken:
        raise UserError(
            f"'{taken[0]}' is a metric of suite {suite.name} itself",
            where="--scorer",
            why="other commands would take the new scores for the suite's own",
            fix=f"give it a name with `metric: …`, or change the scorer in {suite.path}",
        )
    names = {one.name for one in added}
    kept = [one for one in suite.scoring if one.name not in names]
    changed = suite.model_copy(update={"scorers": [*kept, *added]})
    changed.score_functions()  # unknown scorers and parameters, a judge's included, are found before a file is touched
    return changed


def fits(suite: Suite, scorer: ScorerSection) -> bool:
    """Whether a scorer can score this suite's answers."""
    return find_scorer(scorer.scorer, where="--scorer").task == suite.task


def rescore_arm(suite: Suite, saved: SavedArm, added: Sequence[ScorerSection] = ()) -> ArmSummary:
    """Score the saved answers of one arm with the suite as it is now and `added` scorers, and write them again.

    The summary keeps the digest of the suite itself: metrics added by hand do not change what was asked.
    Raises UserError when the answers were not evaluated here (no summary).
    """
    summary = saved.summary()
    if summary is None:
        raise UserError(
            f"{saved.path} has no summary beside it", fix="evaluate the arm with finetune eval run"
        )
    records, summary = rescored(with_scorers(suite, added), saved.records(), summary)
    return write_arm(saved.folder, replace(summary, suite_digest=suite.digest), records)
