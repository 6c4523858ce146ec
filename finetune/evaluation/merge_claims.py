"""What the winner of a search over merges has to show on the confirming side: claims, and the verdict on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from finetune.errors import UserError
from finetune.evaluation.candidates import Answers
from finetune.evaluation.compare import compare_records
from finetune.evaluation.gate import GateAnswer, Requirement, gate
from finetune.evaluation.suite import Suite
from finetune.recipe.merge_search_section import ClaimSection


def standing_claims(
    suites: Sequence[Suite], given: Sequence[ClaimSection], best_parent: Mapping[str, str]
) -> list[ClaimSection]:
    """The claims of the recipe, or by default that the winner is in no suite worse than the parent that was best there.

    Raises UserError for a claim about a suite that is not asked.
    """
    names = [suite.name for suite in suites]
    for claim in given:
        if claim.suite not in names:
            raise UserError(
                f"confirm: '{claim.suite}' is no suite of this search", fix=f"one of: {', '.join(names)}"
            )
    if given:
        return list(given)
    return [ClaimSection(suite=name, against=parent) for name, parent in best_parent.items()]


def judge_claims(
    suites: Sequence[Suite], claims: Sequence[ClaimSection], answers: Answers, winner: str
) -> dict[str, Any]:
    """`claims` with outcome, difference and interval each, the outcome of all, and the exit code of a gate.

    All must hold; the p-values of several claims of improvement are corrected among themselves (Holm).
    """
    named = {suite.name: suite for suite in suites}
    rows: dict[int, dict[str, Any]] = {}
    answered: list[GateAnswer] = []
    requirements: tuple[Requirement, ...] = ("improvement", "no-regression")
    for requirement in requirements:
        places = [place for place, claim in enumerate(claims) if claim.require == requirement]
        if not places:
            continue
        results = [_compared(named[claims[place].suite], claims[place], answers, winner) for place in places]
        answer = gate(results, require=requirement, correction="holm")
        answered.append(answer)
        for place, row in zip(places, answer.rows, strict=True):
            rows[place] = {**asdict(row), "against": claims[place].against}
    worst = max(answered, key=lambda answer: _ORDER.index(answer.outcome))
    return {
        "claims": [rows[place] for place in sorted(rows)],
        "outcome": worst.outcome,
        "exit_code": int(worst.exit_code),
    }


_ORDER = ("pass", "no-evidence", "inconclusive", "regressed")


def _compared(suite: Suite, claim: ClaimSection, answers: Answers, winner: str) -> dict[str, Any]:
    """The comparison that a claim is about, by its margin. A claimed improvement is judged as that of a task."""
    update: dict[str, Any] = {} if claim.margin is None else {"margin": claim.margin}
    if claim.require == "improvement":
        update["role"] = "task"
    records = (answers[one][suite.name].records() for one in (claim.against, winner))
    return compare_records(suite.model_copy(update=update), *records, slices=False)
