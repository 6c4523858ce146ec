"""The gate: from comparisons to one answer that a build server can act on.

Every suite must pass. That needs no correction for many suites: the gate opens only when each suite passes its own
test, so more suites can make it stricter but never laxer. Nothing compared is never a pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal
from xml.etree import ElementTree

from finetune.errors import ExitCode, UserError

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
    message: str


@dataclass(frozen=True)
class GateAnswer:
    """All suites, and the exit code of the worst."""

    rows: tuple[GateRow, ...]

    @property
    def outcome(self) -> str:
        found = {row.outcome for row in self.rows}
        return next(outcome for outcome in _CODES if outcome in found)

    @property
    def exit_code(self) -> ExitCode:
        return _CODES[self.outcome]

    def to_dict(self) -> dict[str, Any]:
        rows = [asdict(row) for row in self.rows]
        return {"outcome": self.outcome, "exit_code": int(self.exit_code), "suites": rows}


def gate(results: Sequence[Mapping[str, Any]], *, require: Requirement = "improvement") -> GateAnswer:
    """Judge one result of `compare_records` a suite.

    require: `improvement` asks it of suites with role `task`; suites that guard (regression, forgetting) always have to
    exclude a loss beyond their margin, as all suites do under `no-regression`.
    """
    if not results:
        raise UserError(
            "there is nothing to gate: no suite was compared", fix="evaluate the run on a suite first"
        )
    return GateAnswer(tuple(_judge(result, require) for result in results))


def _judge(result: Mapping[str, Any], require: Requirement) -> GateRow:
    one = primary_of(result)
    wanted: Requirement = require if result["role"] == "task" else "no-regression"
    if not one["n"]:
        outcome = "inconclusive"
    elif wanted == "improvement":
        outcome = "pass" if one["verdict"] == "improved" else one["verdict"]
    else:
        outcome = one["noninferiority"]
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
        message=_message(one, outcome, wanted),
    )


def primary_of(result: Mapping[str, Any]) -> dict[str, Any]:
    """The comparison that decides a suite."""
    return next(
        dict(one)
        for one in result["comparisons"]
        if one["suite"] == result["suite"] and one["metric"] == result["primary_metric"]
    )


def describe_difference(one: Mapping[str, Any]) -> str:
    """'+30.4 points [+25.0, +35.8] at 95 %, n = 240'; 'nothing compared' when there is nothing."""
    if one["difference"] is None:
        return "nothing compared (n = 0)"
    scale, unit = (100.0, " points") if is_share(one) else (1.0, "")
    return (
        f"{one['difference'] * scale:+.4g}{unit} [{one['low'] * scale:+.4g}, {one['high'] * scale:+.4g}] "
        f"at {one['confidence']:.0%}, n = {one['n']}"
    )


def is_share(one: Mapping[str, Any]) -> bool:
    """Whether both means lie in [0, 1], so that a difference reads best in percentage points."""
    return all(0.0 <= one[side] <= 1.0 for side in ("mean_a", "mean_b"))


def _message(one: Mapping[str, Any], outcome: str, wanted: Requirement) -> str:
    head = f"{one['metric']}: {describe_difference(one)}"
    if outcome == "pass":
        why = "improved" if wanted == "improvement" else f"a loss beyond {one['margin']:g} is excluded"
    elif outcome == "regressed":
        why = "worse than the baseline"
    elif outcome == "no-evidence":
        why = "no gain is shown"
    else:
        why = f"neither a gain nor a loss beyond {one['margin']:g} can be excluded"
    limits = one.get("limits")
    return f"{head}; {why}{f'. {limits}' if limits and outcome in ('inconclusive', 'no-evidence') else ''}"


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
        "| suite | role | metric | difference | margin | n | outcome |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in answer.rows:
        difference = (
            row.message.split(": ", 1)[1].split(" at ", 1)[0] if row.difference is not None else "none"
        )
        cells = [row.suite, row.role, row.metric, difference, f"{row.margin:g}", str(row.n), row.outcome]
        lines.append("| " + " | ".join(map(_cell, cells)) + " |")
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
