"""The page of a search over merges: what it says, hostile names, and how it looks in a browser."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from finetune.evaluation.merge_screen import search_lines
from finetune.report.merge_search import render_search, write_search_page

HOSTILE = "<script>alert(1)</script>"
SUITES = [
    {
        "name": "home",
        "role": "task",
        "metric": "exact_match",
        "metrics": ["exact_match"],
        "margin": 0.02,
        "higher_is_better": True,
        "open_ended": False,
        "split": "test",
    },
    {
        "name": "texts",
        "role": "forgetting",
        "metric": "nll_per_token",
        "metrics": ["nll_per_token", "kl_per_token"],
        "margin": 0.1,
        "higher_is_better": False,
        "open_ended": True,
        "split": None,
    },
]
CLAIM = {
    "suite": "home",
    "role": "task",
    "metric": "exact_match",
    "requirement": "no-regression",
    "outcome": "pass",
    "message": "exact_match: +3 points [-2, +8] at 95 %, n = 100; a loss beyond 10 points is excluded",
    "against": "english",
}


def level(mean: float, spread: float) -> dict[str, Any]:
    return {"mean": mean, "low": mean - spread, "high": mean + spread, "n": 100, "method": "clt"}


def model(name: str, kind: str, exact: float, nll: float, kl: float, **more: Any) -> dict[str, Any]:
    texts = {"nll_per_token": level(nll, 0.1), "kl_per_token": level(kl, 0.02)}
    suites = {
        "home": {"arm": "tuned", "metrics": {"exact_match": level(exact, 0.05)}},
        "texts": {"arm": "tuned", "metrics": texts},
    }
    return {"name": name, "kind": kind, "suites": suites, **more}


def beside(model: str, against: str, suite: str, difference: float, finding: str) -> dict[str, Any]:
    is_text = suite == "texts"
    return {
        "model": model,
        "against": against,
        "suite": suite,
        "metric": "nll_per_token" if is_text else "exact_match",
        "n": 30 if is_text else 100,
        "difference": difference,
        "low": difference - 0.05,
        "high": difference + 0.05,
        "higher_is_better": not is_text,
        "open_ended": is_text,
        "p_value": 0.001,
        "p_adjusted": 0.02,
        "finding": finding,
    }


@pytest.fixture
def result() -> dict[str, Any]:
    every = [
        beside(name, against, suite, difference, finding)
        for name, gain in (("soup", -0.02), ("ties density 0.2", 0.03))
        for against, suite, difference, finding in (
            ("english", "home", gain, "not told apart"),
            (HOSTILE, "home", 0.4 + gain, "better"),
            ("base", "home", 0.7, "better"),
            ("english", "texts", -0.1, "better"),
            (HOSTILE, "texts", 0.02, "not told apart"),
            ("base", "texts", 0.21, "worse"),
        )
    ]
    parents = [model("english", "parent", 0.75, 3.4, 0.4), model(HOSTILE, "parent", 0.3, 3.3, 0.3)]
    size = {"weights_bytes": 269_000_000, "merge_seconds": 4.0}
    merges = [
        model("soup", "merge", 0.7, 3.25, 0.2, **size),
        model("ties density 0.2", "merge", 0.78, 3.3, 0.25, **size),
    ]
    return {
        "name": "languages",
        "description": "Two into one.",
        "digest": "ab" * 32,
        "base": "builtin:tiny",
        "parents": ["english", HOSTILE],
        "suites": SUITES,
        "models": [model("base", "base", 0.01, 3.0, 0.0), *parents, *merges],
        "comparisons": every,
        "choice": {
            "winner": "ties density 0.2",
            "best": ["home"],
            "marks": {"soup": 0.7, "ties density 0.2": 0.78},
            "kept_out": {"soup": "loses 0.05 on home, 0.01 allowed"},
            "best_parent": {"home": "english", "texts": HOSTILE},
            "lose_at_most": {"home": 0.01},
        },
        "confirmation": {
            "models": [model("base", "base", 0.01, 3.0, 0.0), *parents, merges[1]],
            "comparisons": [one for one in every if one["model"] == "ties density 0.2"],
            "claims": [CLAIM],
            "outcome": "pass",
            "exit_code": 0,
            "items": {"home": "cd" * 32},
            "earlier": {"home": ["languages-00000000"]},
        },
        "winner": {"name": "ties density 0.2", "folder": "winner"},
        "seconds": 754.0,
    }


def test_the_screen_has_one_row_a_model_and_the_claims_with_their_intervals(result: dict[str, Any]) -> None:
    lines = search_lines(result, "runs/merges/x")
    assert lines[0].split() == ["model", "home", "texts", "KL", "better", "worse", "size"]
    chosen = next(line for line in lines if line.startswith("* "))
    told = "* ties density 0.2 78.0 % [73, 83] 3.300 [3.20, 3.40] 0.250 [0.23, 0.27] 3 1 269 MB"
    assert " ".join(chosen.split()) == told
    assert not any(line.startswith("* ") for line in lines if "soup" in line)
    text = "\n".join(lines)
    assert "all 12 differences" in text and "not allowed: soup loses 0.05 on home" in text
    assert "home against english, no-regression: pass. exact_match: +3 points [-2, +8]" in text
    assert "texts against base: +0.21 [+0.16, +0.26] at 95 %, n = 30" in text  # nats, not points
    assert "home against base: +70.0 points [+65.0, +75.0] at 95 %, n = 100" in text
    assert "have confirmed 1 other search (languages-00000000)" in text
    assert "verdict: pass" in lines


def test_names_stay_text_and_the_page_needs_nothing_else(result: dict[str, Any]) -> None:
    page = render_search(result)
    assert HOSTILE not in page and "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "could not be chosen: loses 0.05 on home" in page
    assert page == render_search(result)


@pytest.mark.parametrize(
    ("outcome", "word"), [("pass", "Confirmed"), ("regressed", "Regressed"), ("inconclusive", "Inconclusive")]
)
def test_the_verdict_is_that_of_the_confirming_side(result: dict[str, Any], outcome: str, word: str) -> None:
    result["confirmation"]["outcome"] = outcome
    assert f"<title>languages: {word}</title>" in render_search(result)


@pytest.mark.parametrize("width", [380, 1280])
def test_the_page_is_quiet_and_fits(tab: Any, tmp_path: Path, result: dict[str, Any], width: int) -> None:
    page = write_search_page(tmp_path, result)
    tab.messages.clear()
    tab.requests.clear()
    tab.open(page, width=width, dark=False)
    assert tab.messages == [] and tab.requests == [page.resolve().as_uri()]
    assert tab.evaluate("document.title") == "languages: Confirmed"
    assert tab.evaluate("document.querySelectorAll('svg.forest .estimate').length") == 6
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
