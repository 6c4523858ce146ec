"""`finetune diagnose RUN`: the shape, its evidence and remedy, in words and as JSON."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from finetune.cli.main import app
from finetune.errors import UserError
from finetune.telemetry.events import EventLog


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """A run whose loss jumps at step 60 and stays; its log ends in the middle of a line."""
    folder = tmp_path / "tiny-12345678"
    log = EventLog(folder / "events.jsonl")
    for step in range(1, 91):
        loss = 2.5 * math.exp(-step / 40) + 0.01 * (step % 5) if step < 60 else 4.0
        fields: dict[str, Any] = {"grad_norm": 1.0, "update_ratio": 1e-3, "learning_rate": 1e-3}
        log.write("step", step=step, epoch=step / 100, loss=loss, rows=[f"row-{step * 7 % 101}"], **fields)
    with (folder / "events.jsonl").open("a") as stream:
        stream.write('{"event": "st')
    return folder


def test_it_says_what_where_and_what_to_do(run_folder: Path) -> None:
    result = CliRunner().invoke(app, ["diagnose", str(run_folder)], catch_exceptions=False)
    assert result.exit_code == 0
    assert result.stdout.startswith("fault   divergence: from step 60 on the loss stays at 4")
    assert "remedy: go back to the last good checkpoint" in result.stdout


def test_json(run_folder: Path) -> None:
    result = CliRunner().invoke(app, ["diagnose", str(run_folder), "--json"], catch_exceptions=False)
    answer = json.loads(result.stdout)
    assert answer["shape"] == "divergence" == answer["findings"][0]["shape"]
    assert answer["findings"][0]["steps"] == [60]
    assert answer["findings"][0]["evidence"]["loss_after"] == pytest.approx(4.0)


def test_a_folder_without_events_and_one_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no events\.jsonl"):
        CliRunner().invoke(app, ["diagnose", str(tmp_path)], catch_exceptions=False)
    with pytest.raises(UserError, match="no run folder nowhere"):
        CliRunner().invoke(app, ["diagnose", "nowhere"], catch_exceptions=False)


def test_reading_a_curve_needs_no_torch() -> None:
    code = "import sys, finetune.doctor.diagnosis, finetune.cli.diagnose; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_what_was_done_about_a_divergence_stands_behind_the_findings(run_folder: Path) -> None:
    log = EventLog(run_folder / "events.jsonl")
    log.write("rewind", step=50, onset=60, reason="diverged", rate_factor=0.5, rows=[])
    log.write("resume", step=50)
    result = CliRunner().invoke(app, ["diagnose", str(run_folder)], catch_exceptions=False)
    assert "divergence:" not in result.stdout
    last = result.stdout.splitlines()[-1]
    assert last == "After divergence at step 60 the run went back to step 50 and on with 0.5 of the rate."
    answer = json.loads(CliRunner().invoke(app, ["diagnose", str(run_folder), "--json"]).stdout)
    assert [event["onset"] for event in answer["rewinds"]] == [60]
