"""`finetune review RUN --summary`, as a user calls it; the page itself is tested in tests/report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from finetune.cli import review
from finetune.errors import UserError
from finetune.evaluation.records import write_arm
from finetune.evaluation.scoring import summarise_arm
from finetune.evaluation.suite import load_suite
from finetune.report.review.sample import ReviewItem
from finetune.report.review.verdicts import VerdictFile

SUITE = """\
suite: 1
name: task
items: {jsonl: task.jsonl}
scorers: [text_match]
primary_metric: text_match
"""


def call(*arguments: str | Path) -> Result:
    app = typer.Typer()
    app.command()(review.review)
    return CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    run = tmp_path / "run"
    run.mkdir()
    (tmp_path / "task.yaml").write_text(SUITE)
    (tmp_path / "task.jsonl").write_text("")
    (run / "recipe.resolved.yaml").write_text(
        f"eval: {{suites: [{tmp_path / 'task.yaml'}], baselines: [zero_shot], against: zero_shot}}\n"
    )
    suite = load_suite(tmp_path / "task.yaml")
    for folder, arm, score in (("baseline", "zero_shot", 0.0), ("eval", "tuned", 1.0)):
        records = [
            {"item": f"i{n}", "arm": arm, "cluster": "c", "source": "s", "tags": {}, "prompt": "p", "reference": "r",
             "output": arm, "prompt_tokens": 1, "output_tokens": 1, "finish_reason": "stop", "latency_seconds": 0.1,
             "scores": {"text_match": score}}
            for n in range(50)
        ]  # fmt: skip
        summary = summarise_arm(
            suite, records, arm=arm, seconds=1.0, key="k", items_digest="i", adapter_sha256=None, batch_size=1,
            template_sha256="t",
        )  # fmt: skip
        write_arm(run / folder / "task", summary, records)
    return run


def test_the_summary_counts_what_was_read_of_this_draw(run: Path) -> None:
    assert call(run, "--summary").stdout == "0 of 40 items read\n"
    verdicts = VerdictFile(run / "eval" / "review.jsonl")
    for number in range(50):
        item = ReviewItem(
            f"i{number}", "task", "fixed", "p", "r", {"baseline": "zero_shot", "tuned": "tuned"},
            {"baseline": False, "tuned": True}, ("baseline", "tuned"),
        )  # fmt: skip
        verdicts.add(item, "2", "")
    said = call(run, "--summary").stdout
    assert said.startswith("40 of 40 items read\nreader and scorer agree on 80 of 80 answers: 100.0%")
    assert "below 7.2% (95 %)" in said
    found = json.loads(call(run, "--summary", "--items", "5", "--json").stdout)
    assert (found["read"], found["planned"], found["agreed"]) == (5, 5, 10)


def test_a_folder_that_is_no_run_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a run folder"):
        call(tmp_path, "--summary")
