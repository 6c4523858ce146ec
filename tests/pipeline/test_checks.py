"""The longest forward pass that the memory forecast counts with, where rows of a pack share what they begin with."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from finetune.data.row_tokens import IGNORED, TokenisedRow
from finetune.data.tokenise import TokenisedSplit
from finetune.pipeline.checks import forecasts_here
from finetune.recipe.schema import Recipe

SYSTEM = list(range(100, 140))
SIZE: dict[str, Any] = {
    "vocab_size": 259,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
STILL = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
# Four rows of 50 tokens in a pack, and what is left of them where 40 are computed once.
REPEATED, ONCE = 200, 80


def _tokens(config: dict[str, Any], rows: Any = None, **train: Any) -> int:
    recipe = Recipe.model_validate(
        {
            "name": "tiny",
            "model": {"id": "tiny"},
            "data": {"spec": "tiny", "max_tokens": 200},
            "train": {"pack_tokens": 200, **train},
            "eval": {"suites": ["tiny"]},
        }
    )
    own = [[*SYSTEM, *range(n, n + 10)] for n in range(1, 90, 11)][:8]
    made = [TokenisedRow(str(n), ids, [IGNORED] * 45 + ids[45:], 5) for n, ids in enumerate(own)]
    split = TokenisedSplit(made if rows is None else rows, {})
    forecasts = forecasts_here(recipe, config, split, [])
    assert forecasts is not None
    found = forecasts.training.assumptions["tokens_per_forward"]
    assert isinstance(found, int)
    return found


def _config(kind: str, **changes: Any) -> dict[str, Any]:
    config = getattr(transformers, f"{kind}Config")(**{**SIZE, **changes})
    made: dict[str, Any] = config.to_dict()
    return made


@pytest.mark.parametrize(
    "config",
    [
        _config("Llama"),
        _config("Mistral", sliding_window=None),
        _config("Phi3"),
        {"model_type": "llava", "text_config": _config("Llama")},
        _config("GPT2", n_embd=64, n_layer=2, n_head=4, **STILL),
    ],
    ids=lambda config: str(config["model_type"]),
)
def test_common_beginnings_count_once(config: dict[str, Any]) -> None:
    assert _tokens(config) == ONCE
    assert _tokens(config, micro_batch_size=2) == 2 * ONCE
    assert _tokens(config, share_prefixes=False) == REPEATED


@pytest.mark.parametrize(
    "config",
    [
        {name: value for name, value in _config("Mistral").items() if name != "sliding_window"},
        _config("Gemma2", head_dim=16),
        _config("Phi3", resid_pdrop=0.1),
        _config("Llama", attention_dropout=0.1),
        _config("GPT2", n_embd=64, n_layer=2, n_head=4, **{**STILL, "embd_pdrop": 0.1}),
    ],
    ids=["default window", "windows", "residual dropout", "attention dropout", "embedding dropout"],
)
def test_a_model_that_cannot_share_them_takes_whole_packs(config: dict[str, Any]) -> None:
    assert _tokens(config) == REPEATED


def test_the_kernel_of_cuda_is_handed_every_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert _tokens(_config("Llama")) == REPEATED
