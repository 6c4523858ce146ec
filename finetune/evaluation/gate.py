"""The gate: from comparisons to one answer that a build server can act on.

Every suite must pass. That alone needs no correction for many suites: the gate opens only when each suite passes its own
test, so more suites can make it stricter but never laxer. Each claim of improvement is printed with its corrected p-value
all the same, and stands or falls by it where the recipe declared a correction. Nothing compared is never a pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal
from xml.etree import ElementTree

from finetune.errors import ExitCode, UserError
from finetune.evaluation.claims import Correction, correct_claims, primary_of
from finetune.stats.multiplicity import explain
from finetune.units import points

Requirement = Literal["improvement", "no-regression"]
# The worst outcome decides, in this order.
_CODES = {
    "regressed": ExitCode.REGRESSED,
    "inconclusive": ExitCode.INCONCLUSIVE,
    "no-evidence": ExitCode.NO_EVIDENCE,
    "pass": ExitCode.DONE,
}


@dataclass(frozen=True)
class GateRow:
    """One suite's answer on its primary metric."""

    suite: str
    role: str
    metric: str
    requirement: Requirement
    outcome: str
    n: int
    difference: float | None
    low: float | None
    high: float | None
    margin: float
    p_value: float | None
    p_adjusted: float | None
    message: str


@dataclass(frozen=True)
class GateAnswer:
    """All suites, and the exit code of the worst."""

    rows: tuple[GateRow, ...]
    correction: Correction = "all-must-pass"

    @property
    def explained(self) -> str:
        """One sentence: what the p-values were corrected for, or why nothing had to be."""
        claims = sum(row.requirement == "improvement" for row in self.rows)
        if claims < 2 or self.correction == "all-must-pass":
            return "every suite must pass; that needs no correction for their number"
        return f"every suite must pass; p-values of {claims} claims of improvement corrected ({explain(self.correction)})"

    @property
    def outcome(self) -> str:
        found = {row.outcome for row in self.rows}
        return next(outcome for outcome in _CODES if outcome in found)

    @property
    def exit_code(self) -> ExitCode:
        return _CODES[self.outcome]

    def to_dict(self) -> dict[str, Any]:
        rows = [asdict(row) for row in self.rows]
        head = {"outcome": self.outcome, "exit_code": int(self.exit_code)}
        correction = {"method": self.correction, "explained": self.explained}
        return {**head, "correction": correction, "suites": rows}


def gate(
    results: Sequence[Mapping[str, Any]],
    *,
    require: Requirement = "improvement",
    correction: Correction = "all-must-pass",
) -> GateAnswer:
    """Judge one result of `compare_records` a suite. correction: what the recipe declared for several claims.

    require: `improvement` asks it of suites with role `task`; suites that guard (regression, forgetting) always have to
    exclude a loss beyond their margin, as all suites do under `no-regression`.
    """
    if not results:
        raise UserError(
            "there is nothing to gate: no suite was compared", fix="evaluate the run on a suite first"
        )
    rows = tuple(_judge(result, require) for result in correct_claims(results, correction))
    return GateAnswer(rows, correction)


def _judge(result: Mapping[str, Any], require: Requirement) -> GateRow:
    one = primary_of(result)
    wanted: Requirement = require if result["role"] == "task" else "no-regression"
    if not one["n"]:
        outcome = "inconclusive"
    elif wanted == "improvement":
        outcome = "pass" if one["verdict"] == "improved" else one["verdict"]
    else:
        outcome = one["noninferiority"]
    claims = wanted == "improvement"
    return GateRow(
        suite=result["suite"],
        role=result["role"],
        metric=one["metric"],
        requirement=wanted,
        outcome=outcome,
        n=one["n"],
        difference=one["difference"],
        low=one["low"],
        high=one["high"],
        margin=one["margin"],
        p_value=one["p_value"] if claims else None,
        p_adjusted=one.get("p_adjusted") if claims else None,
        message=_message(one, outcome, wanted),
    )


def describe_difference(one: Mapping[str, Any]) -> str:
    """'+30.4 points [+25.0, +35.8] at 95 %, n = 240'; 'nothing compared (n = 0)' when there is nothing."""
    if one["difference"] is None:
        return "nothing compared (n = 0)"
    unit, shown = (" points", points) if is_share(one) else ("", lambda value: f"{value:+.4g}")
    return (
        f"{shown(one['difference'])}{unit} [{shown(one['low'])}, {shown(one['high'])}] "
        f"at {one['confidence'] * 100:g} %, n = {one['n']}"
    )


def is_share(one: Mapping[str, Any]) -> bool:
    """Whether a difference reads best in percentage points: both means lie in [0, 1], and the metric has no unit of its own."""
    return not one.get("open_ended", False) and all(0.0 <= one[side] <= 1.0 for side in ("mean_a", "mean_b"))


def _message(one: Mapping[str, Any], outcome: str, wanted: Requirement) -> str:
    head = f"{one['metric']}: {describe_difference(one)}"
    if outcome == "pass":
        why = "improved" if wanted == "improvement" else f"a loss beyond {_margin(one)} is excluded"
    elif outcome == "regressed":
        why = "worse than the baseline"
    elif outcome == "no-evidence":
        why = "no gain is shown"
    else:
        why = f"neither a gain nor a loss beyond {_margin(one)} can be excluded"
    if wanted == "improvement" and one["p_value"] is not None:
        why += f" ({_p_values(one)})"
    more = [one.get("limits"), *one.get("notes", [])] if outcome in ("inconclusive", "no-evidence") else []
    return ". ".join([f"{head}; {why}", *(text for text in more if text)])


def _margin(one: Mapping[str, Any]) -> str:
    """The margin as the difference is told: '2 points' for shares."""
    return f"{one['margin'] * 100:g} points" if one["n"] and is_share(one) else f"{one['margin']:g}"


def _p_values(one: Mapping[str, Any]) -> str:
    """'p = 0.012', and what is left of it after the correction where that changed it."""
    text, adjusted = f"p = {one['p_value']:.3g}", one.get("p_adjusted")
    return (
        f"{text}, {one['correction']}-corrected {adjusted:.3g}"
        if adjusted not in (None, one["p_value"])
        else text
    )


def to_junit(answer: GateAnswer) -> str:
    """JUnit XML: one test case a suite; what could not be decided is an error, what got worse a failure."""
    root = ElementTree.Element("testsuites", name="finetune eval gate")
    failures = sum(row.outcome in ("regressed", "no-evidence") for row in answer.rows)
    errors = sum(row.outcome == "inconclusive" for row in answer.rows)
    counts: dict[str, str] = {
        "tests": str(len(answer.rows)),
        "failures": str(failures),
        "errors": str(errors),
    }
    group = ElementTree.SubElement(root, "testsuite", {"name": "evaluation", **counts})
    for row in answer.rows:
        case = ElementTree.SubElement(group, "testcase", classname=f"eval.{row.suite}", name=row.metric)
        if row.outcome in ("regressed", "no-evidence"):
            ElementTree.SubElement(case, "failure", message=row.message, type=row.outcome)
        elif row.outcome == "inconclusive":
            ElementTree.SubElement(case, "error", message=row.message, type=row.outcome)
        else:
            ElementTree.SubElement(case, "system-out").text = row.message
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def to_markdown(answer: GateAnswer, baseline: str) -> str:
    """A table for a pull request."""
    lines = [
        f"**Evaluation gate: {answer.outcome}** (against {_cell(baseline)})",
        "",
        "| suite | role | metric | difference | margin | n | p | corrected p | outcome |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in answer.rows:
        difference = (
            row.message.split(": ", 1)[1].split(" at ", 1)[0] if row.difference is not None else "none"
        )
        p_values = ["" if value is None else f"{value:.3g}" for value in (row.p_value, row.p_adjusted)]
        head = [row.suite, row.role, row.metric, difference, f"{row.margin:g}", str(row.n)]
        lines.append("| " + " | ".join(map(_cell, [*head, *p_values, row.outcome])) + " |")
    return "\n".join([*lines, "", f"{answer.explained[0].upper()}{answer.explained[1:]}."]) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
