"""A small task and a trainer over it, for the tests of training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from finetune.data.rows import Row
from finetune.data.tokenise import TokenisedRow, tokenise_rows
from finetune.model.attention import register_document_attention
from finetune.recipe.schema import Recipe
from finetune.training.sft import train_sft
from finetune.training.trained_part import add_trained_part


def _recipe(**changes: Any) -> Recipe:
    """A recipe over the tiny model; `changes` are dotted keys with '__' for the dot, e.g. train__epochs=1."""
    tree: dict[str, Any] = {
        "name": "tiny",
        "model": {"id": "tiny", "dtype": "fp32"},
        "adapter": {"rank": 8, "alpha": 16},
        "data": {"spec": "tiny", "max_tokens": 256},
        "train": {
            "learning_rate": 1e-2,
            "pack_tokens": 256,
            "checkpoint_every_steps": 2,
            "warmup_share": 0.0,
        },
        "eval": {"suites": ["tiny"]},
    }
    for key, value in changes.items():
        section, _, name = key.partition("__")
        if name:
            tree.setdefault(section, {})[name] = value
        else:
            tree[section] = value
    return Recipe.model_validate(tree)


def _rows(tokenizer: Any, n: int, turns: int) -> list[TokenisedRow]:
    """Rows of uneven length: 'n?' is answered by the number in words, several times over."""
    words = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    rows = []
    for index in range(n):
        messages: list[dict[str, Any]] = [{"role": "system", "content": "s"}]
        for turn in range(turns):
            answer = " ".join([words[(index + turn) % 10]] * (1 + index % 3))
            messages += [
                {"role": "user", "content": f"{index}{turn}?"},
                {"role": "assistant", "content": answer},
            ]
        rows.append(
            Row(id=f"row-{index}", messages=tuple(messages), group=str(index), source="test", tags={})
        )
    return tokenise_rows(rows, tokenizer, max_tokens=256).rows


@pytest.fixture
def make_recipe() -> Callable[..., Recipe]:
    """Keyword arguments are dotted keys with '__' for the dot: make_recipe(train__epochs=1)."""
    return _recipe


@pytest.fixture
def make_rows(tiny_tokenizer: Any) -> Callable[..., list[TokenisedRow]]:
    """make_rows(n, turns=1): tokenised rows of uneven length."""
    return lambda n=8, turns=1: _rows(tiny_tokenizer, n, turns)


@pytest.fixture
def adapted_model(make_tiny_model: Callable[..., Any], tiny_tokenizer: Any) -> Callable[..., Any]:
    """adapted_model(recipe): the tiny model with the recipe's attention and adapter."""

    def build(recipe: Recipe, **options: Any) -> Any:
        register_document_attention()
        model = make_tiny_model(**options)
        # Random embeddings are too short for an adapter over a frozen head to reach a sure answer.
        model.get_input_embeddings().weight.data *= 3
        model.set_attn_implementation("document" if recipe.train.packing else "sdpa")
        return add_trained_part(model, recipe, rows=_rows(tiny_tokenizer, 8, 1))

    return build


@pytest.fixture
def train(
    tmp_path: Path, tiny_tokenizer: Any, make_rows: Any, adapted_model: Any, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Any]:
    """train(recipe, name=..., rows=..., validation=...) in `tmp_path / name`; returns (result, run folder, model)."""
    monkeypatch.setattr("finetune.training.session.measure_peak_flops", lambda dtype, device: 1e12)

    def run(
        recipe: Recipe,
        *,
        name: str = "run",
        rows: list[TokenisedRow] | None = None,
        validation: Sequence[TokenisedRow] = (),
        said: list[str] | None = None,
        model: Callable[[Recipe], Any] = adapted_model,
        **options: Any,
    ) -> Any:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        trained = model(recipe)
        result = train_sft(
            recipe,
            trained,
            tiny_tokenizer,
            rows or make_rows(),
            validation,
            run_folder=folder,
            owner="o" * 64,
            say=(said if said is not None else []).append,
            **options,
        )
        return result, folder, trained

    return run
