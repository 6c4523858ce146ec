"""A tiny student, its rows and a training of it towards a teacher."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from finetune.data.rows import Row
from finetune.data.tokenise import TokenisedRow, tokenise_rows
from finetune.model.attention import register_document_attention
from finetune.recipe.schema import Recipe
from finetune.training.trained_part import add_trained_part


@pytest.fixture
def make_recipe() -> Callable[..., Recipe]:
    """make_recipe({'distil.loss.kind': 'jsd'}): a recipe over the tiny model, full tuning, fp32."""

    def build(changes: dict[str, Any] | None = None) -> Recipe:
        tree: dict[str, Any] = {
            "name": "tiny",
            "model": {"id": "tiny", "dtype": "fp32"},
            "adapter": {"kind": "none"},
            "data": {"spec": "tiny", "max_tokens": 256},
            "train": {
                "method": "distil",
                "learning_rate": 3e-3,
                "pack_tokens": 256,
                "checkpoint_every_steps": 1,
                "warmup_share": 0.0,
            },
            "distil": {"teacher": {"id": "tiny"}, "loss": {}},
            "eval": {"suites": ["tiny"]},
        }
        for dotted, value in (changes or {}).items():
            *sections, leaf = dotted.split(".")
            held = tree
            for section in sections:
                held = held.setdefault(section, {})
            held[leaf] = value
        return Recipe.model_validate(tree)

    return build


@pytest.fixture
def rows(tiny_tokenizer: Any) -> list[TokenisedRow]:
    """Eight rows of uneven length."""
    words = ["zero", "one", "two", "three", "four", "five", "six", "seven"]
    found = []
    for index, word in enumerate(words):
        turns = (
            {"role": "user", "content": f"{index}?"},
            {"role": "assistant", "content": " ".join([word] * (1 + index % 3))},
        )
        found.append(Row(id=f"row-{index}", messages=turns, group=str(index), source="test", tags={}))
    return tokenise_rows(found, tiny_tokenizer, max_tokens=256).rows


@pytest.fixture
def teacher(make_tiny_model: Callable[..., Any]) -> Any:
    """A model of four layers whose distributions are far from flat."""
    model = make_tiny_model(seed=5, layers=4)
    model.get_input_embeddings().weight.data *= 3
    return model.requires_grad_(False)


@pytest.fixture
def train(tmp_path: Path, tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """train(recipe, student, teaching, rows): trains a copy of `student`; returns (result, folder, trained model)."""
    from finetune.distil.train import train_distil

    monkeypatch.setattr("finetune.training.session.measure_peak_flops", lambda dtype, device: 1e12)

    def run(
        recipe: Recipe,
        student: Any,
        teaching: Any,
        rows: list[TokenisedRow],
        *,
        name: str = "run",
        n_vocabulary: int = 259,
        validation: list[TokenisedRow] | None = None,
        said: list[str] | None = None,
    ) -> Any:
        register_document_attention()
        model = copy.deepcopy(student).requires_grad_(True)
        model.set_attn_implementation("document" if recipe.train.packing else "sdpa")
        model = add_trained_part(model, recipe, rows=rows)
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        result = train_distil(
            recipe,
            model,
            tiny_tokenizer,
            rows,
            validation or [],
            teaching=teaching,
            n_vocabulary=n_vocabulary,
            run_folder=folder,
            owner="o" * 64,
            say=(said if said is not None else []).append,
        )
        return result, folder, model

    return run


@pytest.fixture
def target_logits() -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """target_logits(model, rows): logits [n, V] before every target of the rows, one row at a time, and the targets [n]."""

    @torch.no_grad()
    def collect(model: Any, rows: list[TokenisedRow]) -> tuple[torch.Tensor, torch.Tensor]:
        logits, answers = [], []
        for row in rows:
            labels = torch.tensor(row.labels)[1:]
            wanted = labels != -100
            logits.append(model(input_ids=torch.tensor([row.input_ids])).logits[0, :-1][wanted])
            answers.append(labels[wanted])
        return torch.cat(logits), torch.cat(answers)

    return collect
