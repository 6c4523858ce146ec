"""Comparisons as a few lines for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from finetune.evaluation.cost_screen import cost_lines
from finetune.evaluation.early_stop import sequential_line
from finetune.evaluation.formats import format_line
from finetune.evaluation.gate import GateAnswer, describe_difference, is_share
from finetune.evaluation.records import ArmSummary
from finetune.evaluation.repeats import noise_line
from finetune.evaluation.suite import Suite

_SLICES_SHOWN = 5


def comparison_lines(result: Mapping[str, Any]) -> list[str]:
    """One suite: every metric with both means and the difference, then the verdict and what the items cannot show."""
    lines = [f"{result['suite']} ({result['role']}), against {result['against']}"]
    width = max(len(one["metric"]) for one in result["comparisons"])
    for one in result["comparisons"]:
        primary = one["metric"] == result["primary_metric"]
        lines.append(
            f"  {'*' if primary else ' '} {one['metric']:<{width}}  {describe_means(one)}  {describe_difference(one)}"
        )
    decisive = next(one for one in result["comparisons"] if one["metric"] == result["primary_metric"])
    if decisive.get("fixed") is not None:
        lines.append(
            f"  {decisive['fixed']} fixed, {decisive['broken']} broken, {decisive['both_right']} both right, "
            f"{decisive['both_wrong']} both wrong ({decisive['test']}, p = {decisive['p_value']:.3g})"
        )
    if decisive.get("off_format") is not None:
        lines.append(f"  {format_line(decisive['off_format'], decisive['n'])}")
    if decisive.get("sequential") is not None:
        lines.append(f"  {sequential_line(decisive['sequential'])}")
    if decisive.get("noise") is not None:
        lines.append(f"  {noise_line(decisive['noise'])}")
    if result.get("cost"):
        lines += [f"  {line}" for line in cost_lines(result["cost"])]
    for one in result["comparisons"]:
        lines += [f"  {one['metric']}, {line}" for line in _judged_lines(one)]
    lines.append(f"  verdict: {result['verdict']}")
    if result["verdict"] in ("inconclusive", "no-evidence") and decisive.get("limits"):
        lines.append(f"  {decisive['limits']}")
    lines += [f"  note: {note}" for note in [*result.get("notes", []), *decisive.get("notes", [])]]
    return lines + slice_lines(result)


def standing_lines(suite: Suite, summary: ArmSummary) -> list[str]:
    """One arm by itself: every metric with its interval."""
    lines = [f"{suite.name} ({suite.role}), {summary.arm}"]
    width = max(map(len, summary.metrics))
    for name, held in summary.metrics.items():
        primary = "*" if name == suite.primary_metric else " "
        lines.append(
            f"  {primary} {name:<{width}}  {_level(held, share=not suite.scorer_of(name).open_ended)}"
        )
    return lines


def _level(held: Mapping[str, Any], *, share: bool) -> str:
    """'45.7% [38.2%, 53.4%], n = 162 (wilson)'; a mean without a margin of error says that it has none."""
    if held["mean"] is None:
        return "nothing scored (n = 0)"
    spread = [held["low"], held["high"]]
    known = None not in spread
    form = (
        ".1%"
        if share and all(0.0 <= one <= 1.0 for one in [held["mean"], *(spread if known else [])])
        else ".4g"
    )
    interval = f"[{spread[0]:{form}}, {spread[1]:{form}}]" if known else "no interval"
    return f"{held['mean']:{form}} {interval}, n = {held['n']} ({held['method']})"


def _judged_lines(one: Mapping[str, Any]) -> list[str]:
    """Of a judge's metric: whether the judge may be believed, and the items that it gave no score."""
    if not one.get("judge"):
        return []
    trust = one["judge"]["calibration"]
    agreed = calibration_lines(trust) or ["nothing of it was read by hand"]
    counts = "counts" if trust["calibrated"] else "does not count yet: read answers with finetune review"
    lines = [f"judged by {one['judge']['name']}, {agreed[0]}; its verdict {counts}"]
    missing = one.get("missing", {}).get("items")
    return (
        [*lines, f"{missing} items without a score of the judge are left out, not lost"] if missing else lines
    )


def slice_lines(result: Mapping[str, Any]) -> list[str]:
    """The slices with the largest losses first."""
    sliced = result.get("slices", [])
    if not sliced:
        return []
    shown = sliced[:_SLICES_SHOWN]
    lines = [f"  slices, worst first ({len(shown)} of {len(sliced)}; {shown[0]['correction']}-corrected p):"]
    width = max(len(f"{one['by']} {one['value']}") for one in shown)
    for one in shown:
        name = f"{one['by']} {one['value']}"
        if not one["n"]:
            lines.append(f"    {name:<{width}}  nothing compared (n = 0)")
            continue
        if one["difference"] is None:
            lines.append(
                f"    {name:<{width}}  n = {one['n']:<4} one cluster: no margin of error, so no difference"
            )
            continue
        scale, unit = (100.0, " points") if is_share(one) else (1.0, "")
        low, high = one["low"] * scale, one["high"] * scale
        lines.append(
            f"    {name:<{width}}  n = {one['n']:<4} {one['difference'] * scale:+.3g}{unit} "
            f"[{low:+.3g}, {high:+.3g}]  p = {one['p_adjusted']:.3g}"
        )
    return lines


def gate_lines(answer: GateAnswer) -> list[str]:
    """One line a suite, and the outcome."""
    width = max(len(row.suite) for row in answer.rows)
    lines = [f"{row.outcome:<12}  {row.suite:<{width}}  {row.message}" for row in answer.rows]
    return [
        *lines,
        f"gate: {answer.outcome} ({answer.explained})",
    ]


def noise_lines(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """The A/A run of every suite."""
    return [
        f"{one['suite']}: base against base, {one['answers_changed']} of {one['n']} answers changed, "
        f"{one['scores_flipped']} scores of {one['metric']} flipped "
        f"(noise floor {one['flip_rate']:.1%}, at most {one['high']:.1%})"
        for one in results
    ]


def describe_means(one: Mapping[str, Any]) -> str:
    """'0.4% → 75.0%' for shares, plain numbers otherwise."""
    if one["mean_a"] is None:
        return "—"
    if is_share(one):
        return f"{one['mean_a']:6.1%} → {one['mean_b']:6.1%}"
    return f"{one['mean_a']:.4g} → {one['mean_b']:.4g}"


def judge_lines(found: Mapping[str, Any]) -> list[str]:
    """Win rate, what the judge contradicts itself on, and whether it may be believed."""
    trust, bias = found["calibration"], found["position_bias"]
    lines = [
        f"{found['suite']}, judged by {found['judge']}: tuned won {found['won']}, tied {found['tied']}, lost "
        f"{found['lost']} of {found['n']} (win rate {found['win_rate']:.1%}, a tie is half); "
        f"{found['missing']} not judged (left out, not lost)",
        f"win rate minus loss rate: {describe_difference(found['comparison'])}",
    ]
    if bias is not None:
        lines.append(
            f"position bias: {bias['rate']:.1%} [{bias['low']:.1%}, {bias['high']:.1%}] of {bias['n']} pairs turned with the "
            f"order (counted as ties); first preferred in {bias['first_preferred']}, second in {bias['second_preferred']}"
        )
    lines += calibration_lines(trust)
    if trust["calibrated"]:
        lines.append(f"verdict: {found['verdict']}")
    else:
        lines.append("not calibrated, so its verdict does not count: read more items with finetune review")
    return lines


def calibration_lines(trust: Mapping[str, Any]) -> list[str]:
    """Agreement with the reader and kappa, both with interval; empty when nothing was read."""
    if not trust["n"]:
        return []
    line = (
        f"agrees with the reader on {trust['agreed']} of {trust['n']}: {trust['agreement']:.1%} "
        f"[{trust['low']:.1%}, {trust['high']:.1%}]"
    )
    if trust["kappa"] is None or trust["kappa_low"] is None:
        return [f"{line}; kappa is not defined (only one kind of answer)"]
    return [f"{line}; kappa {trust['kappa']:.2f} [{trust['kappa_low']:.2f}, {trust['kappa_high']:.2f}]"]
