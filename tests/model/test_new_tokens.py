"""New tokens: their rows start sensibly, train alone, travel with the adapter, and survive a merge."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from finetune.errors import UserError
from finetune.merge.adapter import merge_adapter
from finetune.model.adapter_files import load_adapter, save_adapter
from finetune.model.adapters import attach_adapter, trainable_parameters
from finetune.model.load import load_model, load_tokenizer
from finetune.model.new_tokens import add_new_tokens, make_room
from finetune.model.source import resolve_model
from finetune.recipe.adapter_section import AdapterSection

TOKENS = ["<tool>", "</tool>"]


@pytest.fixture(autouse=True)
def _private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def folder(request: Any, make_tiny_model: Any, make_tiny_tokenizer: Any, tmp_path: Path) -> Path:
    make_tiny_model(tie=request.param).save_pretrained(tmp_path / "base")
    make_tiny_tokenizer().save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def _trained(folder: Path, dtype: str = "fp32") -> tuple[Any, Any, torch.Tensor]:
    source = resolve_model(str(folder))
    tokenizer, model = load_tokenizer(source), load_model(source, dtype=dtype)
    new = add_new_tokens(tokenizer, TOKENS)
    assert make_room(model, new) == 2
    model = attach_adapter(model, AdapterSection(rank=4, alpha=8), seed=0, token_rows=new.ids)
    ids = torch.tensor([[5, new.ids[0], 9, new.ids[1], 7]])
    optimizer = torch.optim.SGD(trainable_parameters(model).values(), lr=0.5)
    for _ in range(3):
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    return model.eval(), tokenizer, ids


def test_rows_start_as_the_mean_of_the_former_tokens(folder: Path) -> None:
    source = resolve_model(str(folder))
    tokenizer, model = load_tokenizer(source), load_model(source, dtype="fp32")
    former = tokenizer("<tool>", add_special_tokens=False)["input_ids"]
    assert len(former) > 1
    new = add_new_tokens(tokenizer, TOKENS)
    make_room(model, new)
    assert tokenizer("a<tool>b", add_special_tokens=False)["input_ids"][1] == new.ids[0]
    for table in (model.get_input_embeddings().weight, model.get_output_embeddings().weight):
        assert torch.allclose(table[new.ids[0]], table[former].mean(dim=0), atol=1e-6)
    assert model.config.vocab_size == 261


def test_only_the_new_rows_of_the_embedding_train(folder: Path) -> None:
    source = resolve_model(str(folder))
    before = load_model(source, dtype="fp32").get_input_embeddings().weight
    model, _, _ = _trained(folder)
    embedding = model.get_input_embeddings()
    merged = embedding.weight
    assert torch.equal(merged[:259], before)
    rows = [name for name in trainable_parameters(model) if "trainable_tokens" in name]
    assert len(rows) == (1 if model.config.tie_word_embeddings else 2)


def test_a_padded_vocabulary_keeps_its_size(make_tiny_model: Any, tiny_tokenizer: Any) -> None:
    model = make_tiny_model(vocab_size=320)
    new = add_new_tokens(tiny_tokenizer, TOKENS)
    assert make_room(model, new) == 0
    assert model.get_input_embeddings().weight.shape[0] == 320


def test_adapter_tokenizer_and_rows_travel_together(folder: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    model, tokenizer, ids = _trained(folder)
    expected = model(input_ids=ids).logits
    source = resolve_model(str(folder))
    save_adapter(model, tmp_path / "adapter", tokenizer=tokenizer, source=source)
    loaded = load_adapter(load_model(source, dtype="fp32"), tmp_path / "adapter", source=source)
    assert torch.equal(loaded(input_ids=ids).logits, expected)
    saved = AutoTokenizer.from_pretrained(tmp_path / "adapter")
    assert saved.convert_tokens_to_ids(TOKENS) == tokenizer.convert_tokens_to_ids(TOKENS)


def test_the_merged_model_loads_in_plain_transformers_with_the_new_rows(folder: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer, ids = _trained(folder)
    source = resolve_model(str(folder))
    save_adapter(model, tmp_path / "adapter", tokenizer=tokenizer, source=source)
    merge_adapter(source, tmp_path / "adapter", tmp_path / "merged", dtype="fp32")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    assert len(AutoTokenizer.from_pretrained(tmp_path / "merged")) == 261
    with torch.no_grad():
        assert torch.allclose(merged(input_ids=ids).logits, model(input_ids=ids).logits, atol=1e-4)


def test_tokens_that_cannot_be_added_are_all_told(tiny_tokenizer: Any) -> None:
    with pytest.raises(UserError) as caught:
        add_new_tokens(tiny_tokenizer, ["<|im_end|>", " ", "<a>", "<a>"])
    assert [fault.what.split()[-1] for fault in caught.value.faults] == ["2)", "blank", "twice"]
