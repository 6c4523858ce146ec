"""A search over merges in lines for a terminal: one table of the choosing side, then what the other side confirmed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from finetune.evaluation.gate import describe_difference
from finetune.units import format_bytes

_KL = "kl_per_token"


def search_lines(result: Mapping[str, Any], folder: str) -> list[str]:
    """The table, the choice, the claims, and where everything is. result: `search.json`."""
    rows = [_head(result), *(_row(result, model) for model in result["models"])]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    ]
    n = len(result["comparisons"])
    choice = result["choice"]
    lines += [
        f"better, worse: shown among all {n} differences to every parent and the base (Holm, 5 %)",
        f"chosen, best on {' and '.join(choice['best'])}: {choice['winner']}",
        *(f"  not allowed: {name} {why}" for name, why in choice["kept_out"].items()),
    ]
    return [*lines, *_confirmed(result), f"winner   {folder}/winner", f"report   {folder}/search.html"]


def _head(result: Mapping[str, Any]) -> list[str]:
    names = [one["name"] for one in result["suites"]]
    kl = ["KL"] if _has_kl(result) else []
    return ["model", *names, *kl, "better", "worse", "size"]


def _has_kl(result: Mapping[str, Any]) -> bool:
    return any(_KL in one["metrics"] for one in result["suites"])


def _row(result: Mapping[str, Any], model: Mapping[str, Any]) -> list[str]:
    cells = [("* " if model["name"] == result["choice"]["winner"] else "  ") + model["name"]]
    for suite in result["suites"]:
        cells.append(_level(model["suites"][suite["name"]]["metrics"][suite["metric"]], suite["open_ended"]))
    if _has_kl(result):
        suite = next(one for one in result["suites"] if _KL in one["metrics"])
        cells.append(_level(model["suites"][suite["name"]]["metrics"][_KL], open_ended=True))
    own = [one for one in result["comparisons"] if one["model"] == model["name"]]
    counts = [sum(one["finding"] == word for one in own) for word in ("better", "worse")]
    cells += [str(count) if own else "" for count in counts]
    size = model.get("weights_bytes")
    return [*cells, format_bytes(size) if size is not None else ""]


def _level(metric: Mapping[str, Any], open_ended: bool) -> str:
    """'75.0 [69, 80]' for shares, '3.021 [2.9, 3.1]' for others."""
    mean, low, high = metric["mean"], metric["low"], metric["high"]
    if open_ended:
        return f"{mean:.3f} [{low:.2f}, {high:.2f}]"
    return f"{mean * 100:.1f} % [{low * 100:.0f}, {high * 100:.0f}]"


def _confirmed(result: Mapping[str, Any]) -> list[str]:
    """The claims, each with its interval, and what they say together."""
    confirmation = result["confirmation"]
    lines = ["confirmed once, on the side that chose nothing:"]
    lines += [f"  {claim_line(claim)}" for claim in confirmation["claims"]]
    told = [
        one
        for one in confirmation["comparisons"]
        if not any(
            (c["suite"], c["against"]) == (one["suite"], one["against"]) for c in confirmation["claims"]
        )
    ]
    lines += [f"  {one['suite']} against {one['against']}: {difference_of(one)}" for one in told]
    lines += earlier_lines(confirmation["earlier"])
    return [*lines, f"verdict: {confirmation['outcome']}"]


def claim_line(claim: Mapping[str, Any]) -> str:
    """'home_intents against english, no-regression: pass. exact_match: +1 points …'."""
    return f"{claim['suite']} against {claim['against']}, {claim['requirement']}: {claim['outcome']}. {claim['message']}"


def difference_of(one: Mapping[str, Any]) -> str:
    """A difference with its interval, in points for shares."""
    bounded = (
        0.0 if not one["open_ended"] else 2.0
    )  # means that make `describe_difference` print points, or not
    return describe_difference({**one, "confidence": 0.95, "mean_a": bounded, "mean_b": bounded})


def earlier_lines(earlier: Mapping[str, Sequence[str]]) -> list[str]:
    """A warning where the same items confirmed other searches."""
    return [
        f"note: the items of {suite} have confirmed {len(names)} other search{'es' * (len(names) > 1)} "
        f"({', '.join(names)}); the best of several looks is better by luck"
        for suite, names in earlier.items()
    ]
