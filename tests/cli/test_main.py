"""The entry point: what an interrupted command says, and its exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from finetune.cli.main import main


def test_ctrl_c_says_that_the_same_command_continues(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("finetune.pipeline.run.run_recipe", interrupted)
    with pytest.raises(SystemExit) as stop:
        main(["run", "sft/home_intents_lora"])
    assert stop.value.code == 130
    assert "interrupted; the same command continues" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["stats", "compare", "--json"], "Missing argument 'A'"),
        (["stats", "compare", "a", "b", "--metrc", "f1", "--json"], "No such option: --metrc"),
        (["stats", "power", "--items", "0", "--json"], "'--items'"),
        (["no-such-command", "--json"], "no-such-command"),
    ],
)
def test_a_wrong_command_line_is_answered_in_json_too(
    arguments: list[str], what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    answer = json.loads(capsys.readouterr().out)
    assert what in answer["error"][0]["what"]
    assert answer["exit_code"] == 2


def test_a_fault_of_ours_keeps_its_traceback_and_is_answered_in_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("finetune.stats.records.read_pair", broken)
    with pytest.raises(ZeroDivisionError):
        main(["stats", "compare", "a", "b", "--json"])
    answer = json.loads(capsys.readouterr().out)
    assert answer["error"][0]["what"] == "internal fault: ZeroDivisionError: a bug"
    assert answer["exit_code"] == 1


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_json_holds_what_the_terminal_cannot_show(tmp_path: Path, encoding: str) -> None:
    """Half of a surrogate pair has no UTF-8, and a terminal of few letters no umlaut."""
    for name, item in (("a", "\\ud800"), ("b", "é😀")):
        (tmp_path / f"{name}.jsonl").write_text(f'{{"item": "{item}", "score": 1}}\n', encoding="utf-8")
    command = [sys.executable, "-m", "finetune.cli.main", "stats", "compare", "a.jsonl", "b.jsonl"]
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    for flags in ([], ["--json"]):
        done = subprocess.run([*command, *flags], cwd=tmp_path, env=environment, capture_output=True)
        assert done.returncode == 2, done.stderr
        assert b"Traceback" not in done.stderr
    assert "only in A (\ud800)" in json.loads(done.stdout)["error"][0]["what"]


def test_a_reader_that_goes_away_is_no_bug(tmp_path: Path) -> None:
    command = f"{sys.executable} -m finetune.cli.main eval scorers | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True)
    assert done.returncode in (0, 1)  # written before the reader went, or after
    assert done.stderr == b""
