"""The answers to read: every broken one, then fixed, both wrong and both right by seeded sampling, arms side by side."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from markupsafe import Markup

from finetune.report.comparison import Comparison
from finetune.report.numbers import arm_name, finite, significant, whole, words
from finetune.report.read import Arm, Record, RunFiles, as_dict, as_text
from finetune.report.untrusted import against_reference, untrusted

SHOWN = 40
_TEXTS_SHOWN = 10
_RIGHT = 1.0 - 1e-9
_PROMPT_CHARACTERS = 600
_FULL_PROMPT_CHARACTERS = 4000


@dataclass(frozen=True, slots=True)
class Outcome:
    """One of the four cells, as a heading of the answers."""

    key: str
    word: str
    style: str
    icon: str


OUTCOMES = (
    Outcome("broken", "Broken", "bad", "down"),
    Outcome("fixed", "Fixed", "good", "up"),
    Outcome("both_wrong", "Both wrong", "neutral", "cross"),
    Outcome("both_right", "Both right", "neutral", "check"),
)


_LESS_LIKELY = Outcome("less_likely", "Less likely", "bad", "down")


@dataclass(frozen=True, slots=True)
class Answer:
    """What one arm said to one item."""

    arm: str
    text: Markup
    is_empty: bool
    is_right: bool | None
    score: str | None
    n_tokens: int | None
    was_cut: bool
    is_measured: bool = False  # a likelihood, not something that the model wrote


@dataclass(frozen=True, slots=True)
class Item:
    identity: str
    cluster: str | None
    tags: tuple[str, ...]
    prompt: Markup
    full_prompt: Markup | None
    reference: Markup
    answers: tuple[Answer, ...]


@dataclass(frozen=True, slots=True)
class Group:
    outcome: Outcome
    n: int
    items: tuple[Item, ...]


@dataclass(frozen=True, slots=True)
class Reading:
    """Answers of one suite: groups in reading order, or the reason why there is nothing to read."""

    suite: str
    metric: str
    against: str
    groups: tuple[Group, ...]
    n_shown: int
    n_items: int
    shared_prompt: Markup | None
    remarks: tuple[str, ...]
    missing: str | None = None

    @property
    def measures(self) -> bool:
        """Whether the suite measures texts instead of asking for answers."""
        return any(group.outcome is _LESS_LIKELY for group in self.groups)

    @property
    def only_broken(self) -> bool:
        return {group.outcome.key for group in self.groups} == {"broken"}


def read_answers(
    run: RunFiles, primary: Comparison | None, comparisons: Sequence[Comparison]
) -> tuple[Reading, ...]:
    """Forty answers (or all broken ones, if they are more) of the deciding suite, and the broken ones of every other."""
    readings = []
    for suite in run.suites:
        decides = primary is not None and suite == primary.text("suite")
        own = [one for one in comparisons if one.text("suite") == suite and one.origin is None]
        deciding = primary if decides else next((one for one in own if one.decides_suite), None)
        if deciding is not None and deciding.lower_is_better:
            readings.append(_read_texts(run, suite, deciding))
            continue
        metric = deciding.text("metric") if deciding else _first_metric(run, suite)
        declared = as_text(run.recipe_value("eval.against")) or "few_shot"
        against = (deciding.text("baseline") if deciding else "") or declared
        reading = _read_suite(run, suite, metric, against, only_broken=primary is not None and not decides)
        readings.append(_checked(reading, deciding) if deciding else reading)
    return tuple(readings)


def _first_metric(run: RunFiles, suite: str) -> str:
    """The first metric that a summary of the suite names; empty when none does."""
    return next((name for arm in run.arms_of(suite) for name in as_dict(arm.summary.get("metrics"))), "")


def _nothing(suite: str, metric: str, against: str, missing: str) -> Reading:
    return Reading(suite, metric, against, (), 0, 0, None, (), missing)


def _read_suite(run: RunFiles, suite: str, metric: str, against: str, *, only_broken: bool) -> Reading:
    tuned, baseline = run.arm(suite, "tuned"), run.arm(suite, against)
    if tuned is None or not tuned.items:
        return _nothing(suite, metric, against, "The tuned model has no stored answers on this suite.")
    if baseline is None or not baseline.items:
        missing = f"The arm '{arm_name(against)}' has no stored answers on this suite, so nothing can be set side by side."
        return _nothing(suite, metric, against, missing)
    if not metric:
        return _nothing(
            suite, metric, against, "No metric is named for this suite, so no answer can be called right."
        )
    cells, n_unscored = classify(baseline, tuned, metric)
    chosen = (
        {"broken": cells["broken"]} if only_broken else choose(cells, seed=whole(run.recipe.get("seed")) or 0)
    )
    arms = [arm for arm in run.arms_of(suite) if arm.items]
    shared = shared_ends([str(record.get("prompt") or "") for record in tuned.items.values()])
    groups = tuple(
        Group(
            outcome,
            len(cells[outcome.key]),
            tuple(_item(one, arms, metric, shared) for one in chosen[outcome.key]),
        )
        for outcome in OUTCOMES
        if outcome.key in chosen
    )
    around = f"{shared[0]}\u2026{shared[1]}" if any(shared) else ""
    return Reading(
        suite=suite,
        metric=metric,
        against=against,
        groups=groups,
        n_shown=sum(len(group.items) for group in groups),
        n_items=sum(len(names) for names in cells.values()),
        shared_prompt=untrusted(around, _FULL_PROMPT_CHARACTERS) if around else None,
        remarks=_remarks(baseline, tuned, n_unscored),
    )


def _read_texts(run: RunFiles, suite: str, deciding: Comparison) -> Reading:
    """A suite that measures texts: those that the tuned model finds less likely than before, the largest loss first."""
    metric, against = deciding.text("metric"), deciding.text("baseline")
    tuned, baseline = run.arm(suite, "tuned"), run.arm(suite, against)
    if tuned is None or baseline is None:
        return _nothing(suite, metric, against, "Both arms are needed to see which texts lost.")
    losses = []
    for name, record in tuned.items.items():
        before, after = _score(baseline.items.get(name, {}), metric), _score(record, metric)
        if before is not None and after is not None and after > before:
            losses.append((after - before, name))
    worst = [name for _, name in sorted(losses, key=lambda loss: (-loss[0], loss[1]))[:_TEXTS_SHOWN]]
    arms = [arm for arm in run.arms_of(suite) if arm.items]
    items = tuple(_text_item(name, arms, metric) for name in worst)
    return Reading(
        suite=suite,
        metric=metric,
        against=against,
        groups=(Group(_LESS_LIKELY, len(losses), items),),
        n_shown=len(items),
        n_items=len(tuned.items),
        shared_prompt=None,
        remarks=(),
    )


def _text_item(name: str, arms: Sequence[Arm], metric: str) -> Item:
    item = _item(name, arms, metric, ("", ""))
    answers = tuple(
        Answer(
            arm=arm_name(arm.name),
            text=untrusted(
                f"{words(metric)} {significant(_score(arm.items[name], metric)) or 'not recorded'}"
            ),
            is_empty=False,
            is_right=None,
            score=None,
            n_tokens=whole(arm.items[name].get("output_tokens")),
            was_cut=False,
            is_measured=True,
        )
        for arm in arms
        if name in arm.items
    )
    return replace(item, prompt=Markup(""), full_prompt=None, answers=answers)


def _score(record: Record, metric: str) -> float | None:
    return finite(as_dict(record.get("scores")).get(metric))


def classify(baseline: Arm, tuned: Arm, metric: str) -> tuple[dict[str, list[str]], int]:
    """Items of both arms by outcome, in the order of the tuned arm, and how many lack a score on either side.

    Right is a full score of 1. On a graded metric (any score strictly between 0 and 1) an item whose score fell
    counts as broken and one whose score rose as fixed.
    """
    cells: dict[str, list[str]] = {outcome.key: [] for outcome in OUTCOMES}
    n_unscored = 0
    for name, record in tuned.items.items():
        if name not in baseline.items:
            continue
        before, after = _score(baseline.items[name], metric), _score(record, metric)
        if before is None or after is None:
            n_unscored += 1
        elif before == after:
            cells["both_right" if after >= _RIGHT else "both_wrong"].append(name)
        else:
            cells["fixed" if after > before else "broken"].append(name)
    return cells, n_unscored


def choose(cells: dict[str, list[str]], *, seed: int, n_wanted: int = SHOWN) -> dict[str, list[str]]:
    """All broken items, then equal parts of the other cells up to `n_wanted` in all; what one lacks, others fill."""
    chosen = {"broken": list(cells["broken"])}
    room = max(0, n_wanted - len(chosen["broken"]))
    keys = ["fixed", "both_wrong", "both_right"]
    quota = dict.fromkeys(keys, 0)
    while room and any(quota[key] < len(cells[key]) for key in keys):
        for key in keys:
            if room and quota[key] < len(cells[key]):
                quota[key] += 1
                room -= 1
    for key in keys:
        generator = random.Random(f"{seed}/{key}")
        picked = set(generator.sample(sorted(cells[key]), quota[key]))
        chosen[key] = [name for name in cells[key] if name in picked]
    return chosen


def shared_ends(prompts: Sequence[str]) -> tuple[str, str]:
    """What all prompts begin and end with, cut at line ends: instructions and template, not the question itself."""
    if len(set(prompts)) < 2:
        return "", ""
    start = _shared_start(prompts)
    start = start[: start.rfind("\n") + 1]
    rests = [prompt[len(start) :] for prompt in prompts]
    end = _shared_start([rest[::-1] for rest in rests])[::-1]
    marker, newline = end.find("<|"), end.find("\n")
    cut = min((at for at in (marker, newline) if at >= 0), default=len(end))
    return start, end[cut:]


def _shared_start(texts: Sequence[str]) -> str:
    """The longest common start: that of the first and the last in order, between which all others lie."""
    first, last = min(texts), max(texts)
    return first[
        : next((at for at, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
    ]


def _item(name: str, arms: Sequence[Arm], metric: str, shared: tuple[str, str]) -> Item:
    record = next(arm.items[name] for arm in reversed(arms) if name in arm.items)
    whole_prompt = str(record.get("prompt") or "")
    prompt = whole_prompt.removeprefix(shared[0]).removesuffix(shared[1]).strip("\n")
    hidden = len(prompt) - _PROMPT_CHARACTERS
    shown = untrusted(prompt[-_PROMPT_CHARACTERS:])
    if hidden > 0:
        shown = Markup('<span class="clip">{:,} characters before …</span> ').format(hidden) + shown
    reference = str(record.get("reference") or "")
    return Item(
        identity=name,
        cluster=as_text(record.get("cluster")),
        tags=tuple(f"{key} {value}" for key, value in as_dict(record.get("tags")).items()),
        prompt=shown,
        full_prompt=untrusted(whole_prompt, _FULL_PROMPT_CHARACTERS) if whole_prompt != prompt else None,
        reference=untrusted(reference),
        answers=tuple(_answer(arm, arm.items[name], metric, reference) for arm in arms if name in arm.items),
    )


def _answer(arm: Arm, record: Record, metric: str, reference: str) -> Answer:
    output, score = str(record.get("output") or ""), _score(record, metric)
    graded = score is not None and score not in (0.0, 1.0)
    return Answer(
        arm=arm_name(arm.name),
        text=against_reference(output, reference),
        is_empty=not output.strip(),
        is_right=None if score is None else score >= _RIGHT,
        score=significant(score, 2) if graded else None,
        n_tokens=whole(record.get("output_tokens")),
        was_cut=record.get("finish_reason") == "length",
    )


def _remarks(baseline: Arm, tuned: Arm, n_unscored: int) -> tuple[str, ...]:
    remarks = []
    if n_unscored:
        remarks.append(
            f"{n_unscored} items have no score in one of the two arms and are left out of the groups."
        )
    for mine, other in ((baseline, tuned), (tuned, baseline)):
        n_alone = len(mine.items.keys() - other.items.keys())
        if n_alone:
            remarks.append(f"{n_alone} items have an answer only in the arm '{arm_name(mine.name)}'.")
    return tuple(remarks)


def _checked(reading: Reading, deciding: Comparison) -> Reading:
    """Say so when the stored answers do not give the counts of the comparison: one of the two files is stale."""
    differing = [
        f"{group.outcome.word.lower()} {group.n} here, {declared} in the comparison"
        for group in reading.groups
        if (declared := whole(deciding.record.get(group.outcome.key))) is not None and declared != group.n
    ]
    if not differing:
        return reading
    remark = f"The stored answers do not give the counts of the comparison: {'; '.join(differing)}."
    return Reading(
        reading.suite,
        reading.metric,
        reading.against,
        reading.groups,
        reading.n_shown,
        reading.n_items,
        reading.shared_prompt,
        (*reading.remarks, remark),
    )
