"""The verdict in one plain sentence, and what stands beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from finetune.report.comparison import UNJUDGED, Comparison, Judgement, judgement, read_comparisons
from finetune.report.numbers import arm_name, whole
from finetune.report.read import RunFiles


@dataclass(frozen=True, slots=True)
class Verdict:
    judged: Judgement
    sentence: str
    because: tuple[tuple[Judgement, str], ...]
    levels: tuple[tuple[str, str], ...]
    primary: Comparison | None
    comparisons: tuple[Comparison, ...]


def primary_of(run: RunFiles, comparisons: Sequence[Comparison]) -> Comparison | None:
    """The comparison that decides: the primary metric of the deciding suite against the declared baseline."""
    wanted = [run.comparison.get(key) for key in ("suite", "primary_metric", "against")]
    return next(
        (
            one
            for one in comparisons
            if [one.record.get(key) for key in ("suite", "metric", "baseline")] == wanted
        ),
        None,
    )


def read_verdict(run: RunFiles) -> Verdict:
    """What the top of the page says. Without a comparison it says how far the run came."""
    comparisons = read_comparisons(run)
    primary = primary_of(run, comparisons)
    judged = judgement(run.comparison.get("verdict"))
    if judged is UNJUDGED and primary is not None:
        judged = primary.judged
    if primary is None:
        return Verdict(judged, _without_comparison(run), (), (), None, comparisons)
    because = tuple(
        (one.judged, _because(one)) for one in comparisons if one is not primary and _matters(one, primary)
    )
    return Verdict(judged, _lead(judged, primary), because, _levels(run, primary), primary, comparisons)


def _matters(one: Comparison, primary: Comparison) -> bool:
    """Whether it belongs beside the verdict: every suite that got worse or cannot tell, every metric of this one that got worse.

    What is compared with another baseline than the run's own has its row in the plot.
    """
    if one.origin is not None:
        return False
    if one.decides_suite:
        return one.judged.style in ("bad", "unsure")
    return one.text("suite") == primary.text("suite") and one.judged.style == "bad"


def _because(one: Comparison) -> str:
    return f"{one.text('suite')}: {one.sentence(opens=False)}" + (
        f", margin {one.margin}." if one.margin else "."
    )


def _lead(judged: Judgement, primary: Comparison) -> str:
    """The sentence under the verdict's word; when both agree that nothing is shown, it says what is not shown."""
    sentence = primary.sentence()
    if judged is primary.judged and judged.style == "unsure":
        sentence += ": neither a gain nor a loss beyond the margin can be told"
    elif judged is primary.judged and judged.icon == "equal" and primary.number("difference"):
        sentence += ": the interval includes no change at all"
    return f"{sentence}."


def stop_sentence(run: RunFiles) -> str | None:
    """How the training ended before its end, where the run stopped it itself."""
    stop = next((event for event in reversed(run.events) if event.get("event") in ("stop", "end")), {})
    step, onset = whole(stop.get("step")), whole(stop.get("onset"))
    if stop.get("event") != "stop" or step is None:
        return None
    if stop.get("reason") == "diverged" and onset is not None:
        return f"Training stopped at step {step}: from step {onset} on the loss was above where it began"
    if stop.get("reason") == "not_finite":
        return f"Training stopped at step {step}: its loss or gradient was not finite"
    return f"Training stopped at step {step}"


def _without_comparison(run: RunFiles) -> str:
    names = [arm.name for arm in run.arms if arm.summary or arm.items]
    has_baseline = any(name != "tuned" for name in names)
    if "tuned" in names and has_baseline:
        return "Both arms are evaluated, but their comparison is not in the run folder."
    if has_baseline:
        reached = max((whole(event.get("step")) or 0 for event in run.events), default=0)
        state = f"Training reached step {reached}" if reached else "Training has not started"
        state = stop_sentence(run) or state
        return f"The baseline is measured. {state}; the tuned model is not evaluated, so nothing can be said about it."
    return "Nothing has been evaluated in this run folder, so nothing can be said about the tuning."


def _levels(run: RunFiles, primary: Comparison) -> tuple[tuple[str, str], ...]:
    """Where both arms stand: (arm, 'value (low–high)')."""
    found = []
    for name in (primary.text("baseline"), primary.text("arm") or "tuned"):
        arm = run.arm(primary.text("suite"), name)
        held = arm.metric(primary.text("metric")) if arm else {}
        value, spread = (
            primary.unit.value(held.get("mean")),
            primary.unit.range(held.get("low"), held.get("high")),
        )
        if value:
            found.append(
                (arm_name(name), f"{value} ({spread})" if spread else f"{value} (no interval recorded)")
            )
    return tuple(found)
