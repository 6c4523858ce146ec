"""`finetune merge models` as a user types it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from finetune.cli.merge import app
from finetune.errors import UserError
from finetune.merge.models import merge as merging


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str, str]:
    """Three folders of two tensors; the proof by transformers is tested elsewhere."""
    monkeypatch.setattr(merging, "check_loads", lambda folder: 1.0)
    config = {"model_type": "llama", "num_hidden_layers": 1, "hidden_size": 4, "vocab_size": 6}
    made = []
    for seed, name in enumerate(("base", "one", "two")):
        folder = tmp_path / name
        folder.mkdir()
        draw = torch.Generator().manual_seed(seed)
        names = ("model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight")
        save_file({n: torch.randn(6, 4, generator=draw) for n in names}, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "tokenizer.json").write_text('{"model": {"type": "WordLevel", "vocab": {"a": 0}}}')
        made.append(str(folder))
    return made[0], made[1], made[2]


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["models", *arguments], catch_exceptions=False)


def test_a_dry_run_prints_the_costs_and_writes_nothing(folders: tuple[str, str, str], tmp_path: Path) -> None:
    base, one, two = folders
    chosen = ("merge/ties", "--base", base, "--model", one, "--model", two)
    answer = json.loads(run(*chosen, "--out", str(tmp_path / "out"), "--dry-run", "--json").stdout)
    assert answer["source_bytes"] == 3 * 2 * 6 * 4 * 4
    assert answer["read_bytes"] == 3 * answer["source_bytes"]  # measured over the model, majority, merged
    assert answer["write_bytes"] == 2 * 6 * 4 * 4
    assert answer["disk_bytes"] > answer["write_bytes"]
    text = run(*chosen, "--dry-run").stdout
    assert "ties, dialect paper" in text
    assert "peak memory" in text
    assert not (tmp_path / "out").exists()


def test_a_merge_writes_model_recipe_report_and_card(folders: tuple[str, str, str], tmp_path: Path) -> None:
    base, one, two = folders
    out = tmp_path / "out"
    answer = run(
        "merge/soup", "--base", base, "--model", one, "--model", two, "--out", str(out), "--diagnostics"
    )
    assert "merged and proven in" in answer.stdout
    assert "The merged model is whole" in answer.stdout
    assert f"finetune eval model {out} --suite SUITE --against {two}" in answer.stdout
    assert "sign_conflict" in answer.stdout
    names = {path.name for path in out.iterdir()}
    assert names >= {
        "model.safetensors", "config.json", "tokenizer.json", "README.md", "merge_report.json", "merge_recipe.json",
        "diagnostics.json",
    }  # fmt: skip
    assert '"merge_method": "linear"' in (out / "README.md").read_text()
    again = run(
        str(out / "merge_recipe.json"), "--out", str(tmp_path / "again")
    )  # the recipe as it was carried out
    assert again.exit_code == 0
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (out / "model.safetensors").read_bytes()


def test_a_mergekit_file_and_another_dialect(folders: tuple[str, str, str], tmp_path: Path) -> None:
    base, one, two = folders
    path = tmp_path / "theirs.yml"
    models = [{"model": name, "parameters": {"weight": 0.5, "density": 0.5}} for name in (one, two)]
    path.write_text(json.dumps({"merge_method": "ties", "base_model": base, "models": models}))
    found: dict[str, bytes] = {}
    for dialect in ("", "paper", "peft"):
        out = tmp_path / f"out{dialect}"
        given = ["--dialect", dialect] if dialect else []
        answer = json.loads(run(str(path), "--out", str(out), "--json", *given).stdout)
        assert answer["dialect"] == (dialect or "mergekit")
        found[dialect] = (out / "model.safetensors").read_bytes()
    assert len(set(found.values())) == 3


def test_a_merge_needs_a_folder(folders: tuple[str, str, str]) -> None:
    base, one, _ = folders
    with pytest.raises(UserError, match="no folder for the merged model"):
        run("merge/slerp", "--base", base, "--model", one)
