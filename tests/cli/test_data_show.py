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


def test_answers_with_a_weight_of_their_own_are_shown_with_it(
    tmp_path: Path, tiny_model_folder: Path
) -> None:
    turns = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "half", "weight": 0.5},
        {"role": "user", "content": "r"},
        {"role": "assistant", "content": "whole"},
    ]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    (tmp_path / "mine.yaml").write_text(
        "name: mine\nsource: {kind: jsonl, files: [rows.jsonl]}\nsplit: {shares: {train: 1.0}}\n"
    )
    asked = ["show", str(tmp_path / "mine.yaml"), "--model", str(tiny_model_folder)]
    asked += ["--builds", str(tmp_path / "builds")]
    said = CliRunner().invoke(app, asked, catch_exceptions=False).output
    assert "trained span 0 (weight 0.5): 'half<|im_end|>'" in said
    assert "trained span 1 (weight 1): 'whole<|im_end|>'" in said
    table = json.loads(CliRunner().invoke(app, [*asked, "--json"], catch_exceptions=False).stdout)
    assert {token["weight"] for token in table["tokens"] if token["target"]} == {0.5, 1.0}


def test_every_command_is_there() -> None:
    said = CliRunner().invoke(app, ["--help"]).output
    for name in ("build", "show", "check", "consistency", "lengths", "review", "card"):
        assert f"  {name} " in said
