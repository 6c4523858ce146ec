"""The last screen of a run: rows and leaks, forecast and use, difference and interval, verdict."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from finetune.evaluation.claims import primary_of
from finetune.evaluation.cost_screen import cost_lines
from finetune.evaluation.early_stop import sequential_line
from finetune.evaluation.fairness import WARNING
from finetune.evaluation.formats import format_line
from finetune.evaluation.gate import describe_difference
from finetune.evaluation.repeats import noise_line
from finetune.evaluation.screen import describe_means
from finetune.paths import read_json
from finetune.report.distillation import gap_sentence
from finetune.units import format_bytes

_MEANING = {
    "improved": "the tuning helped",
    "no-evidence": "no evidence that the tuning helped",
    "regressed": "the tuned model is worse",
    "inconclusive": "cannot be decided with these items",
}


def last_screen(folder: Path, comparison: dict[str, Any], report: Path) -> str:
    """A few facts and where the report is, for a terminal."""
    return "\n".join(
        [
            f"rows     {_rows(read_json(folder / 'data' / 'manifest.json'))}",
            *_memory_lines(read_json(folder / "forecast.json")),
            f"effect   {_effect(comparison)}",
            *_format(comparison),
            *_stopped(comparison),
            *_noise(comparison),
            *_warnings(comparison),
            *_limits(comparison),
            *_suites(comparison),
            *_gap(comparison),
            *_cost(comparison),
            f"verdict  {comparison['verdict'].upper()}: {_MEANING[comparison['verdict']]}{_basis(comparison)}",
            f"report   {report}",
        ]
    )


def _format(comparison: dict[str, Any]) -> list[str]:
    """Answers without the form that the decisive metric needs; nothing for a metric that takes any text."""
    one = decisive(comparison)
    return [f"format   {format_line(one['off_format'], one['n'])}"] if one.get("off_format") else []


def _stopped(comparison: dict[str, Any]) -> list[str]:
    """How far an evaluation went that may stop early."""
    one = decisive(comparison)
    return [f"items    {sequential_line(one['sequential'])}"] if one.get("sequential") else []


def _noise(comparison: dict[str, Any]) -> list[str]:
    """Questions or sampling: which noise is left, where items were answered several times."""
    one = decisive(comparison)
    return [f"noise    {noise_line(one['noise'])}"] if one.get("noise") else []


def _warnings(comparison: dict[str, Any]) -> list[str]:
    """What makes a comparison of any suite doubtful."""
    return [
        f"fair?    {suite['suite']}: {note}"
        for suite in comparison.get("suites", [comparison])
        for note in suite.get("notes", [])
        if note.startswith(WARNING)
    ]


def decisive(comparison: dict[str, Any]) -> dict[str, Any]:
    """The comparison that the verdict was taken from."""
    return next(
        one
        for one in comparison["comparisons"]
        if one["suite"] == comparison["suite"]
        and one["metric"] == comparison["primary_metric"]
        and one["baseline"] == comparison["against"]
    )


def _rows(manifest: dict[str, Any]) -> str:
    ledger, leaks = manifest["ledger"], manifest["leaks"]
    dropped = sum(ledger["dropped"].values())
    found = sum(leaks.values())
    return (
        f"{ledger['read']} read = {ledger['kept']} kept + {dropped} dropped + {ledger['quarantined']} quarantined; "
        f"{found} leaks between splits ({', '.join(leaks)} checked)"
    )


def _memory_lines(forecast: dict[str, Any]) -> list[str]:
    """The forecast of the training, and that of the evaluation where one ran in this process, beside what was used."""
    lines = [f"memory   {_memory(forecast)}"]
    evaluation = forecast.get("evaluation")
    if evaluation and evaluation.get("used_peak_bytes"):
        lines.append(f"         evaluation: {_memory(evaluation)}")
    return lines


def _memory(forecast: dict[str, Any]) -> str:
    used = forecast.get("used_peak_bytes")
    if not forecast.get("total_bytes"):
        return (
            f"no forecast for this model, used {format_bytes(used)}" if used else "no forecast for this model"
        )
    if not used:
        return f"forecast {format_bytes(forecast['total_bytes'])}, use not measured"
    ratio = forecast["total_bytes"] / used
    return f"forecast {format_bytes(forecast['total_bytes'])}, used {format_bytes(used)} (forecast / used {ratio:.2f})"


def _effect(comparison: dict[str, Any]) -> str:
    one = decisive(comparison)
    if one["difference"] is None:
        return "nothing was compared"
    line = f"{one['metric']} {' '.join(describe_means(one).split())}: {describe_difference(one)}"
    if one["fixed"] is not None:
        line += f"; {one['fixed']} fixed, {one['broken']} broken"
    return line


def _limits(comparison: dict[str, Any]) -> list[str]:
    """In place of 'no difference': what these items cannot tell, and how many more would settle it."""
    one = decisive(comparison)
    shown = comparison["verdict"] in ("no-evidence", "inconclusive") and one.get("limits")
    notes = [f"note     {note}" for note in one.get("notes", [])]
    return [*([f"limits   {one['limits']}"] if shown else []), *notes]


def _suites(comparison: dict[str, Any]) -> list[str]:
    """The other suites, one line each, and what the claims were corrected for when there are several."""
    others = [one for one in comparison.get("suites", []) if one["suite"] != comparison["suite"]]
    lines = []
    for suite in others:
        one = primary_of({**suite, "comparisons": comparison["comparisons"]})
        lines.append(
            f"suite    {suite['suite']} ({suite['role']}): {one['metric']} {describe_difference(one)}; {suite['verdict']}"
        )
    claims = sum(one["role"] == "task" for one in comparison.get("suites", []))
    return [*lines, f"claims   {comparison['correction']['explained']}"] if claims > 1 else lines


def _gap(comparison: dict[str, Any]) -> list[str]:
    """How much of the way to its teacher a student has come, by the metric that decides each suite."""
    lines = []
    for suite in comparison.get("suites", []):
        metric = suite["primary_metric"]
        found = suite.get("gap", {}).get("metrics", {}).get(metric)
        if found is not None:
            lines.append(f"teacher  {suite['suite']}, {metric}: {' '.join(gap_sentence(found).split())}")
    return lines


def _cost(comparison: dict[str, Any]) -> list[str]:
    lines = cost_lines(comparison["cost"]) if comparison.get("cost") else []
    return [f"{'cost' if not place else '':<8} {line}" for place, line in enumerate(lines)]


def _basis(comparison: dict[str, Any]) -> str:
    one = decisive(comparison)
    against = {"few_shot": "few-shot", "zero_shot": "zero-shot"}.get(
        comparison["against"], comparison["against"]
    )
    if one["verdict"] != comparison["verdict"]:
        own = comparison["verdict"]
        deciding = [one["suite"] for one in comparison["suites"] if one["verdict"] == own]
        return f" (decided by {', '.join(deciding)}; {one['suite']} by itself: {one['verdict']})"
    if comparison["against"] == "start":
        return f" (tuned against what it started from; {one['test']})"
    return f" (tuned against the untuned model, {against}; {one['test']})"
