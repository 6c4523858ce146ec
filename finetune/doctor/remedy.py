"""Should it be tuned at all? The reasons why a model fails at a task, what was measured of each, and the remedy to try first.

The order is that of cost: a better prompt is free, documents in the prompt cost tokens, tuning costs data and upkeep. Nothing
here says that tuning is worth it without an evaluation, and none of it loads a model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from finetune.errors import UserError
from finetune.stats.means import wilson_interval
from finetune.stats.plan import plan_power

Knowledge = Literal["stable", "changes"]
First = Literal["nothing", "prompt", "documents", "format", "examples", "tuning", "items"]

FEWEST_EXAMPLES = 500  # below, a tuned model mostly learns the form; the usual range is 500 to 5,000
_MOSTLY = 0.5
_PLAUSIBLE_SHARE_MENDED = 0.25
_ZERO_SHOT, _DOCUMENTS = "zero_shot", "documents"


@dataclass(frozen=True, slots=True)
class Standing:
    """What one way of asking the untuned model reached: the primary metric as a share with its 95 % interval, over n items.

    off_format: answers without the form that the metric needs; None where it takes any text. prompt_tokens: mean an item.
    gain: the paired comparison with zero-shot prompts; None for those themselves.
    """

    arm: str
    mean: float
    low: float
    high: float
    n: int
    off_format: int | None
    prompt_tokens: float
    gain: Mapping[str, Any] | None = None

    @property
    def helps(self) -> bool:
        """Whether it is shown to be better than the zero-shot prompt."""
        return self.gain is not None and self.gain["verdict"] == "improved"

    def line(self) -> str:
        """'few_shot 45.0 % [38.8, 51.3], n = 240, 1089 prompt tokens; +44.6 points [+37.9, +51.3] on zero_shot'."""
        told = (
            f"{self.arm} {_percent(self.mean)} [{100 * self.low:.1f}, {100 * self.high:.1f}], n = {self.n}, "
        )
        told += f"{self.prompt_tokens:.0f} prompt tokens"
        if self.gain is not None:
            points = [100 * self.gain[key] for key in ("difference", "low", "high")]
            told += f"; {points[0]:+.1f} points [{points[1]:+.1f}, {points[2]:+.1f}] on {_ZERO_SHOT}"
        return told


@dataclass(frozen=True, slots=True)
class Facts:
    """What no evaluation can tell. goal: share that would do. examples: answered examples at hand to learn from."""

    goal: float | None = None
    knowledge: Knowledge | None = None
    examples: int | None = None


@dataclass(frozen=True, slots=True)
class Reason:
    """One reason why the model may fail: `applies` is None where it was neither measured nor told."""

    name: str
    applies: bool | None
    evidence: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Decision:
    """The reasons in the order of their remedies' cost, what to do first, and how many items would show the gain."""

    first: First
    why: str
    reasons: tuple[Reason, ...]
    standings: tuple[Standing, ...]
    effect: float | None
    items_needed: int | None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self) -> list[str]:
        """For the screen."""
        signs = {True: "yes", False: "no", None: "not known"}
        found = [f"  {one.line()}" for one in self.standings]
        for reason in self.reasons:
            found.append(f"{reason.name}: {signs[reason.applies]} ({reason.evidence})")
            if reason.applies is not False:
                found.append(f"  remedy: {reason.remedy}")
        if self.items_needed is not None and self.effect is not None:
            n = self.standings[0].n
            have = "has enough" if n >= self.items_needed else f"has {n}"
            found.append(
                f"items: a gain of {100 * self.effect:.1f} points needs {self.items_needed:,} paired items (80 % power); the suite {have}"
            )
        return [*found, f"first: {self.first} — {self.why}"]


def decide(standings: Sequence[Standing], facts: Facts) -> Decision:
    """The remedy to try first, from what the untuned model reached in every way of asking.

    standings: zero-shot first. Raises UserError without any: no evaluation, no answer.
    """
    if not standings:
        raise UserError(
            "whether to tune cannot be said without an evaluation",
            why="a model that already does the task needs no tuning, and without items no gain can be shown",
            fix="write a suite (eval/README.md) and add --suite; `finetune stats power --effect 0.1` says how many items",
        )
    best = max(standings, key=lambda one: one.mean)
    effect = _wanted(best, facts)
    reasons = (
        _instructions(standings, effect),
        _knowledge(standings, facts, effect),
        _format(best),
        _skill(best, facts),
        _cost(standings, best),
    )
    needed = None
    if effect is not None:
        needed = plan_power(effect=effect, accuracy=best.mean).items_paired
    first, why = _first(standings, best, facts, reasons, needed)
    return Decision(first, why, reasons, tuple(standings), effect, needed)


def _wanted(best: Standing, facts: Facts) -> float | None:
    """The gain that would pay: up to the goal, else a quarter of what is wrong; None when nothing is left to gain."""
    gain = (facts.goal - best.mean) if facts.goal is not None else (1.0 - best.mean) * _PLAUSIBLE_SHARE_MENDED
    return gain if 0.0 < gain < 1.0 else None


def _first(
    standings: Sequence[Standing],
    best: Standing,
    facts: Facts,
    reasons: Sequence[Reason],
    needed: int | None,
) -> tuple[First, str]:
    if facts.goal is not None:
        enough = [one for one in standings if one.low >= facts.goal]
        if enough:
            cheapest = min(enough, key=lambda one: one.prompt_tokens)
            return (
                "nothing",
                f"{cheapest.arm} prompts reach the goal of {_percent(facts.goal)} without tuning",
            )
        if best.high >= facts.goal and best.mean >= facts.goal:
            return "items", f"{best.arm} prompts may reach the goal already: only more items can tell"
    if best.mean >= 1.0:
        return "nothing", f"{best.arm} prompts get every item right"
    _, knowledge, form, _, _ = reasons
    if knowledge.applies:
        return (
            "documents",
            "tuning freezes knowledge on the day of its data; documents in the prompt stay current",
        )
    if form.applies:
        return "format", "most failures are of form, which a server's constrained decoding mends at once"
    if not _with_examples(standings):
        return (
            "prompt",
            "no examples were shown yet, and they cost nothing: a tuning has to beat the best prompt",
        )
    if facts.examples is not None and facts.examples < FEWEST_EXAMPLES:
        return (
            "examples",
            f"{facts.examples} examples are too few to learn a task from; collect {FEWEST_EXAMPLES} or more",
        )
    if needed is not None and best.n < needed // 2:
        return "items", f"{best.n} items could not show the gain: about {needed:,} are needed before tuning"
    prompt = f"against {best.arm} prompts, the best that was found without tuning"
    return "tuning", f"what is left wrong is not form or knowledge; judge the tuned model {prompt}"


def _with_examples(standings: Sequence[Standing]) -> list[Standing]:
    return [one for one in standings if one.arm not in (_ZERO_SHOT, _DOCUMENTS)]


def _shown_to_help(one: Standing, effect: float | None) -> bool | None:
    """None where the items leave open whether it brings the gain that is wanted: nothing shown is not nothing there."""
    if one.helps:
        return True
    assert one.gain is not None, "it was compared with the zero-shot prompt"
    return None if effect is not None and one.gain["high"] >= effect else False


def _help_told(one: Standing, effect: float | None) -> str:
    """'few_shot is not shown to be better than zero_shot, and too few items to rule out a gain of 25.0 points'."""
    helps = _shown_to_help(one, effect)
    told = f"{one.arm} {'is' if helps else 'is not'} shown to be better than {_ZERO_SHOT}"
    if helps is None and effect is not None:
        told += f", and {one.n} items do not rule out {100 * effect:.1f} points"
    return told


def _instructions(standings: Sequence[Standing], effect: float | None) -> Reason:
    shown = _with_examples(standings)
    remedy = "show examples in the prompt; keep the better prompt as the opponent that tuning has to beat"
    if not shown:
        return Reason(
            "weak instructions",
            None,
            "the suite shows no examples",
            "add few_shot to the suite, and a better system text",
        )
    one = max(shown, key=lambda held: held.mean)
    return Reason("weak instructions", _shown_to_help(one, effect), _help_told(one, effect), remedy)


def _knowledge(standings: Sequence[Standing], facts: Facts, effect: float | None) -> Reason:
    remedy = "put documents in the prompt (retrieval); tune only how the model uses them"
    read = next((one for one in standings if one.arm == _DOCUMENTS), None)
    if read is not None and read.helps:
        return Reason("missing knowledge", True, _help_told(read, effect), remedy)
    if facts.knowledge == "changes":
        return Reason("missing knowledge", True, "you said that it changes", remedy)
    if read is not None:
        return Reason("missing knowledge", _shown_to_help(read, effect), _help_told(read, effect), remedy)
    if facts.knowledge == "stable":
        return Reason("missing knowledge", False, "you said that it does not change", remedy)
    return Reason(
        "missing knowledge",
        None,
        "no documents were tried",
        "try --documents FILE, or say --knowledge stable | changes",
    )


def _format(best: Standing) -> Reason:
    remedy = (
        "constrained decoding (a JSON schema at the server), then examples; tuning teaches form with few rows"
    )
    if best.off_format is None:
        return Reason(
            "wrong form", None, "the metric takes any text", "use a scorer with a form, such as valid_json"
        )
    wrong = max(round(best.n * (1.0 - best.mean)), best.off_format)
    evidence = f"{best.off_format} of {best.n} answers of {best.arm} are off-format"
    if not wrong:
        return Reason("wrong form", False, evidence, remedy)
    low, high = wilson_interval(best.off_format, wrong)
    told = f"{evidence}, {_percent(best.off_format / wrong)} [{100 * low:.1f}, {100 * high:.1f}] of what is wrong"
    mostly = None if low <= _MOSTLY < high else low > _MOSTLY
    return Reason("wrong form", mostly, told, remedy)


def _skill(best: Standing, facts: Facts) -> Reason:
    wrong = best.n * (1.0 - best.mean) - (best.off_format or 0)
    at_hand = "" if facts.examples is None else f"; {facts.examples:,} examples at hand"
    evidence = (
        f"about {max(wrong, 0.0):.0f} of {best.n} are wrong in form and all{at_hand}"
        if best.off_format is None
        else (f"about {max(wrong, 0.0):.0f} of {best.n} have the form and are wrong{at_hand}")
    )
    hidden = bool(best.off_format) and wrong < 1.0
    if hidden:
        evidence = f"what is wrong is off-format, which hides whether the content is right{at_hand}"
    return Reason(
        "domain, skill or style",
        None if hidden else wrong >= 1.0,
        evidence,
        f"tune with {FEWEST_EXAMPLES:,} to 5,000 examples: finetune run RECIPE",
    )


def _cost(standings: Sequence[Standing], best: Standing) -> Reason:
    shortest = min(standings, key=lambda one: one.prompt_tokens)
    ratio = best.prompt_tokens / max(shortest.prompt_tokens, 1.0)
    evidence = f"the best prompt is {best.prompt_tokens:.0f} tokens, {ratio:.1f} times the shortest"
    return Reason(
        "cost and latency",
        ratio >= 2.0,
        evidence,
        "a tuned model needs no examples in its prompt: finetune plan break-even says from which volume that pays",
    )


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
