"""The shipped recipe for continued pre-training, through a whole run on a tiny model."""

from __future__ import annotations

import json
from typing import Any

import pytest

from finetune.paths import read_json
from finetune.pipeline.run import run_recipe


def test_running_text_is_learnt_and_judged_by_text_that_training_has_not_seen(
    project: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("finetune.training.session.measure_peak_flops", lambda dtype, device: 1e12)
    said: list[str] = []
    outcome = run_recipe(
        "pretrain/service_notes_lora",
        [
            f"model.id={project.folder / 'tiny-model'}",
            "model.dtype=fp32",
            "eval.suites=[service_notes]",
            "train.epochs=1",
            "train.learning_rate=1e-2",
            "data.max_train_rows=20",
        ],
        say=said.append,
    )
    folder = outcome.folder
    rows = [json.loads(line) for line in (folder / "data/train.jsonl").read_text().splitlines()]
    items = [
        json.loads(line) for line in (folder / "eval/service_notes/tuned.jsonl").read_text().splitlines()
    ]
    assert {row["kind"] for row in rows} == {"text"}
    assert len(items) == 17
    texts = {row["text"] for row in rows}
    assert not [item for item in items if item["reference"] in texts]
    assert all(item["reference"].startswith("Device: ") for item in items)

    # Bytes are tokens here: all but the first of a document is a target, and the end-of-text token after it.
    counted = read_json(folder / "data/tokenised.json")["splits"]["train"]
    assert counted["counts"]["kept"] == 20
    assert counted["target_tokens"] == sum(len(row["text"].encode()) for row in rows[:20])

    comparison = read_json(folder / "eval/comparison.json")
    (primary,) = [one for one in comparison["comparisons"] if one["metric"] == "nll_per_token"]
    assert primary["baseline"] == "zero_shot"
    assert primary["high"] < -0.1  # nats a token; a random model has much to learn
    assert comparison["verdict"] == "improved"
