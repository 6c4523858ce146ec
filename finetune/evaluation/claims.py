"""Several suites, one run: which claims of improvement stand, corrected as the recipe declared before the run.

Every task suite that improved is a claim, and several claims are several chances of a false one. `holm` and `bh` correct
their p-values; under `all-must-pass` only the joint claim is made, that every task suite improved, which needs no
correction. Losses are never corrected away, and a guarding suite (role regression or forgetting) must only exclude
a loss beyond its margin: more such suites can make a run fail more easily, never pass more easily.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from finetune.errors import ExitCode
from finetune.stats.compare import EXIT_CODES
from finetune.stats.multiplicity import adjust, explain

Correction = Literal["holm", "bh", "all-must-pass"]
_WORST_FIRST = ("regressed", "inconclusive", "no-evidence", "improved")


def primary_of(result: Mapping[str, Any]) -> dict[str, Any]:
    """The comparison that decides a suite: its primary metric against the declared baseline."""
    found: dict[str, Any] = next(
        one
        for one in result["comparisons"]
        if one["suite"] == result["suite"]
        and one["metric"] == result["primary_metric"]
        and one["baseline"] == result["against"]
    )
    return found


def correct_claims(
    results: Sequence[Mapping[str, Any]], correction: Correction = "holm"
) -> list[dict[str, Any]]:
    """The results of `compare_records`, one a suite, with `p_adjusted` on the primary comparison of every task suite.

    A task suite that improved by itself, but not after the correction, becomes `no-evidence`, with a note that says so.
    The results given are left as they are.
    """
    corrected = [
        {**result, "comparisons": [dict(one) for one in result["comparisons"]]} for result in results
    ]
    claims = [
        (result, one)
        for result in corrected
        if result["role"] == "task" and (one := primary_of(result))["p_value"] is not None
    ]
    adjusted = adjust([one["p_value"] for _, one in claims], correction)
    for (result, one), p_adjusted in zip(claims, adjusted, strict=True):
        one |= {"p_adjusted": p_adjusted, "correction": correction}
        if one["verdict"] == "improved" and p_adjusted > 1.0 - one["confidence"]:
            one["verdict"] = "no-evidence"  # not inconclusive: its interval excludes a loss
            one["notes"] = [
                *one.get("notes", []),
                f"improved taken alone (p = {one['p_value']:.3g}), not among {len(claims)} task suites "
                f"({correction}: p = {p_adjusted:.3g})",
            ]
            result |= {"verdict": one["verdict"], "exit_code": int(EXIT_CODES[one["verdict"]])}
    return corrected


def explain_correction(results: Sequence[Mapping[str, Any]], correction: Correction) -> str:
    """One sentence: what was corrected for, or why nothing had to be."""
    claims = sum(result["role"] == "task" for result in results)
    if claims < 2:
        return "one task suite claims an improvement at most: there is nothing to correct"
    return f"{claims} task suites; {explain(correction)}"


def combine(results: Sequence[Mapping[str, Any]], correction: Correction = "holm") -> dict[str, Any]:
    """One `comparison.json` of several suites, which `suites` lists with verdict, cost and notes of each.

    The first suite decides, or, under `all-must-pass`, the worst task suite; but when a guarding suite regressed, the gain
    was bought with that loss, and the verdict is `regressed`.
    """
    every = correct_claims(results, correction)
    first = dict(every[0])
    for name in ("comparisons", "slices"):
        first[name] = [one for result in every for one in result.get(name, [])]
    tasks = [result["verdict"] for result in every if result["role"] == "task"]
    if correction == "all-must-pass" and tasks:
        first["verdict"] = next(verdict for verdict in _WORST_FIRST if verdict in tasks)
        first["exit_code"] = int(EXIT_CODES[first["verdict"]])
    if any(result["role"] != "task" and result["verdict"] == "regressed" for result in every[1:]):
        first["verdict"], first["exit_code"] = "regressed", int(ExitCode.REGRESSED)
    return {
        **first,
        "primary_metrics": {result["suite"]: result["primary_metric"] for result in every},
        "correction": {"method": correction, "explained": explain_correction(every, correction)},
        "suites": [
            {key: value for key, value in result.items() if key not in ("comparisons", "slices")}
            for result in every
        ],
    }
