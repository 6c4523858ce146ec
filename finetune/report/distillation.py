"""Student before, student after, teacher: what each scores, how large and how fast it is, and how much of the gap is closed."""

from __future__ import annotations

from dataclasses import dataclass

from finetune.errors import UserError
from finetune.report.numbers import NBSP, finite, grouped, share, significant, unit_of, words
from finetune.report.read import Arm, Record, RunFiles, as_dict, as_list, as_text, read_run
from finetune.report.tables import Cell, Table
from finetune.units import format_count

_TEACHER, _AFTER = "teacher", "tuned"


@dataclass(frozen=True, slots=True)
class Distillation:
    """A table a suite of the three models, sentences on the gap, who teaches, and what a reader must be warned of."""

    tables: tuple[Table, ...]
    gaps: tuple[str, ...]
    teacher: str
    warnings: tuple[str, ...]


def read_distillation(run: RunFiles) -> Distillation | None:
    """None for a run without a teacher."""
    facts = run.distillation
    if not facts:
        return None
    teacher, student = as_dict(facts.get("teacher")), as_dict(facts.get("student"))
    licence = as_text(teacher.get("licence"))
    warnings = (
        ()
        if licence
        else (
            "The recipe does not say what the teacher's terms allow (distil.teacher.licence): find out before the student is "
            "passed on.",
        )
    )
    return Distillation(
        tables=tuple(_table(run, suite, facts) for suite in run.suites if run.arm(suite, _TEACHER)),
        gaps=(
            *(line for suite in run.suites for line in _gap_lines(run, suite)),
            *_cache_lines(run.teacher_cache),
            *_alignment_lines(run.alignment),
            *(line for one in as_list(facts.get("generated")) for line in _generated_lines(as_dict(one))),
            *_filter_lines(run, facts),
        ),
        teacher=_teacher_sentence(facts, teacher, student, licence),
        warnings=warnings,
    )


def _teacher_sentence(facts: Record, teacher: Record, student: Record, licence: str | None) -> str:
    cut = as_list(student.get("cut_from_layers"))
    name = as_text(teacher.get("name")) or "not recorded"
    parts = [f"Teacher {name}, licence {licence or 'unknown'}"]
    if cut:
        parts.append(f"student cut from its layers {', '.join(map(str, cut))}")
    loss, way = as_dict(facts.get("loss")), as_text(facts.get("way"))
    if way != "answers" and loss:
        temperature = significant(loss.get("temperature"))
        parts.append(
            f"{words(str(loss.get('kind')))} at temperature {temperature}, targets {facts.get('targets')}"
        )
    if way == "on_policy":
        parts.append("over answers that the student sampled itself")
    return "; ".join(parts) + "."


def _table(run: RunFiles, suite: str, facts: Record) -> Table:
    against = as_text(as_dict(as_dict(run.suite_records.get(suite)).get("gap")).get("before"))
    before = run.arm(suite, against or as_text(run.recipe_value("eval.against")) or "start")
    arms = [before, run.arm(suite, _AFTER), run.arm(suite, _TEACHER)]
    metric = run.primary_metric(suite)
    rows = [(Cell(words(metric)), tuple(_score(arm, metric) for arm in arms))] if metric else []
    sizes = [as_dict(facts.get(who)) for who in ("student", "student", "teacher")]
    rows += [
        (Cell("parameters"), tuple(_size(one, sizes[2]) for one in sizes)),
        (Cell("layers"), tuple(Cell(grouped(one.get("layers"))) for one in sizes)),
        (Cell("latency, median"), tuple(_latency(arm) for arm in arms)),
    ]
    return Table(suite, ("student before", "student after", "teacher"), tuple(rows))


def _score(arm: Arm | None, metric: str) -> Cell:
    held = arm.metric(metric) if arm is not None else {}
    unit = unit_of(metric, [held.get(key) for key in ("mean", "low", "high")])
    return Cell(unit.value(held.get("mean")), unit.range(held.get("low"), held.get("high")))


def _size(one: Record, teacher: Record) -> Cell:
    count, whole = finite(one.get("parameters")), finite(teacher.get("parameters"))
    if count is None:
        return Cell(None)
    below = None if one is teacher or not whole else f"{count / whole:.2f}× the teacher's"
    return Cell(format_count(int(count)), below)


def _latency(arm: Arm | None) -> Cell:
    seconds = finite(as_dict(arm.summary.get("latency_seconds")).get("p50")) if arm is not None else None
    if seconds is None:
        return Cell(None)
    return Cell(
        f"{significant(seconds)}{NBSP}s" if seconds >= 1 else f"{significant(seconds * 1000)}{NBSP}ms"
    )


def _gap_lines(run: RunFiles, suite: str) -> list[str]:
    metrics = as_dict(as_dict(as_dict(run.suite_records.get(suite)).get("gap")).get("metrics"))
    return [f"{suite}, {words(name)}: {gap_sentence(as_dict(found))}" for name, found in metrics.items()]


def gap_sentence(found: Record) -> str:
    """'62 % of the gap to the teacher closed (95 % interval 41 % to 80 %, n 240)', or why that cannot be said."""
    n, closed = grouped(found.get("n")), share(found.get("share"), 0)
    reason = as_text(found.get("reason"))
    if closed is None:
        return f"{reason or 'no share of a gap'} (n{NBSP}{n})"
    low, high = share(found.get("low"), 0), share(found.get("high"), 0)
    if low is None or high is None:
        return f"{closed} of the gap to the teacher closed, without an interval: {reason} (n{NBSP}{n})"
    confidence = share(found.get("confidence"), 0)
    return f"{closed} of the gap to the teacher closed ({confidence} interval {low} to {high}, n{NBSP}{n})"


def _cache_lines(found: Record) -> list[str]:
    """What was kept of the teacher at every target token, and how much of its mass that is."""
    k, size, targets = (grouped(found.get(name)) for name in ("k", "bytes_per_target", "targets"))
    if k is None or size is None or targets is None:
        return []
    mass = [
        f"{share(as_dict(one).get('mean'), 2)} at temperature {temperature}"
        for temperature, one in as_dict(found.get("coverage")).items()
    ]
    held = f"; they hold {', '.join(mass)} of the teacher's mass" if mass else ""
    return [f"Teacher cache: top {k} of {targets} target tokens, {size} bytes each{held}"]


def _alignment_lines(found: Record) -> list[str]:
    """How far the tokens of two tokenizers meet, and what cannot be passed on where they do not."""
    names = ("shared_tokens", "student_tokens", "teacher_tokens", "targets_one_to_one", "targets")
    shared, own, other, alone, targets = (grouped(found.get(name)) for name in names)
    count, of = finite(found.get("targets_one_to_one")), finite(found.get("targets"))
    if shared is None or alone is None or count is None or not of:
        return []
    return [
        f"Two tokenizers, aligned by text: {shared} tokens are both models' (the student has {own}, the teacher {other}); "
        f"{alone} of {targets} targets ({share(count / of)}) lie one to one. Elsewhere only the text that comes is compared "
        "beyond its first token, and what only one model can say counts as one outcome."
    ]


def _filter_lines(run: RunFiles, facts: Record) -> list[str]:
    """What came of the same answers with the filter the other way round, where a run beside this one has learnt that."""
    mine = _filters(facts)
    lines = []
    for folder in sorted(run.folder.parent.iterdir()) if mine else []:
        if folder.name == run.folder.name or not (folder / "distillation.json").is_file():
            continue
        try:
            other = read_run(folder)
        except UserError:
            continue
        theirs = _filters(other.distillation)
        if theirs.keys() != mine.keys() or any(theirs[key] == mine[key] for key in mine):
            continue
        if _but_for_the_data(other.recipe) != _but_for_the_data(run.recipe):
            continue
        lines += [_filter_line(run, other, suite, mine) for suite in run.suites if other.arm(suite, _AFTER)]
    return lines


def _filters(facts: Record) -> dict[str, bool]:
    """Answers that rows were chosen from, by digest -> whether only what passed was kept."""
    found = [as_dict(one) for one in as_list(facts.get("generated"))]
    return {str(one["answers_of"]): one.get("filter") is not False for one in found if one.get("answers_of")}


def _but_for_the_data(recipe: Record) -> Record:
    """What a recipe says besides its name and the spec of its rows."""
    rest = {key: value for key, value in recipe.items() if key not in ("name", "description", "data")}
    return rest | {
        "data": {key: value for key, value in as_dict(recipe.get("data")).items() if key != "spec"}
    }


def _filter_line(run: RunFiles, other: RunFiles, suite: str, mine: dict[str, bool]) -> str:
    metric = run.primary_metric(suite) or ""
    scores = {True: "unknown", False: "unknown"}
    is_filtered = next(iter(mine.values()))
    for files, kept in ((run, is_filtered), (other, not is_filtered)):
        cell = _score(files.arm(suite, _AFTER), metric)
        scores[kept] = " ".join(filter(None, (cell.value, cell.below))) or "unknown"
    return (
        f"{suite}, {words(metric)}: {scores[True]} with the filter, {scores[False]} without it (runs {run.folder.name} and "
        f"{other.folder.name}; item by item: finetune eval run {run.folder.name} --baseline {other.folder.name})"
    )


_DIFFICULTIES = {
    "never": "none of the answers pass",
    "hard": "up to a third",
    "medium": "up to two thirds",
    "easy": "more",
    "always": "all",
}


def _difficulty(words_for: str, counts: Record) -> str:
    """'none of the answers pass 12', or 'up to a third 40 (21 % of their answers, 80 rows)'."""
    prompts, rows = grouped(counts.get("prompts")), grouped(counts.get("rows") or 0)
    passed, answers = finite(counts.get("passed")), finite(counts.get("answers"))
    rate = f"{share(passed / answers)} of their answers, " if passed is not None and answers else ""
    return f"{words_for} {prompts} ({rate}{rows} rows)"


def _generated_lines(found: Record) -> list[str]:
    """The teacher's answers that the student learnt from: how many passed the check, and by difficulty of the prompt."""
    answers, rate = grouped(found.get("answers")), share(found.get("pass_rate"))
    if answers is None or rate is None:
        return []
    use = "only they are learnt" if found.get("filter") is not False else "the filter is off: all are learnt"
    counts = as_dict(found.get("difficulty"))
    by = ", ".join(
        _difficulty(words_for, as_dict(counts[name]))
        for name, words_for in _DIFFICULTIES.items()
        if name in counts
    )
    name, rows = as_text(found.get("name")) or "not recorded", grouped(found.get("rows"))
    return [
        f"{name}: {answers} answers of the teacher, {rate} pass the check; {use}, {rows} rows. Prompts by how many of their "
        f"answers pass: {by}"
    ]
