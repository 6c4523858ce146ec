"""What a page says of a distillation: what was aligned, what the check let through, and what came of both kinds of rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from finetune.report.distillation import read_distillation
from finetune.report.read import read_run

GENERATED = {
    "name": "taught",
    "filter": True,
    "prefer": "shortest",
    "answers_of": "a" * 64,
    "answers": 40,
    "passed": 10,
    "pass_rate": 0.25,
    "rows": 9,
    "difficulty": {
        "never": {"prompts": 5, "answers": 20, "passed": 0, "kept": 5},
        "hard": {"prompts": 5, "answers": 20, "passed": 10, "kept": 5, "rows": 9},
    },
}


def write_run(
    folder: Path, *, spec: str, score: float, generated: dict[str, Any], rate: str = "1e-3"
) -> Path:
    """The files of a finished run that learnt its teacher's answers."""
    suite = folder / "eval" / "digits"
    suite.mkdir(parents=True)
    (folder / "recipe.resolved.yaml").write_text(
        f"name: {folder.name}\ndata: {{spec: {spec}, max_tokens: 64}}\ntrain: {{learning_rate: {rate}}}\n"
    )
    facts = {
        "teacher": {"name": "big", "licence": "MIT"},
        "student": {},
        "way": "answers",
        "generated": [generated],
    }
    (folder / "distillation.json").write_text(json.dumps(facts))
    metrics = {"exact_match": {"mean": score, "low": score - 0.1, "high": score + 0.1, "n": 100}}
    summary = {"suite": "digits", "arm": "tuned", "n": 100, "metrics": metrics}
    (suite / "tuned.summary.json").write_text(json.dumps(summary))
    comparison = {"suite": "digits", "suites": [{"suite": "digits", "primary_metric": "exact_match"}]}
    (folder / "eval" / "comparison.json").write_text(json.dumps(comparison))
    return folder


def told(folder: Path) -> list[str]:
    found = read_distillation(read_run(folder))
    assert found is not None
    return [line.replace("\N{NO-BREAK SPACE}", " ") for line in found.gaps]


def test_passed_answers_are_told_by_difficulty(tmp_path: Path) -> None:
    (line,) = told(write_run(tmp_path / "one", spec="a", score=0.5, generated=GENERATED))
    assert "40 answers of the teacher, 25" in line and "only they are learnt, 9 rows" in line
    assert "none of the answers pass 5 (0" in line and "up to a third 5 (50" in line


def test_both_results_are_shown_where_the_same_answers_were_learnt_without_the_filter(tmp_path: Path) -> None:
    mine = write_run(tmp_path / "filtered", spec="a", score=0.5, generated=GENERATED)
    theirs = write_run(tmp_path / "all", spec="b", score=0.7, generated=GENERATED | {"filter": False})
    for folder, other in ((mine, "all"), (theirs, "filtered")):
        line = told(folder)[-1]
        assert line.startswith("digits, exact match: 50")
        assert line.index("with the filter") < line.index("70") < line.index("without it")
        assert f"finetune eval run {folder.name} --baseline {other}" in line


@pytest.mark.parametrize(
    "changes",
    [
        {"generated": GENERATED | {"filter": False, "answers_of": "b" * 64}},
        {"generated": GENERATED},
        {"generated": GENERATED | {"filter": False}, "rate": "1e-4"},
    ],
    ids=["other answers", "the filter on in both", "another recipe"],
)
def test_runs_that_differ_in_more_than_the_filter_are_not_set_beside_it(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    mine = write_run(tmp_path / "filtered", spec="a", score=0.5, generated=GENERATED)
    write_run(tmp_path / "other", **({"spec": "b", "score": 0.7} | changes))
    assert len(told(mine)) == 1


def test_alignment_says_how_many_targets_lie_one_to_one(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "one", spec="a", score=0.5, generated={})
    facts = {
        "student_tokens": 259, "teacher_tokens": 337, "shared_tokens": 257, "targets": 200, "boundaries": 150,
        "targets_one_to_one": 120, "targets_in_groups": 80,
    }  # fmt: skip
    (folder / "alignment.json").write_text(json.dumps(facts))
    line = told(folder)[0]
    assert "257 tokens are both models'" in line and "120 of 200 targets (60" in line
    (folder / "alignment.json").write_text(json.dumps(facts | {"targets": 0, "targets_one_to_one": "x"}))
    assert not any("aligned" in line for line in told(folder))
