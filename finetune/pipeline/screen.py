"""The last screen of a run: rows and leaks, forecast and use, difference and interval, verdict."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from finetune.evaluation.fairness import WARNING
from finetune.evaluation.formats import format_line
from finetune.evaluation.repeats import noise_line
from finetune.paths import read_json
from finetune.units import format_bytes, format_points

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
            f"memory   {_memory(read_json(folder / 'forecast.json'))}",
            f"effect   {_effect(comparison)}",
            *_format(comparison),
            *_noise(comparison),
            *_warnings(comparison),
            f"verdict  {comparison['verdict'].upper()}: {_MEANING[comparison['verdict']]}{_basis(comparison)}",
            f"report   {report}",
        ]
    )


def _format(comparison: dict[str, Any]) -> list[str]:
    """Answers without the form that the decisive metric needs; nothing for a metric that takes any text."""
    one = decisive(comparison)
    return [f"format   {format_line(one['off_format'], one['n'])}"] if one.get("off_format") else []


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


def _memory(forecast: dict[str, Any]) -> str:
    used = forecast.get("used_peak_bytes")
    if not used:
        return f"forecast {format_bytes(forecast['total_bytes'])}, use not measured"
    ratio = forecast["total_bytes"] / used
    return f"forecast {format_bytes(forecast['total_bytes'])}, used {format_bytes(used)} (forecast / used {ratio:.2f})"


def _effect(comparison: dict[str, Any]) -> str:
    one = decisive(comparison)
    if one["difference"] is None:
        return "nothing was compared"
    percent = round(one["confidence"] * 100)
    low, high = one["low"] * 100, one["high"] * 100
    line = (
        f"{one['metric']} {one['mean_a']:.1%} → {one['mean_b']:.1%}: {format_points(one['difference'])}, "
        f"{percent} % interval [{low:+.1f}, {high:+.1f}], n = {one['n']}"
    )
    if one["fixed"] is not None:
        line += f"; {one['fixed']} fixed, {one['broken']} broken"
    return line


def _basis(comparison: dict[str, Any]) -> str:
    one = decisive(comparison)
    against = {"few_shot": "few-shot", "zero_shot": "zero-shot"}.get(
        comparison["against"], comparison["against"]
    )
    return f" (tuned against the untuned model, {against}; {one['test']})"
