"""Small folders that look like models: files and configuration of a Llama, and no more."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from finetune.recipe.merge_loader import LoadedMerge, load_merge

HIDDEN, ROWS, LAYERS = 8, 12, 3


def config(**given: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": 16,
        "vocab_size": ROWS,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "dtype": "float32",
    } | given


def make_tensors(
    seed: int, *, rows: int = ROWS, layers: int = LAYERS, head: bool = True, near: int = 0
) -> dict[str, Any]:
    """Weights of a Llama: those of seed `near`, moved a little by `seed`."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (rows, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    for i in range(layers):
        at = f"model.layers.{i}"
        shapes |= {f"{at}.self_attn.{name}_proj.weight": (HIDDEN, HIDDEN) for name in "qkvo"}
        shapes |= {f"{at}.mlp.{name}_proj.weight": (16, HIDDEN) for name in ("gate", "up")}
        shapes |= {f"{at}.mlp.down_proj.weight": (HIDDEN, 16)}
        shapes |= {f"{at}.{name}_layernorm.weight": (HIDDEN,) for name in ("input", "post_attention")}
    if head:
        shapes["lm_head.weight"] = (rows, HIDDEN)
    start, moved = torch.Generator().manual_seed(near), torch.Generator().manual_seed(1000 + seed)
    return {
        name: torch.randn(shape, generator=start) + 0.1 * torch.randn(shape, generator=moved)
        for name, shape in shapes.items()
    }


def make_tokenizer(tokens: list[str], added: list[str] | None = None) -> dict[str, Any]:
    """A WordLevel tokenizer.json; added tokens come after the vocabulary."""
    entries = [
        {
            "id": len(tokens) + i, "content": token, "single_word": False, "lstrip": False, "rstrip": False,
            "normalized": False, "special": True,
        }
        for i, token in enumerate(added or [])
    ]  # fmt: skip
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": entries, "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": None, "decoder": None,
        "model": {"type": "WordLevel", "vocab": {t: i for i, t in enumerate(tokens)}, "unk_token": tokens[0]},
    }  # fmt: skip


WORDS = [f"w{i}" for i in range(ROWS)]


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., Path]:
    """Write a model folder; `values` are its tensors, `words` its tokenizer, `given` keys of its configuration."""

    def write(
        name: str,
        values: dict[str, torch.Tensor] | int,
        words: dict[str, Any] | None = None,
        dtype: torch.dtype = torch.float32,
        **given: Any,
    ) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        found = make_tensors(values) if isinstance(values, int) else values
        save_file(
            {k: v.to(dtype) for k, v in found.items()},
            folder / "model.safetensors",
            metadata={"format": "pt"},
        )
        (folder / "config.json").write_text(json.dumps(config(**given)))
        (folder / "tokenizer.json").write_text(json.dumps(words or make_tokenizer(WORDS)))
        (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
        return folder

    return write


@pytest.fixture
def recipe(tmp_path: Path) -> Callable[..., LoadedMerge]:
    """A recipe from keys; paths become text."""

    def read(**keys: Any) -> LoadedMerge:
        path = tmp_path / f"recipe{len(list(tmp_path.glob('recipe*')))}.yaml"
        path.write_text(json.dumps(keys, default=str))
        return load_merge(path)

    return read


@pytest.fixture
def three(save: Callable[..., Path]) -> tuple[Path, Path, Path]:
    """A base and two models near it."""
    return save("base", 0), save("one", 1), save("two", 2)


@pytest.fixture
def tensors() -> Callable[..., dict[str, torch.Tensor]]:
    return make_tensors


@pytest.fixture
def tokenizer() -> Callable[..., dict[str, Any]]:
    return make_tokenizer
