"""How far the numbers can be trusted: what the items could show, noise, format failures, and a judge's calibration."""

from __future__ import annotations

from dataclasses import dataclass

from finetune.evaluation.reviewed import answer_digest
from finetune.report.comparison import Judgement, judgement
from finetune.report.numbers import NBSP, finite, grouped, sentence_case, share, significant, unit_of, whole
from finetune.report.read import Record, RunFiles, as_dict, as_list, as_text
from finetune.report.review.verdicts import summarise_review
from finetune.report.tables import Cell, Table


@dataclass(frozen=True, slots=True)
class JudgeResult:
    """What a model said of pairs of answers, and whether that counts."""

    suite: str
    name: str
    judged: Judgement
    sentences: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Trust:
    power: tuple[str, ...]
    training: tuple[str, ...]
    noise: tuple[str, ...]
    formats: Table | None
    by_hand: tuple[str, ...]
    judges: tuple[JudgeResult, ...]

    @property
    def is_empty(self) -> bool:
        return not (self.power or self.training or self.noise or self.formats or self.by_hand or self.judges)


def read_trust(run: RunFiles) -> Trust:
    power = [
        line
        for one in map(as_dict, as_list(run.power.get("suites")))
        for line in as_list(one.get("lines"))
        if isinstance(line, str)
    ]
    return Trust(
        power=tuple(f"{line.removeprefix('power: ')}." for line in power),
        training=_training(run),
        noise=_noise(run),
        formats=_formats(run),
        by_hand=_by_hand(run),
        judges=(*_judges(run), *_pointwise(run)),
    )


def _training(run: RunFiles) -> tuple[str, ...]:
    """What training itself found worth a look, once each: a margin that stays away, chosen answers that become unlikely."""
    found: dict[str, str] = {}
    for event in run.events:
        message = as_text(event.get("message"))
        if event.get("event") == "flag" and message:
            found.setdefault(str(event.get("name")), f"{sentence_case(message).removesuffix('.')}.")
    return tuple(found.values())


def _noise(run: RunFiles) -> tuple[str, ...]:
    """The A/A run of each suite, the newest of several."""
    newest: dict[str, Record] = {}
    for comparison in (run.comparison, *(one.record for one in run.later)):
        for record in map(as_dict, as_list(comparison.get("noise"))):
            newest[str(record.get("suite"))] = record
    found = []
    for suite, record in newest.items():
        n, changed = grouped(record.get("n")), grouped(record.get("answers_changed"))
        flipped, rate = grouped(record.get("scores_flipped")), share(record.get("flip_rate"))
        most = share(record.get("high"))
        found.append(
            f"{suite}: the base model answered twice; {changed} of {n} answers and {flipped} scores changed by themselves "
            f"(noise floor {rate}, at most {most})."
        )
    return (*found, *_repeats(run))


def _repeats(run: RunFiles) -> tuple[str, ...]:
    """What repeated answers and an early stop say of each deciding metric."""
    primary = as_dict(run.comparison.get("primary_metrics"))
    found = []
    for record in map(as_dict, as_list(run.comparison.get("comparisons"))):
        suite = str(record.get("suite"))
        if record.get("metric") != primary.get(suite):
            continue
        if noise := as_dict(record.get("noise")):
            found.append(
                f"{suite}: {significant(noise.get('repeats'), 2)} answers an item; sampling makes "
                f"{share(noise.get('sampling_share'))} of the squared error, and more repeats could narrow the interval by "
                f"{share(noise.get('narrower_at_most'))} at most."
            )
        if stop := as_dict(record.get("sequential")):
            where = "stopped early, after" if stop.get("stopped") else "not stopped early:"
            found.append(
                f"{suite}: {where} {grouped(stop.get('answered'))} of {grouped(stop.get('of'))} items, e-value "
                f"{significant(stop.get('e_value'), 3)} ({significant(stop.get('needed'), 3)} is enough; valid at every look)."
            )
    return tuple(dict.fromkeys(found))


def _formats(run: RunFiles) -> Table | None:
    """Answers without the form that the deciding metric needs, arm against arm."""
    rows = []
    for record in map(as_dict, as_list(run.comparison.get("comparisons"))):
        off, suite = as_dict(record.get("off_format")), as_text(record.get("suite")) or ""
        if not off or record.get("metric") != run.primary_metric(suite):
            continue
        wrong = as_dict(off.get("wrong_in_format"))
        n = grouped(record.get("n"))
        before, after = (f"{grouped(off.get(side))} of {n}" for side in ("baseline", "arm"))
        changed = f"{grouped(off.get('only_baseline'))} mended, {grouped(off.get('only_arm'))} new"
        cells = (
            Cell(before),
            Cell(after, changed),
            Cell(f"{grouped(wrong.get('baseline'))} → {grouped(wrong.get('arm'))}"),
        )
        rows.append(
            (Cell(suite, f"against {as_text(record.get('baseline')) or ''}".replace("_", "-")), cells)
        )
    if not rows:
        return None
    columns = ("off-format before", "off-format tuned", "in format, not fully right")
    return Table("Format failures", columns, tuple(rows))


def _by_hand(run: RunFiles) -> tuple[str, ...]:
    """What a person found of the answers that are in the folder now, suite by suite."""
    verdicts: dict[str, dict[str, Record]] = {}
    for line in run.reviewed:
        suite, item = str(line.get("suite")), str(line.get("item"))
        tuned = run.arm(suite, "tuned")
        output = as_dict(tuned.items.get(item)).get("output") if tuned else None
        sides = [as_dict(line.get(key)) for key in ("right", "scorer", "answers")]
        is_whole = all({"baseline", "tuned"} <= side.keys() for side in sides)
        if is_whole and isinstance(output, str) and sides[2]["tuned"] == answer_digest(output):
            verdicts.setdefault(suite, {})[item] = {"note": "", **line}
    found = []
    for suite, lines in verdicts.items():
        seen = summarise_review(list(lines.values()))
        text = (
            f"{suite}: {seen['read']} items were read; reader and scorer agree on {seen['agreed']} of {seen['answers']} "
            f"answers, {share(seen['agreement'])} ({share(seen['low'])} to {share(seen['high'])})"
        )
        if seen["kappa"] is not None:
            text += f", kappa{NBSP}{significant(seen['kappa'], 2)}"
        found.append(
            f"{text}. {seen['tuned_wrong']} tuned answers were found wrong: the failure rate on items drawn like these is "
            f"below {share(seen['failure_rate_below'])}."
        )
    return tuple(found)


def _judges(run: RunFiles) -> tuple[JudgeResult, ...]:
    found = []
    for record in run.judges:
        trust = as_dict(record.get("calibration"))
        counts = [grouped(record.get(key)) for key in ("won", "tied", "lost", "n")]
        win_rate = share(record.get("win_rate"))
        sentences = [
            f"The tuned model won {counts[0]}, tied {counts[1]} and lost {counts[2]} of {counts[3]} pairs (win rate "
            f"{win_rate}, a tie is half)."
        ]
        comparison = as_dict(record.get("comparison"))
        unit = unit_of("", [comparison.get(key) for key in ("difference", "low", "high")])
        if (interval := unit.interval(comparison.get("low"), comparison.get("high"))) is not None:
            difference = unit.difference(comparison.get("difference"))
            sentences.append(f"Wins minus losses: {difference} (interval {interval}).")
        if missing := whole(record.get("missing")):
            sentences.append(f"{missing:,} pairs were not judged; they are left out, not lost.")
        sentences += _bias(as_dict(record.get("position_bias")))
        sentences += _calibration(trust)
        found.append(
            JudgeResult(
                str(record.get("suite")),
                str(record.get("judge")),
                judgement(record.get("verdict")) if trust.get("calibrated") else _NOT_YET,
                tuple(sentences),
            )
        )
    return tuple(found)


_NOT_YET = Judgement("Does not count yet", "unsure", "question")


def _pointwise(run: RunFiles) -> tuple[JudgeResult, ...]:
    """Judges that score single answers, as metrics of a suite."""
    found = []
    comparisons = [run.comparison, *(one.record for one in run.later if one.against_base)]
    seen: set[tuple[str, str]] = set()
    for record in (as_dict(one) for held in comparisons for one in as_list(held.get("comparisons"))):
        judge = as_dict(record.get("judge"))
        suite, metric = str(record.get("suite")), str(record.get("metric"))
        if not judge or (suite, metric) in seen:
            continue
        seen.add((suite, metric))
        trust = as_dict(judge.get("calibration"))
        missing = whole(as_dict(record.get("missing")).get("items"))
        sentences = [f"It gives the metric {metric}.", *_calibration(trust)]
        if missing:
            sentences.append(f"{missing:,} items have no score of it; they are left out, not lost.")
        judged = judgement(record.get("verdict")) if trust.get("calibrated") else _NOT_YET
        found.append(JudgeResult(suite, str(judge.get("name")), judged, tuple(sentences)))
    return tuple(found)


def _bias(bias: Record) -> list[str]:
    if not bias:
        return []
    ends = share(bias.get("low")), share(bias.get("high"))
    places = grouped(bias.get("first_preferred")), grouped(bias.get("second_preferred"))
    return [
        f"Position bias: {share(bias.get('rate'))} (interval {ends[0]} to {ends[1]}) of {grouped(bias.get('n'))} pairs "
        f"turned with the order and count as ties; the first place was preferred {places[0]} times, the second {places[1]}."
    ]


def _calibration(trust: Record) -> list[str]:
    if not finite(trust.get("n")):
        return ["Nothing that it judged was read by hand, so nothing is known of it: finetune review."]
    ends = share(trust.get("low")), share(trust.get("high"))
    text = (
        f"It agrees with the reader on {grouped(trust.get('agreed'))} of {grouped(trust.get('n'))}: "
        f"{share(trust.get('agreement'))} (interval {ends[0]} to {ends[1]})"
    )
    kappa = finite(trust.get("kappa"))
    if kappa is not None:
        spread = f"{significant(trust.get('kappa_low'), 2)} to {significant(trust.get('kappa_high'), 2)}"
        text += f", kappa{NBSP}{significant(kappa, 2)} ({spread})"
    return [f"{text}."]
