"""A whole project in a temporary folder: a tiny local model, a JSONL of the user's own, a suite and a recipe."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]

SPEC = """\
dataset: 1
name: digits
licence: CC0-1.0
source:
  kind: jsonl
  files: [rows.jsonl]
split:
  shares: {train: 0.6, validation: 0.1, test: 0.2, regressions: 0.1}
"""

SUITE = """\
suite: 1
name: digits
items: {spec: digits.yaml, split: test}
zero_shot: {system: Say the number.}
few_shot: {k: 2}
decoding: {max_new_tokens: 8}
scorers: [exact_match]
primary_metric: exact_match
"""

RECIPE = """\
recipe: 1
model:
  id: tiny-model
  dtype: fp32
adapter: {rank: 8, alpha: 16}
data: {spec: digits.yaml, max_tokens: 128}
train:
  learning_rate: 1e-2
  epochs: 2
  pack_tokens: 256
  checkpoint_every_steps: 2
eval:
  suites: [suite.yaml]
"""


@dataclass
class Project:
    """Paths of the project; `run` is `run_recipe` with its remarks collected in `said`."""

    folder: Path
    recipe: Path
    said: list[str]

    def run(self, *overrides: str, **options: Any) -> Any:
        from finetune.pipeline.run import run_recipe

        self.said.clear()
        return run_recipe(str(self.recipe), overrides, say=self.said.append, **options)


@pytest.fixture
def project(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    make_tiny_model: Callable[..., Any],
    make_tiny_tokenizer: Callable[..., Any],
) -> Project:
    make_tiny_model().save_pretrained(tmp_path / "tiny-model")
    make_tiny_tokenizer().save_pretrained(tmp_path / "tiny-model")
    rows = []
    for index in range(60):
        digits = f"{index:02d}"
        answer = json.dumps({"n": f"{WORDS[index // 10]} {WORDS[index % 10]}"})
        rows.append(
            {"messages": [{"role": "user", "content": digits}, {"role": "assistant", "content": answer}]}
        )
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, text in (("digits.yaml", SPEC), ("suite.yaml", SUITE), ("recipe.yaml", RECIPE)):
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FINETUNE_RUNS", str(tmp_path / "runs"))
    return Project(tmp_path, tmp_path / "recipe.yaml", [])
