from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from finetune.errors import UserError
from finetune.merge.adapter import merge_adapter
from finetune.merge.extract import extract_adapter
from finetune.model.source import resolve_model


def edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def test_what_was_merged_is_extracted_again(
    tmp_path: Path, make_pair: Any, logits_of: Callable[..., torch.Tensor]
) -> None:
    pair = make_pair(target_modules="all-linear", tie=False)
    base = resolve_model(str(pair.base))
    merge_adapter(base, pair.adapter, tmp_path / "tuned", dtype="fp32")
    done = extract_adapter(base, resolve_model(str(tmp_path / "tuned")), tmp_path / "adapter", rank=4)
    assert done.error < 1e-3
    assert done.n_modules == 14
    assert done.not_carried == []
    assert done.error_by_rank[4] < 1e-3 < done.error_by_rank[2] < done.error_by_rank[1] < 1
    assert sum(done.spectrum) == pytest.approx(1, abs=1e-4)
    merge_adapter(base, tmp_path / "adapter", tmp_path / "again", dtype="fp32")
    assert (logits_of(tmp_path / "again") - logits_of(pair.model)).abs().max() < 1e-3


def test_changes_that_a_lora_cannot_hold_are_named(tmp_path: Path, make_pair: Any) -> None:
    pair = make_pair()
    base = resolve_model(str(pair.base))
    merge_adapter(base, pair.adapter, tmp_path / "tuned", dtype="fp32")
    edit(tmp_path / "tuned", lambda tensors: tensors["model.norm.weight"].add_(0.5))
    done = extract_adapter(base, resolve_model(str(tmp_path / "tuned")), tmp_path / "adapter", rank=4)
    assert done.not_carried == ["model.norm.weight"]
    assert 0 < done.not_carried_share < 1


def test_conv1d_differences_are_stored_upright(
    tmp_path: Path, make_pair: Any, logits_of: Callable[..., torch.Tensor]
) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=259, n_embd=64, n_layer=1, n_head=4, bos_token_id=1, eos_token_id=2)
    )
    pair = make_pair(model=model, fan_in_fan_out=True, target_modules=["c_attn"])
    base = resolve_model(str(pair.base))
    merge_adapter(base, pair.adapter, tmp_path / "tuned", dtype="fp32")
    extract_adapter(base, resolve_model(str(tmp_path / "tuned")), tmp_path / "adapter", rank=4)
    merge_adapter(base, tmp_path / "adapter", tmp_path / "again", dtype="fp32")
    assert (logits_of(tmp_path / "again") - logits_of(pair.model)).abs().max() < 1e-3


def test_a_rank_beyond_the_widest_layer_is_refused(tmp_path: Path, make_pair: Any) -> None:
    base = resolve_model(str(make_pair().base))
    with pytest.raises(UserError, match=r"a rank of 65 is more than any layer of .* has \(64\)"):
        extract_adapter(base, base, tmp_path / "out", rank=65)


def test_two_equal_models_differ_in_nothing(tmp_path: Path, make_pair: Any) -> None:
    source = resolve_model(str(make_pair().base))
    with pytest.raises(UserError, match="no linear layer of"):
        extract_adapter(source, source, tmp_path / "adapter", rank=4)
    assert not (tmp_path / "adapter").exists()


def test_two_architectures_are_told_apart(
    tmp_path: Path, make_pair: Any, make_tiny_model: Any, make_tiny_tokenizer: Any
) -> None:
    base = resolve_model(str(make_pair().base))
    make_tiny_model(layers=3, vocab_size=300).save_pretrained(tmp_path / "other")
    make_tiny_tokenizer().save_pretrained(tmp_path / "other")
    with pytest.raises(UserError, match="9 tensors are in one only, 1 have another shape"):
        extract_adapter(base, resolve_model(str(tmp_path / "other")), tmp_path / "adapter", rank=4)


def test_a_tied_head_that_one_model_wrote_out_is_no_other_architecture(
    tmp_path: Path, make_pair: Any
) -> None:
    pair = make_pair()
    base = resolve_model(str(pair.base))
    merge_adapter(base, pair.adapter, tmp_path / "tuned", dtype="fp32")
    edit(
        tmp_path / "tuned",
        lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}),
    )
    done = extract_adapter(base, resolve_model(str(tmp_path / "tuned")), tmp_path / "adapter", rank=4)
    assert done.n_modules == 4 and done.error < 1e-3 and done.not_carried == []
