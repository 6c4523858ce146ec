"""`finetune data show`: characters of several tokens are shown whole, and all commands of `data` are there."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from finetune.cli.data import app


def test_tokens_that_make_up_one_character_are_shown_as_that_character(
    tmp_path: Path, tiny_model_folder: Path
) -> None:
    """The tiny tokenizer has a token a byte; the answer ends where learning ends, in whatever byte."""
    (tmp_path / "rows.jsonl").write_text(
        json.dumps({"prompt": "Größe 今?", "completion": "sehr groß 👍"}) + "\n"
    )
    spec = {
        "dataset": 1,
        "name": "mine",
        "source": {"kind": "jsonl", "files": ["rows.jsonl"]},
        "split": {"shares": {"train": 1.0}},
    }
    (tmp_path / "mine.yaml").write_text(json.dumps(spec))
    said = CliRunner().invoke(
        app,
        ["show", str(tmp_path / "mine.yaml"), "--model", str(tiny_model_folder), "--builds", str(tmp_path / "builds")],
        catch_exceptions=False,
    )  # fmt: skip
    assert "G|r|ö|ß|e| |今|?|<|im_end|>|" in said.output
    assert "s|e|h|r| |g|r|o|ß| |👍|<|im_end|>|" in said.output
    assert "\ufffd" not in said.output
    assert "trained span 0: 'sehr groß 👍<|im_end|>'" in said.output


def test_every_command_is_there() -> None:
    said = CliRunner().invoke(app, ["--help"]).output
    for name in ("build", "show", "check", "consistency", "lengths", "review", "card"):
        assert f"  {name} " in said
