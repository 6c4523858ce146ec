"""Bases and adapters of every kind, tiny, saved to disk the way a user has them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

ATTENTION = ["q_proj", "v_proj"]


@dataclass(frozen=True)
class Pair:
    """A base folder, an adapter folder, and the PeftModel (fp32, eval) that was saved into the latter."""

    base: Path
    adapter: Path
    model: Any


def shake(model: Any, std: float = 0.05, seed: int = 1) -> None:
    """Make every trainable tensor differ from its initial value, as training would."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            noise = torch.randn(parameter.shape, generator=generator) * std
            parameter.data += noise.to(parameter.dtype)


@pytest.fixture
def shake_adapter() -> Callable[..., None]:
    return shake


@pytest.fixture
def make_pair(
    tmp_path: Path, make_tiny_model: Callable[..., Any], make_tiny_tokenizer: Callable[..., Any]
) -> Callable[..., Pair]:
    """Build a base and an adapter. `resize` enlarges the vocabulary first; other options are LoraConfig's."""

    def build(
        name: str = "pair",
        *,
        tie: bool = True,
        model: Any = None,
        resize: int | None = None,
        max_shard_size: str = "5GB",
        seed: int = 1,
        **options: Any,
    ) -> Pair:
        from peft import LoraConfig, get_peft_model
        from transformers import AutoModelForCausalLM

        base, adapter = tmp_path / name / "base", tmp_path / name / "run7"
        (make_tiny_model(tie=tie) if model is None else model).save_pretrained(
            base, max_shard_size=max_shard_size
        )
        make_tiny_tokenizer().save_pretrained(base)
        loaded = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        if resize:
            loaded.resize_token_embeddings(resize, mean_resizing=False)
        given: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": ATTENTION, **options}
        tuned = get_peft_model(loaded, LoraConfig(task_type="CAUSAL_LM", **given))
        shake(tuned, seed=seed)
        tuned.eval().save_pretrained(adapter)
        return Pair(base, adapter, tuned)

    return build


@pytest.fixture
def logits_of() -> Callable[..., torch.Tensor]:
    """fp32 logits of a model, or of the model that plain transformers loads from a folder, on fixed token ids."""

    def logits(model: Any, n_vocabulary: int = 250) -> torch.Tensor:
        from transformers import AutoModelForCausalLM

        if isinstance(model, Path):
            model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        ids = torch.randint(0, n_vocabulary, (2, 20), generator=torch.Generator().manual_seed(3))
        with torch.no_grad():
            result: torch.Tensor = model(input_ids=ids).logits.float()
        return result

    return logits
