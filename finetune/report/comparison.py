"""One paired comparison, and what its numbers are called in words."""

from __future__ import annotations

from dataclasses import dataclass, replace

from finetune.report.numbers import (
    NBSP,
    Unit,
    arm_in_prose,
    arm_name,
    confidence_name,
    finite,
    grouped,
    p_value,
    sentence_case,
    unit_of,
    whole,
    words,
)
from finetune.report.read import Record, RunFiles, as_dict, as_list, as_text

CELLS = ("both_right", "fixed", "broken", "both_wrong")


@dataclass(frozen=True, slots=True)
class Judgement:
    """A verdict as the page shows it: always a word and an icon, the colour only repeats them."""

    word: str
    style: str
    icon: str


_JUDGEMENTS = {
    "improved": Judgement("Improved", "good", "up"),
    "pass": Judgement("Within margin", "good", "check"),
    "regressed": Judgement("Regressed", "bad", "down"),
    "no-evidence": Judgement("No evidence of improvement", "neutral", "equal"),
    "inconclusive": Judgement("Inconclusive", "unsure", "question"),
}
UNJUDGED = Judgement("No verdict yet", "neutral", "pause")
# A student is measured against its teacher to see what is left, not to have lost anything.
_BESIDE_TEACHER = {
    "improved": Judgement("Above the teacher", "good", "up"),
    "regressed": Judgement("Below the teacher", "neutral", "down"),
}
_TEACHER = "teacher"


def judgement(verdict: object) -> Judgement:
    """The face of a verdict; one this page does not know keeps its own word and stays neutral."""
    name = as_text(verdict)
    if name is None:
        return UNJUDGED
    key = name.replace("_", "-").lower()
    return _JUDGEMENTS.get(key, Judgement(sentence_case(words(name)), "neutral", "question"))


@dataclass(frozen=True, slots=True)
class Comparison:
    """One paired comparison of comparison.json, with its numbers formatted and its row of the forest plot."""

    record: Record
    unit: Unit
    decides_suite: bool = False
    guards: bool = False
    origin: str | None = (
        None  # the later comparison that it comes from, where that is not against the run's own base
    )

    def text(self, key: str) -> str:
        return as_text(self.record.get(key)) or ""

    def number(self, key: str) -> float | None:
        return finite(self.record.get(key))

    @property
    def judged(self) -> Judgement:
        """The verdict; of a suite that guards, whether a loss beyond the margin is excluded."""
        if (
            self.guards
            and self.record.get("noninferiority") == "pass"
            and self.record.get("verdict") != "improved"
        ):
            return judgement("pass")
        verdict = self.record.get("verdict")
        if self.text("baseline") == _TEACHER and verdict in _BESIDE_TEACHER:
            return _BESIDE_TEACHER[verdict]
        return judgement(verdict)

    @property
    def lower_is_better(self) -> bool:
        return self.record.get("higher_is_better") is False

    @property
    def margin_at(self) -> float | None:
        """Where on the axis a loss of the margin lies."""
        margin = self.number("margin")
        return None if margin is None else abs(margin) if self.lower_is_better else -abs(margin)

    @property
    def metric(self) -> str:
        return words(self.text("metric"))

    @property
    def baseline(self) -> str:
        arm = arm_name(self.text("baseline"))
        return f"{arm} of {self.origin}" if self.origin else arm

    @property
    def n(self) -> str | None:
        return grouped(self.record.get("n"))

    @property
    def difference(self) -> str | None:
        return self.unit.difference(self.record.get("difference"))

    @property
    def interval(self) -> str | None:
        return self.unit.interval(self.record.get("low"), self.record.get("high"))

    @property
    def margin(self) -> str | None:
        return self.unit.size(self.record.get("margin"))

    @property
    def p_value(self) -> str | None:
        return p_value(self.record.get("p_value"))

    @property
    def p_adjusted(self) -> str | None:
        """The p-value after the correction for several claims; None where it changed nothing."""
        adjusted = self.record.get("p_adjusted")
        if adjusted is None or adjusted == self.record.get("p_value"):
            return None
        return f"{p_value(adjusted)} after {words(self.text('correction'))}"

    @property
    def cells(self) -> dict[str, str | None]:
        return {name: grouped(self.record.get(name)) for name in CELLS}

    @property
    def has_cells(self) -> bool:
        return any(text is not None for text in self.cells.values())

    def in_brackets(self) -> str:
        """The uncertainty that follows every difference: '95 % interval +53.9 to +68.2, n = 204 items in 31 clusters'."""
        confidence = confidence_name(self.record.get("confidence"))
        spread = f"{confidence} {self.interval}" if self.interval else "no interval recorded"
        size = f"n{NBSP}={NBSP}{self.n} items" if self.n else "n not recorded"
        clusters = whole(self.record.get("clusters"))
        return f"{spread}, {size}" + (f" in {clusters:,} clusters" if clusters else "")

    def limits(self) -> str | None:
        """What this many items could not have shown, and how many more would settle an inconclusive verdict."""
        smallest = self.unit.size(self.record.get("least_detectable"))
        if smallest is None or self.n is None:
            return None
        text = f"{self.n} items cannot tell a difference below {smallest} (80{NBSP}% power)"
        more = grouped(self.record.get("items_to_settle"))
        return f"{text}; about {more} more would settle it." if more else f"{text}."

    def sentence(self, *, opens: bool = True) -> str:
        """The comparison in words, with its interval and n; `opens` when it stands at the start of a sentence."""
        subject = sentence_case(self.metric) if opens else self.metric
        if whole(self.record.get("n")) == 0:
            return f"{subject} was not compared: no items"
        against = arm_in_prose(self.text("baseline"))
        amount = self.number("difference")
        if amount is None:
            return f"{subject} against {against}: no difference recorded ({self.in_brackets()})"
        if amount == 0:
            return f"{subject} did not change against {against} ({self.in_brackets()})"
        if self.judged in _BESIDE_TEACHER.values():
            return f"{subject} is {self.unit.size(amount)} {'above' if amount > 0 else 'below'} {against} ({self.in_brackets()})"
        change = f"{'rose' if amount > 0 else 'fell'} by {self.unit.size(amount)}"
        if self.judged.style not in ("good", "bad"):  # not shown to be a rise or a fall
            change = f"moved by {self.difference}"
        return f"{subject} {change} against {against} ({self.in_brackets()})"


def read_comparisons(run: RunFiles) -> tuple[Comparison, ...]:
    """Every comparison of comparison.json, in its order; then those that later commands added, newest first."""
    found = [_comparison(run, record, None) for record in _records(run.comparison)]
    for later in reversed(run.later):
        origin = None if later.against_base else later.name
        known = {_key(one) for one in found}
        new = [_comparison(run, record, origin) for record in _records(later.record)]
        found += [one for one in new if _key(one) not in known]
    return _with_deciding(run, found)


def _records(comparison: Record) -> list[Record]:
    return [record for record in map(as_dict, as_list(comparison.get("comparisons"))) if record]


def _key(one: Comparison) -> tuple[object, ...]:
    return (*(one.record.get(name) for name in ("suite", "metric", "baseline")), one.origin)


def _comparison(run: RunFiles, record: Record, origin: str | None) -> Comparison:
    metric = as_text(record.get("metric")) or ""
    unit = unit_of(metric, [record.get(key) for key in ("difference", "low", "high", "margin")])
    return Comparison(record, unit, guards=run.guards(as_text(record.get("suite")) or ""), origin=origin)


def _with_deciding(run: RunFiles, found: list[Comparison]) -> tuple[Comparison, ...]:
    """Mark one comparison a suite (and origin): its primary metric against the declared baseline, else its first."""
    deciding: dict[tuple[str, str | None], int] = {}
    for place, one in enumerate(found):
        held = run.suite_records.get(one.text("suite"), {})
        declared = one.text("metric") == held.get("primary_metric") and (
            one.origin is not None or one.text("baseline") == held.get("against")
        )
        where = one.text("suite"), one.origin
        if where not in deciding or (declared and not found[deciding[where]].decides_suite):
            deciding[where] = place
            found[place] = replace(one, decides_suite=declared)
    chosen = set(deciding.values())
    return tuple(replace(one, decides_suite=place in chosen) for place, one in enumerate(found))
