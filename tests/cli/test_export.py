"""`finetune export` as a user types it, where it differs from what it calls."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from finetune.cli.export import _modelfile_path, app
from finetune.errors import UserError


def test_a_modelfile_that_is_there_is_left_as_it_is(tmp_path: Path) -> None:
    assert _modelfile_path(tmp_path / "model-f16.gguf") == tmp_path / "Modelfile"
    (tmp_path / "Modelfile").write_text("FROM ./model-f16.gguf")
    assert _modelfile_path(tmp_path / "model-q8_0.gguf") == tmp_path / "model-q8_0.Modelfile"


def test_public_without_push_means_nothing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--public says who may read what is pushed"):
        CliRunner().invoke(
            app, ["hub", str(tmp_path), "--out", str(tmp_path / "out"), "--public"], catch_exceptions=False
        )
