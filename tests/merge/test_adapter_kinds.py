"""Kinds of adapters beyond LoRA: merged exactly where plain weights can hold them, refused by name where they cannot."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from finetune.errors import UserError
from finetune.merge.adapter import merge_adapter
from finetune.model.adapter_files import save_adapter
from finetune.model.adapters import attach_adapter, trainable_parameters
from finetune.model.load import load_model
from finetune.model.source import resolve_model
from finetune.recipe.adapter_section import AdapterInit, AdapterKind, AdapterSection
from finetune.recipe.schema import ModelSection

IDS = torch.arange(5, 29)[None]
MERGED: dict[str, dict[str, Any]] = {
    "rslora": {"rslora": True},
    "pissa": {"init": "pissa"},
    "pissa-dora": {"init": "pissa", "kind": "dora"},
    "olora-rslora": {"init": "olora", "rslora": True},
    "eva": {"init": "eva"},
    "orthogonal": {"init": "orthogonal"},
    "gaussian-dora": {"init": "gaussian", "kind": "dora"},
    "patterns": {"rank_pattern": {"down_proj": 8}, "alpha_pattern": {"q_proj": 2.0}},
    "layers": {"layers": [1]},
    "saved": {"modules_to_save": ["lm_head"]},
    "vera": {"kind": "vera", "rank": 16},
    "ia3": {"kind": "ia3", "target_modules": ["q_proj", "k_proj", "v_proj", "down_proj"]},
    "bitfit": {"kind": "bitfit"},
}


def test_every_kind_and_start_of_a_recipe_is_merged_here_or_refused() -> None:
    """Virtual tokens are refused below; whole models have nothing to merge; plain LoRA is that of test_merge_adapter."""
    kinds = {options.get("kind", "lora") for options in MERGED.values()} | {"prompt", "prefix", "none"}
    starts = {options.get("init", "default") for options in MERGED.values()} | {"loftq"}
    assert (kinds, starts) == (set(get_args(AdapterKind)), set(get_args(AdapterInit)))


@pytest.fixture(autouse=True)
def _private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def base(make_tiny_model: Any, make_tiny_tokenizer: Any, tmp_path: Path) -> Path:
    """An untied tiny model with biases in its attention."""
    model = make_tiny_model(tie=False)
    model.config.attention_bias = True
    torch.manual_seed(1)
    model = type(model)(model.config)
    for name, parameter in model.named_parameters():
        if name.endswith(".bias"):
            parameter.data.normal_(0.0, 0.1)
    model.save_pretrained(tmp_path / "base")
    make_tiny_tokenizer().save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def _disturbed(model: Any) -> Any:
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in trainable_parameters(model).values():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def _logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


@pytest.mark.parametrize("name", MERGED)
def test_the_merged_model_answers_as_base_and_adapter(base: Path, tmp_path: Path, name: str) -> None:
    from transformers import AutoModelForCausalLM

    source = resolve_model(str(base))
    section = AdapterSection(**({"rank": 4, "alpha": 8.0} | MERGED[name]))
    ids = torch.arange(3, 259).view(4, 64)  # what eva looks at
    batches = [{"input_ids": ids, "attention_mask": torch.ones_like(ids)}]
    fresh = attach_adapter(load_model(source, dtype="fp32"), section, seed=0, batches=batches)
    model = _disturbed(fresh)
    save_adapter(model, tmp_path / "adapter", source=source)
    merge_adapter(source, tmp_path / "adapter", tmp_path / "merged", dtype="fp32")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    assert torch.allclose(_logits(merged), _logits(model), atol=1e-4)
    assert (_logits(merged) - _logits(load_model(source, dtype="fp32"))).abs().max() > 1e-2


def test_ia3_and_vera_merge_into_transposed_weights(tmp_path: Path, make_tiny_tokenizer: Any) -> None:
    from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=259, n_positions=64, n_embd=64, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2
    )
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "base")
    make_tiny_tokenizer().save_pretrained(tmp_path / "base")
    source = resolve_model(str(tmp_path / "base"))
    for kind, targets in (("ia3", ["c_attn", "mlp.c_proj"]), ("vera", ["c_attn", "mlp.c_proj"])):
        section = AdapterSection(kind=kind, rank=8, target_modules=targets)
        model = _disturbed(attach_adapter(load_model(source, dtype="fp32"), section, seed=0))
        save_adapter(model, tmp_path / kind, source=source)
        merge_adapter(source, tmp_path / kind, tmp_path / f"{kind}-merged", dtype="fp32")
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / f"{kind}-merged", dtype=torch.float32)
        assert torch.allclose(_logits(merged), _logits(model), atol=1e-4), kind


@pytest.mark.parametrize("kind", ["prompt", "prefix"])
def test_virtual_tokens_cannot_be_merged_and_say_why(base: Path, tmp_path: Path, kind: str) -> None:
    source = resolve_model(str(base))
    section = AdapterSection(kind=kind, virtual_tokens=3)
    save_adapter(attach_adapter(load_model(source, dtype="fp32"), section, seed=0), tmp_path / "adapter")
    with pytest.raises(UserError, match="virtual tokens in front of every row"):
        merge_adapter(source, tmp_path / "adapter", tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize("name", ["vera", "ia3"])
def test_an_adapter_of_another_base_is_refused(
    base: Path, tmp_path: Path, name: str, tiny_model_folder: Path
) -> None:
    source = resolve_model(str(base))
    section = AdapterSection(**({"rank": 4, "alpha": 8.0} | MERGED[name]))
    model = _disturbed(attach_adapter(load_model(source, dtype="fp32"), section, seed=0))
    save_adapter(model, tmp_path / "adapter", source=source)
    with pytest.raises(UserError, match="was trained on"):
        merge_adapter(
            resolve_model(str(tiny_model_folder)), tmp_path / "adapter", tmp_path / "merged", dtype="fp32"
        )


def test_a_loftq_adapter_merges_onto_its_own_codes_only(base: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    source = resolve_model(str(base))
    section = AdapterSection(rank=8, alpha=8, init="loftq")
    quantized = load_model(source, dtype="fp32", quantize="nf4")
    model = _disturbed(attach_adapter(quantized, section, seed=0, source=source))
    save_adapter(model, tmp_path / "adapter", source=source)
    with pytest.raises(UserError, match="these are in full precision"):
        merge_adapter(source, tmp_path / "adapter", tmp_path / "plain", dtype="fp32")
    codes = ModelSection(id=str(base), dtype="fp32", quantize="nf4")
    proof = merge_adapter(source, tmp_path / "adapter", tmp_path / "merged", dtype="fp32", quantization=codes)
    assert set(proof.drift) == {"dequantised"}
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    assert torch.allclose(_logits(merged), _logits(model), atol=1e-4)
