"""The page of a search over merges: what was tried, what it costs, which one was chosen, and what the other items say of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from finetune.paths import write_atomic
from finetune.report.comparison import Comparison, Judgement, judgement
from finetune.report.forest import Forests, read_forests
from finetune.report.numbers import arm_name, share, significant, unit_of, words
from finetune.report.rendering import render
from finetune.report.tables import Cell, Table
from finetune.units import format_bytes, format_duration

FILE_NAME = "search.html"
_KL = "kl_per_token"
_VERDICTS = {"better": "improved", "worse": "regressed"}
_SENTENCES = {
    "pass": "holds what was claimed of it on items that chose nothing.",
    "regressed": "is worse than it may be on items that chose nothing.",
    "no-evidence": "shows no gain where one was claimed.",
    "inconclusive": "cannot be told good or bad by this many items.",
}


def write_search_page(folder: Path, result: Mapping[str, Any]) -> Path:
    """Write `search.html` into the folder of a search from its `search.json`; returns its path."""
    path = folder / FILE_NAME
    write_atomic(path, render_search(result))
    return path


def render_search(result: Mapping[str, Any]) -> str:
    """The whole page as HTML."""
    confirmation, choice = result["confirmation"], result["choice"]
    winner = str(choice["winner"])
    return render(
        "merge_search.html.j2",
        title=result["name"],
        description=result["description"] or None,
        heading=_heading(result),
        judged=_outcome(str(confirmation["outcome"])),
        sentence=f"{winner}, merged of {' and '.join(result['parents'])}, {_SENTENCES[confirmation['outcome']]}",
        claims=[_claim(one) for one in confirmation["claims"]],
        levels=_levels(result, result["models"], winner, with_counts=True),
        differences=[_differences(result, suite) for suite in result["suites"]],
        looks=f"{len(result['comparisons'])}",
        marks=_marks(result),
        kept_out=sorted(choice["kept_out"].items()),
        confirmed=_levels(result, confirmation["models"], winner, with_counts=False),
        forest=_forest(confirmation["comparisons"]),
        sides=[_sides(suite) for suite in result["suites"]],
        earlier=[(suite, ", ".join(names)) for suite, names in confirmation["earlier"].items()],
    )


def _heading(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    merges = sum(model["kind"] == "merge" for model in result["models"])
    return [
        ("base", str(result["base"])),
        ("parents", ", ".join(result["parents"])),
        ("merges tried", str(merges)),
        ("chosen by", ", ".join(result["choice"]["best"])),
        ("search", str(result["digest"])[:8]),
        ("time", format_duration(float(result["seconds"]))),
    ]


def _outcome(outcome: str) -> Judgement:
    found = judgement(outcome)
    return Judgement("Confirmed", found.style, found.icon) if outcome == "pass" else found


def _claim(one: Mapping[str, Any]) -> tuple[Judgement, str]:
    wanted = "no worse than" if one["requirement"] == "no-regression" else "better than"
    found = Judgement("Holds", "good", "check") if one["outcome"] == "pass" else judgement(one["outcome"])
    return found, f"{one['suite']}, {wanted} {arm_name(one['against'])}: {one['message']}"


def _metrics(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(suite, metric) of every column: the metric that decides each suite, and KL where it is measured."""
    found = [(one["name"], one["metric"]) for one in result["suites"]]
    return found + [
        (one["name"], _KL) for one in result["suites"] if _KL in one["metrics"] and one["metric"] != _KL
    ]


def _levels(
    result: Mapping[str, Any], models: Sequence[Mapping[str, Any]], winner: str, *, with_counts: bool
) -> Table:
    """What each model scores, with its interval; `with_counts`: of merges how many differences are shown, and their size."""
    columns = _metrics(result)
    rows = []
    for model in models:
        cells = [_level(model, suite, metric) for suite, metric in columns]
        cells += _counts(result, model) if with_counts else []
        rows.append((Cell(str(model["name"]), _kind(model, winner)), tuple(cells)))
    names = [suite if metric != _KL else f"{suite}, {words(metric)}" for suite, metric in columns]
    names += ["shown differences", "weights"] if with_counts else []
    return Table("models", tuple(names), tuple(rows))


def _counts(result: Mapping[str, Any], model: Mapping[str, Any]) -> list[Cell]:
    own = [one for one in result["comparisons"] if one["model"] == model["name"]]
    counts = [sum(one["finding"] == word for one in own) for word in ("better", "worse")]
    size = model.get("weights_bytes")
    return [
        Cell(f"{counts[0]} better, {counts[1]} worse" if own else "–"),
        Cell(format_bytes(size) if size is not None else "–"),
    ]


def _kind(model: Mapping[str, Any], winner: str) -> str:
    return "merge, chosen" if model["name"] == winner else str(model["kind"])


def _level(model: Mapping[str, Any], suite: str, metric: str) -> Cell:
    held = model["suites"][suite]["metrics"][metric]
    unit = unit_of(metric, [held.get(key) for key in ("mean", "low", "high")])
    return Cell(unit.value(held.get("mean")), unit.range(held.get("low"), held.get("high")))


def _differences(result: Mapping[str, Any], suite: Mapping[str, Any]) -> Table:
    """One suite: every merge beside every parent and the base."""
    own = [one for one in result["comparisons"] if one["suite"] == suite["name"]]
    against = list(dict.fromkeys(one["against"] for one in own))
    by_pair = {(one["model"], one["against"]): one for one in own}
    models = list(dict.fromkeys(one["model"] for one in own))
    rows = tuple(
        (Cell(name), tuple(_difference(by_pair[name, other]) for other in against)) for name in models
    )
    lower = "" if suite["higher_is_better"] else ", lower is better"
    title = f"{suite['name']}, {words(suite['metric'])}{lower}: difference to each model on the same items"
    return Table(title, tuple(f"to {name}" for name in against), rows)


def _difference(one: Mapping[str, Any]) -> Cell:
    unit = _unit(one)
    told = "" if one["finding"] == "not told apart" else f", {one['finding']}"
    below = f"{unit.interval(one['low'], one['high'])}, n {one['n']}{told}"
    return Cell(unit.difference(one["difference"]), below)


def _unit(one: Mapping[str, Any]) -> Any:
    return unit_of(str(one["metric"]), [2.0 if one["open_ended"] else 0.0, one["difference"]])


def _forest(comparisons: Sequence[Mapping[str, Any]]) -> Forests:
    rows = []
    for one in comparisons:
        record = {
            **one,
            "baseline": one["against"],
            "verdict": _VERDICTS.get(one["finding"], "not told apart"),
        }
        rows.append(Comparison(record, _unit(one), decides_suite=True))
    return read_forests(rows, None)


def _marks(result: Mapping[str, Any]) -> str:
    """'0.621 task_sum lambda 0.8, 0.540 soup', best first."""
    marks = sorted(result["choice"]["marks"].items(), key=lambda pair: -pair[1])
    bounded = all(0.0 <= value <= 1.0 for _, value in marks)
    return "; ".join(f"{name} {share(value) if bounded else significant(value)}" for name, value in marks)


def _sides(suite: Mapping[str, Any]) -> str:
    if suite["split"] is not None:
        return f"{suite['name']}: chosen on the validation split, confirmed on the {suite['split']} split."
    return f"{suite['name']}: chosen on one half of its items, confirmed on the other half; no cluster is in both."
