"""`finetune watch`: a run is found, shown, followed to its end by another process, and told as JSON."""

from __future__ import annotations

import fcntl
import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from finetune.cli.watch import find_run, watch
from finetune.errors import UserError
from finetune.pipeline.manifest import LOCK_NAME, is_worked_on
from finetune.telemetry.events import EventLog

app = typer.Typer()
app.command()(watch)


def call(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments), catch_exceptions=False)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run folder of recipe `tiny` with two steps and an answer."""
    monkeypatch.setenv("FINETUNE_RUNS", str(tmp_path))
    folder = tmp_path / "tiny-01234567"
    folder.mkdir()
    (folder / "manifest.json").write_text("{}")
    log = EventLog(folder / "events.jsonl")
    log.write("start", step=0, total_steps=4)
    for step in (1, 2):
        log.write("step", step=step, loss=2.0 / step, grad_norm=1.0, epoch=0.5)
    log.write("sample", step=2, index=0, name="row-0", output="an answer")
    return folder


def test_a_run_is_found_by_path_by_name_and_by_recipe(run: Path) -> None:
    assert (
        find_run(str(run))
        == find_run("tiny-01234567")
        == find_run("tiny")
        == find_run("sft/tiny.yaml")
        == run
    )
    with pytest.raises(UserError, match="no run folder"):
        find_run("other")


def test_a_recipe_whose_file_has_another_name_than_its_runs_is_found(run: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "another.yaml"
    recipe.write_text(
        "name: tiny\nmodel: {id: tiny}\ndata: {spec: tiny}\neval: {suites: [tiny]}\n", encoding="utf-8"
    )
    assert find_run(str(recipe)) == run


def test_how_it_stands(run: Path) -> None:
    text = call("tiny", "--once").stdout
    assert text.startswith("step 2/4, epoch 0.50")
    assert "row-0: an answer" in text
    found = json.loads(call("tiny", "--once", "--json").stdout)
    assert (found["step"]["loss"], found["total_steps"], found["is_running"]) == (1.0, 4, False)
    assert found["samples"][0]["output"] == "an answer"


def test_a_finished_run_is_shown_and_left(run: Path) -> None:
    result = call("tiny")
    assert "step 2/4" in result.stdout
    assert "no process works in" in result.stderr
    events = [json.loads(line) for line in call("tiny", "--json").stdout.splitlines()]
    assert [event["event"] for event in events] == ["start", "step", "step", "sample"]


def test_a_lock_tells_whether_somebody_works_there(run: Path) -> None:
    assert not is_worked_on(run)
    with (run / LOCK_NAME).open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert is_worked_on(run)
    assert not is_worked_on(run)


def test_a_run_of_another_process_is_followed_to_its_end(run: Path) -> None:
    writer = textwrap.dedent(
        """
        import fcntl, sys, time
        from pathlib import Path
        from finetune.telemetry.events import EventLog
        folder = Path(sys.argv[1])
        lock = (folder / ".lock").open("w")
        fcntl.flock(lock, fcntl.LOCK_EX)
        print("locked", flush=True)
        time.sleep(0.3)
        log = EventLog(folder / "events.jsonl")
        for step in (3, 4):
            log.write("step", step=step, loss=0.5)
            time.sleep(0.2)
        """
    )
    process = subprocess.Popen([sys.executable, "-c", writer, str(run)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "locked\n"
        lines = [json.loads(line) for line in call("tiny", "--json").stdout.splitlines()]
    finally:
        process.wait(timeout=60)
    assert [event["step"] for event in lines if event["event"] == "step"] == [1, 2, 3, 4]
