"""`finetune report`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from finetune.cli.main import main
from finetune.cli.report import report
from finetune.errors import UserError

_app = typer.Typer()
_app.command()(report)


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    (tmp_path / "recipe.resolved.yaml").write_text("name: tiny\nmodel:\n  id: somewhere\n")
    return tmp_path


def test_it_writes_the_page_and_prints_its_path(run_folder: Path) -> None:
    result = CliRunner().invoke(_app, [str(run_folder)])
    assert result.exit_code == 0
    assert result.stdout.strip() == str(run_folder / "report.html")
    assert "<title>tiny: No verdict yet</title>" in (run_folder / "report.html").read_text()


def test_json(run_folder: Path) -> None:
    result = CliRunner().invoke(_app, [str(run_folder), "--json"])
    answer = json.loads(result.stdout)
    assert answer == {
        "report": str(run_folder / "report.html"),
        "bytes": (run_folder / "report.html").stat().st_size,
    }


def test_a_folder_that_is_no_run_is_a_user_error(tmp_path: Path) -> None:
    result = CliRunner().invoke(_app, [str(tmp_path / "absent")])
    assert isinstance(result.exception, UserError)


def test_it_is_a_command_of_finetune(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["report", str(run_folder)])
    assert ended.value.code == 0
    assert capsys.readouterr().out.strip().endswith("report.html")
