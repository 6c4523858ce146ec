"""The entry point: what an interrupted command says, and its exit code."""

from __future__ import annotations

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
        main(["run", "any.yaml"])
    assert stop.value.code == 130
    assert "interrupted; the same command continues" in capsys.readouterr().err
