"""A run on a task suite and a guarding one: what is said before the tuning, what is left after Ctrl-C, and what is compared."""

from __future__ import annotations

import json
from typing import Any

import pytest

from finetune.pipeline.screen import last_screen

GUARD = """\
suite: 1
name: guard
role: regression
items: {jsonl: guard.jsonl}
decoding: {max_new_tokens: 4}
scorers: [text_match]
primary_metric: text_match
margin: 0.1
"""


@pytest.fixture
def guarded(project: Any) -> Any:
    """The project with a suite beside its own that has no few-shot arm."""
    lines = [
        {"id": f"g{n}", "messages": [{"role": "user", "content": f"say {n}"}], "reference": str(n)}
        for n in range(8)
    ]
    (project.folder / "guard.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (project.folder / "guard.yaml").write_text(GUARD)
    recipe = project.recipe.read_text().replace("[suite.yaml]", "[suite.yaml, guard.yaml]")
    project.recipe.write_text(recipe)
    return project


def test_a_guarding_suite_stands_beside_the_task(guarded: Any) -> None:
    outcome = guarded.run("eval.prices.per_hour=2", "train.max_steps=2")
    folder, comparison = outcome.folder, outcome.comparison
    assert not (folder / "baseline" / "guard" / "few_shot.jsonl").exists()
    assert {(one["suite"], one["against"]) for one in comparison["suites"]} == {
        ("digits", "few_shot"), ("guard", "zero_shot"),
    }  # fmt: skip
    assert comparison["primary_metrics"] == {"digits": "exact_match", "guard": "text_match"}
    assert comparison["cost"]["arm"]["price_per_query"] > 0
    assert comparison["cost"]["break_even"]["tuning_cost"] > 0
    said = "\n".join(guarded.said)
    assert "power: digits" in said and "cannot exclude a loss below" in said
    assert said.index("power: digits") < said.index("train:")
    planned = json.loads((folder / "baseline" / "power.json").read_text())
    assert [one["suite"] for one in planned["suites"]] == ["digits", "guard"]
    screen = last_screen(folder, comparison, outcome.report)
    assert "suite    guard (regression): text_match" in screen
    assert "price" in screen
    page = outcome.report.read_text()
    assert "guard, against base, zero-shot" in page and "price of a query" in page
    again = guarded.run("eval.prices.per_hour=3", "train.max_steps=2")
    assert again.folder == folder and again.worked == ("compare",)  # a price changes no result


def test_ctrl_c_leaves_a_report_of_how_far_the_run_came(
    guarded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from finetune.pipeline import run as pipeline

    pages: list[str] = []

    def interrupted(context: Any, rows: Any) -> None:
        pages.append((context.folder / "report.html").read_text())
        (context.folder / "report.html").unlink()
        raise KeyboardInterrupt

    monkeypatch.setattr(pipeline, "train_stage", interrupted)
    with pytest.raises(KeyboardInterrupt):
        guarded.run(run_dir=guarded.folder / "stopped")
    pages.append((guarded.folder / "stopped" / "report.html").read_text())
    for page in pages:  # the one written after the baseline, and the one after Ctrl-C
        assert "The baseline is measured. Training has not started" in page
        assert "cannot exclude a loss below" in page
