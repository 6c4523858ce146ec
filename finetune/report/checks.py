"""What the doctor's checks said before the training: what needs a look first, then everything that was looked at."""

from __future__ import annotations

from dataclasses import dataclass

from finetune.report.comparison import Judgement
from finetune.report.numbers import finite, sentence_case, significant
from finetune.report.read import Record, RunFiles, as_dict, as_list, as_text

_SKIPPED = ("skipped", "neutral", "pause")
# status in the file -> word, style and icon of the page; the worst first
_STATUSES = {
    "fault": ("fault", "bad", "cross"),
    "warning": ("warning", "unsure", "question"),
    "skipped": _SKIPPED,
    "ok": ("ok", "good", "check"),
}


@dataclass(frozen=True, slots=True)
class CheckRow:
    """One finding. `number` is what was measured beside its limit, where the check has both."""

    group: str
    name: str
    judged: Judgement
    detail: str
    number: str | None
    remedy: str | None
    where: str | None


@dataclass(frozen=True, slots=True)
class Checks:
    """`pressing` are faults and warnings, the worst first; `rows` all findings in the order of the file."""

    sentence: str
    judged: Judgement
    pressing: tuple[CheckRow, ...]
    rows: tuple[CheckRow, ...]


def read_checks(run: RunFiles) -> Checks | None:
    """The findings of checks.json, or None for a run that has none (a run of an earlier version)."""
    records = [one for one in map(as_dict, as_list(run.checks.get("findings"))) if as_text(one.get("check"))]
    if not records:
        return None
    rows = tuple(_row(one) for one in records)
    order = [word for word, *_ in _STATUSES.values()]
    counts = {word: sum(row.judged.word == word for row in rows) for word in order}
    worst = next(status for status in ("fault", "warning", "ok", "skipped") if counts[_STATUSES[status][0]])
    pressing = [row for row in rows if row.judged.word in ("fault", "warning")]
    return Checks(
        _sentence(len(rows), counts),
        Judgement(*_STATUSES[worst]),
        tuple(sorted(pressing, key=lambda row: order.index(row.judged.word))),
        rows,
    )


def _row(record: Record) -> CheckRow:
    measured, limit = finite(record.get("measured")), finite(record.get("limit"))
    number = None
    if measured is not None and limit is not None:
        number = f"{significant(measured, 2)}, limit {significant(limit, 2)}"
    return CheckRow(
        as_text(record.get("group")) or "other",
        as_text(record.get("check")) or "",
        Judgement(*_STATUSES.get(str(record.get("status")), _SKIPPED)),
        sentence_case(as_text(record.get("detail")) or "no detail"),
        number,
        as_text(record.get("remedy")),
        as_text(record.get("where")),
    )


def _sentence(n: int, counts: dict[str, int]) -> str:
    """'26 checks before the training: 24 ok, 2 warnings.'"""
    named = {
        "fault": f"{counts['fault']} fault{'s' * (counts['fault'] > 1)}",
        "warning": f"{counts['warning']} warning{'s' * (counts['warning'] > 1)}",
        "skipped": f"{counts['skipped']} skipped",
        "ok": f"{counts['ok']} ok",
    }
    said = ", ".join(named[word] for word in ("ok", "warning", "fault", "skipped") if counts[word])
    return f"{n} check{'s' * (n > 1)} before the training: {said}."
