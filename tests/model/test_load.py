"""Loading: what the tokenizer, the weights and the configuration must agree on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from finetune.errors import UserError
from finetune.model.load import (
    check_attention,
    check_context,
    embedding_rows,
    load_model,
    load_tokenizer,
    model_skeleton,
)
from finetune.model.source import read_config, resolve_model


@pytest.fixture(autouse=True)
def _private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))


def _edit_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


@pytest.mark.parametrize(("dtype", "expected"), [("bf16", torch.bfloat16), ("fp32", torch.float32)])
def test_weights_have_the_asked_dtype_and_are_in_eval_mode(
    tiny_model_folder: Path, dtype: str, expected: torch.dtype
) -> None:
    model = load_model(resolve_model(str(tiny_model_folder)), dtype=dtype)
    assert {parameter.dtype for parameter in model.parameters()} == {expected}
    assert not model.training


@pytest.mark.parametrize(
    ("attention", "expected"),
    [("document", "document"), ("auto", "document"), ("sdpa", "sdpa"), ("eager", "eager")],
)
def test_attention_is_the_asked_one(tiny_model_folder: Path, attention: str, expected: str) -> None:
    model = load_model(resolve_model(str(tiny_model_folder)), attention=attention)
    assert model.config._attn_implementation == expected


def test_a_model_with_an_attention_of_its_own_is_computed_by_it_whatever_is_asked(
    tiny_tokenizer: Any, tmp_path: Path
) -> None:
    """Gemma 2 caps the scores before the softmax, which torch's fused kernels leave out."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    config = Gemma2Config(
        vocab_size=259, num_attention_heads=4, num_key_value_heads=2, attn_logit_softcapping=0.5, **sizes
    )
    torch.manual_seed(0)
    model = Gemma2ForCausalLM(config).eval()
    model.set_attn_implementation("eager")
    model.save_pretrained(tmp_path / "gemma")
    tiny_tokenizer.save_pretrained(tmp_path / "gemma")
    source, ids = resolve_model(str(tmp_path / "gemma")), torch.arange(3, 30)[None]
    for attention in ("auto", "document", "sdpa", "eager"):
        loaded = load_model(source, dtype="fp32", attention=attention)
        assert torch.equal(loaded(input_ids=ids).logits, model(input_ids=ids).logits)
    for attention in ("document", "sdpa"):
        with pytest.raises(UserError, match="cannot be computed with") as caught:
            check_attention(source, attention)
        assert "model.attention: auto" in caught.value.faults[0].fix
    check_attention(source, "auto")
    check_attention(source, "eager")


def test_loaded_weights_are_the_saved_ones(tiny_model: Any, tiny_model_folder: Path) -> None:
    ids = torch.arange(10)[None]
    model = load_model(resolve_model(str(tiny_model_folder)), dtype="fp32")
    assert torch.equal(model(ids).logits, tiny_model(ids).logits)


def test_vocabulary_larger_than_the_embedding(tiny_tokenizer: Any, tiny_model_folder: Path) -> None:
    tiny_tokenizer.add_tokens(["<new>", "<newer>"])
    tiny_tokenizer.save_pretrained(tiny_model_folder)
    with pytest.raises(UserError, match=r"2 tokens from id 259 \('<new>'\)") as error:
        load_tokenizer(resolve_model(str(tiny_model_folder)))
    assert "resize_token_embeddings(261)" in str(error.value)


def test_tokenizer_without_end_token(tiny_tokenizer: Any, tiny_model_folder: Path) -> None:
    tiny_tokenizer.eos_token = None
    tiny_tokenizer.save_pretrained(tiny_model_folder)
    with pytest.raises(UserError, match="no end-of-sequence token"):
        load_tokenizer(resolve_model(str(tiny_model_folder)))


def test_a_broken_tokenizer_file(tiny_model_folder: Path) -> None:
    (tiny_model_folder / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match="cannot be loaded"):
        load_tokenizer(resolve_model(str(tiny_model_folder)))


def test_context_longer_than_the_models(tiny_model_folder: Path) -> None:
    source = resolve_model(str(tiny_model_folder))
    check_context(source, 512)
    with pytest.raises(UserError, match=r"513 tokens do not fit the model's context of 512"):
        check_context(source, 513)


def test_weights_that_do_not_fit_the_configuration(tiny_model_folder: Path) -> None:
    _edit_config(tiny_model_folder, num_hidden_layers=3)
    with pytest.raises(UserError, match=r"9 tensors missing"):
        load_model(resolve_model(str(tiny_model_folder)))


def test_not_a_causal_language_model(tiny_model_folder: Path) -> None:
    _edit_config(tiny_model_folder, model_type="vit")
    with pytest.raises(UserError, match="not a causal language model"):
        load_model(resolve_model(str(tiny_model_folder)))


def test_own_code_is_refused_unless_pinned(tiny_model_folder: Path) -> None:
    _edit_config(tiny_model_folder, model_type="homemade", auto_map={"AutoModelForCausalLM": "m.M"})
    source = resolve_model(str(tiny_model_folder))
    with pytest.raises(UserError, match="remote code is off"):
        load_model(source)
    with pytest.raises(UserError, match="'main' is not a commit"):
        load_tokenizer(source, trust_remote_code="main")


def test_quantized_already(tiny_model_folder: Path) -> None:
    _edit_config(tiny_model_folder, quantization_config={"quant_method": "gptq"})
    with pytest.raises(UserError, match=r"quantized already \(gptq\)"):
        load_model(resolve_model(str(tiny_model_folder)), quantize="nf4")


def test_the_skeleton_has_shapes_and_no_storage(tiny_model_folder: Path) -> None:
    skeleton = model_skeleton(resolve_model(str(tiny_model_folder)))
    assert {parameter.device.type for parameter in skeleton.parameters()} == {"meta"}
    assert dict(skeleton.named_modules())["model.layers.1.mlp.down_proj"].in_features == 128


def test_embedding_rows_of_a_nested_configuration() -> None:
    assert embedding_rows({"text_config": {"vocab_size": 7}}) == 7
    with pytest.raises(UserError, match="no vocab_size"):
        embedding_rows({})


@pytest.mark.embedded
def test_the_embedded_model_loads_and_keeps_its_template(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FINETUNE_CACHE")  # a conversion of the real model is shared between runs
    source = resolve_model("builtin:smollm2-135m-instruct")
    config = read_config(source)
    assert "quantization_config" not in config
    assert source.n_parameters == 134_515_008
    tokenizer = load_tokenizer(source)
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 2
    text = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert text.startswith("<|im_start|>system\n")
    assert text.endswith("<|im_start|>user\nhi<|im_end|>\n")
    prompt = tokenizer("The capital of France is", return_tensors="pt", add_special_tokens=False)
    model = load_model(source)
    answer = model.generate(**prompt, max_new_tokens=1, do_sample=False)
    assert tokenizer.decode(answer[0, -1]).strip() == "Paris"
