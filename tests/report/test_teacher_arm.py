"""How a page speaks of a student beside its teacher: what is left of the gap is no loss."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from finetune.paths import write_json
from finetune.report.distillation import read_distillation
from finetune.report.page import write_report
from finetune.report.read import read_run
from finetune.report.verdict import read_verdict


@pytest.fixture
def student(factory: ModuleType, run_folder: Path) -> Path:
    """A run whose tuned model is compared with a teacher too."""
    below = {"difference": -0.2, "low": -0.26, "high": -0.14, "verdict": "regressed"}
    beside = [
        factory.compared(baseline="teacher", **below),
        factory.compared(baseline="teacher", metric="slot_f1", difference=0.1, low=0.05, high=0.15),
        factory.compared(baseline="zero_shot", **below),
    ]
    write_json(run_folder / "eval" / "comparison.json", factory.comparison_of([factory.compared(), *beside]))
    return run_folder


def test_what_is_left_to_the_teacher_is_no_loss(student: Path) -> None:
    verdict = read_verdict(read_run(student))
    _, left, above, lost = verdict.comparisons
    assert left.judged.word == "Below the teacher" and left.judged.style == "neutral"
    assert left.sentence().startswith("Exact match is 20.0\N{NO-BREAK SPACE}points below the teacher (")
    assert above.judged.word == "Above the teacher" and "above the teacher" in above.sentence()
    assert lost.judged.word == "Regressed"
    assert [text for _, text in verdict.because] == [
        f"home_intents: {lost.sentence(opens=False)}, margin 2.0\N{NO-BREAK SPACE}points."
    ]


def latencies(folder: Path) -> list[str | None]:
    found = read_distillation(read_run(folder))
    assert found is not None
    (row,) = [cells for name, cells in found.tables[0].rows if name.value == "latency, median"]
    return [cell.value for cell in row]


def test_a_wait_is_told_in_seconds_from_one_second_on(student: Path) -> None:
    write_json(student / "distillation.json", {"teacher": {"name": "big", "licence": "MIT"}, "student": {}})
    baseline = student / "baseline" / "home_intents"
    summary: dict[str, Any] = json.loads((baseline / "zero_shot.summary.json").read_text())
    for arm, seconds in (("start", 0.25), ("teacher", 3.1925)):
        write_json(
            baseline / f"{arm}.summary.json",
            summary | {"arm": arm, "latency_seconds": {"p50": seconds, "p95": seconds}},
        )
    record = json.loads((student / "eval" / "comparison.json").read_text()) | {"against": "start"}
    record["suites"] = [
        {"suite": "home_intents", "primary_metric": "exact_match", "gap": {"before": "start"}}
    ]
    write_json(student / "eval" / "comparison.json", record)
    before, _, teacher = latencies(student)
    assert (before, teacher) == ("250\N{NO-BREAK SPACE}ms", "3.19\N{NO-BREAK SPACE}s")


def test_a_model_tuned_whole_has_no_rank(student: Path) -> None:
    recipe = student / "recipe.resolved.yaml"
    has_rank = recipe.read_text()
    assert "kind: lora" in has_rank and ">rank<" in write_report(student).read_text()
    recipe.write_text(has_rank.replace("kind: lora", "kind: none"))
    assert ">rank<" not in write_report(student).read_text()
