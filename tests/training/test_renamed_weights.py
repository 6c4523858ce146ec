"""Whole models whose files name weights otherwise than the model does: a resumed run continues every one of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import (
    AutoModelForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

from finetune.digest import digest_folder
from finetune.model.attention import register_document_attention
from finetune.telemetry.events import read_events
from finetune.training.exact_trainer import StopWhenAsked
from finetune.training.trained_part import add_trained_part

SIZES: dict[str, Any] = {
    "vocab_size": 259,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}


def neox() -> Any:
    """Its head is `embed_out` in files and `lm_head` here."""
    return GPTNeoXForCausalLM(GPTNeoXConfig(**SIZES))


def mixtral() -> Any:
    """Its experts are single matrices in files and one tensor a layer here."""
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1, "num_key_value_heads": 2}
    return MixtralForCausalLM(MixtralConfig(**SIZES, **experts))


def names_in(folder: Path) -> set[str]:
    with safe_open(str(folder / "model.safetensors"), framework="pt") as file:
        return set(file.keys())


@pytest.mark.parametrize(
    ("build", "stored"),
    [(neox, "embed_out.weight"), (mixtral, "model.layers.0.block_sparse_moe.experts.0.w1.weight")],
    ids=["GPT-NeoX", "Mixtral"],
)
def test_a_killed_full_tuning_ends_in_the_same_bytes_under_the_names_that_others_read(
    build: Callable[[], Any], stored: str, make_recipe: Any, train: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = make_recipe(adapter__kind="none", train__learning_rate=2e-3, train__max_steps=5)

    def model(recipe: Any) -> Any:
        register_document_attention()
        torch.manual_seed(0)
        made = build()
        made.set_attn_implementation("document")
        return add_trained_part(made, recipe)

    def kill(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 3:
            raise SystemExit

    _, whole, trained = train(recipe, name="whole", model=model)
    with monkeypatch.context() as patch:
        patch.setattr(StopWhenAsked, "on_step_end", kill)
        with pytest.raises(SystemExit):
            train(recipe, name="killed", model=model)
    said: list[str] = []
    _, killed, _ = train(recipe, name="killed", model=model, said=said)
    assert any("continuing from checkpoint step-2" in line for line in said), said
    losses = [
        [event["loss"] for event in read_events(folder / "events.jsonl") if event["event"] == "step"]
        for folder in (whole, killed)
    ]
    assert losses[0] == losses[1]
    assert digest_folder(killed / "model") == digest_folder(whole / "model")
    assert stored in names_in(whole / "model")
    again = AutoModelForCausalLM.from_pretrained(whole / "model")
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in trained.state_dict().items())
