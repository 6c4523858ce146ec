"""GGUF files: the same answers when read back, the same tokens, and nothing left of what cannot be written."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from finetune.errors import UserError
from finetune.merge.export.gguf_file import export_gguf
from finetune.merge.export.ollama import write_modelfile

Make = Callable[..., Path]


@pytest.fixture
def make(tmp_path: Path, make_tiny_tokenizer: Any) -> Make:
    """A model folder of a family, heads shared by two queries each."""

    def made(family: str = "llama", **changes: Any) -> Path:
        import transformers

        tokenizer = make_tiny_tokenizer()
        prefix = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}[family]
        sizes = {
            "vocab_size": len(tokenizer) + 5, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256,
            "tie_word_embeddings": False, "initializer_range": 0.2,
        } | changes  # fmt: skip
        torch.manual_seed(0)
        model = getattr(transformers, f"{prefix}ForCausalLM")(
            getattr(transformers, f"{prefix}Config")(**sizes)
        )
        folder = tmp_path / family
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return folder

    return made


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"num_key_value_heads": 4}),
        ("qwen2", {}),
        ("qwen3", {"head_dim": 128}),  # the one size that transformers reads back
    ],
)
def test_f16_answers_like_the_model(make: Make, tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    proof = export_gguf(make(family, **changes), tmp_path / "out" / "model.gguf")
    assert proof.mean_kl < 1e-4
    assert proof.greedy_tokens > 0 and proof.has_chat_template
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.gguf"]


def test_q8_0_is_half_the_size_and_near(make: Make, tmp_path: Path) -> None:
    folder = make()
    whole = export_gguf(folder, tmp_path / "f16.gguf")
    small = export_gguf(folder, tmp_path / "q8.gguf", type="q8_0")
    assert 0 < small.mean_kl < 1e-2
    assert small.n_bytes < 0.75 * whole.n_bytes
    kinds = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(tmp_path / "q8.gguf").tensors}
    assert kinds["blk.0.attn_q.weight"] == "Q8_0" and kinds["output_norm.weight"] == "F32"


def test_tokens_template_and_special_ids_are_carried(make: Make, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = make()
    export_gguf(folder, tmp_path / "model.gguf")
    held = {key: field.contents() for key, field in gguf.GGUFReader(tmp_path / "model.gguf").fields.items()}
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert held["tokenizer.chat_template"] == tokenizer.chat_template
    assert held["tokenizer.ggml.eos_token_id"] == tokenizer.eos_token_id
    assert held["tokenizer.ggml.tokens"][: len(tokenizer)] == tokenizer.convert_ids_to_tokens(
        range(len(tokenizer))
    )
    assert held["tokenizer.ggml.tokens"][len(tokenizer) :] == [f"[PAD{len(tokenizer) + n}]" for n in range(5)]
    assert held["tokenizer.ggml.token_type"][0] == 3 and held["tokenizer.ggml.token_type"][-1] == 5
    assert held["llama.attention.head_count_kv"] == 2 and held["llama.rope.freq_base"] == 10000.0


def test_what_was_broken_on_the_way_is_found_and_nothing_is_left(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from finetune.merge.export import gguf_file

    monkeypatch.setattr(gguf_file, "_interleaved", lambda values, target, config: values)
    with pytest.raises(UserError, match="does not answer like"):
        export_gguf(make(), tmp_path / "out" / "model.gguf")
    assert not list((tmp_path / "out").iterdir())


def test_a_weight_that_f16_cannot_hold_is_named(make: Make, tmp_path: Path) -> None:
    folder = make()
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][0, 0] = np.inf
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"blk\.1\.ffn_up\.weight holds inf"):
        export_gguf(folder, tmp_path / "model.gguf")
    assert not list(tmp_path.glob("*.gguf")) and not list(tmp_path.glob(".*"))


def test_nan_in_a_vector_and_names_without_a_prefix_are_told(make: Make, tmp_path: Path) -> None:
    folder = make()
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][0] = np.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"output_norm\.weight holds nan"):
        export_gguf(folder, tmp_path / "model.gguf")
    bare = {name.removeprefix("model."): values for name, values in weights.items()}
    save_file(bare, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"no tensor model\.embed_tokens\.weight"):
        export_gguf(folder, tmp_path / "model.gguf")
    assert not list(tmp_path.glob("*.gguf")) and not list(tmp_path.glob(".*"))


@pytest.mark.parametrize(
    ("file", "change", "told"),
    [
        ("config.json", {"model_type": "gpt_neox"}, "type 'gpt_neox'"),
        ("config.json", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "scales its rotary"),
        (
            "config.json",
            {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": None},
            "its rotary",
        ),
        ("config.json", {"model_type": "qwen3", "head_dim": 16}, "128 numbers a head only"),
        ("config.json", {"quantization_config": {"quant_method": "gptq"}}, "stored quantized"),
        ("tokenizer.json", {"pre_tokenizer": {"type": "Whitespace"}}, "Whitespace"),
        ("tokenizer.json", {"model": {"type": "Unigram", "vocab": []}}, "no byte-level BPE"),
    ],
)
def test_what_would_mean_something_else_is_refused(
    make: Make, tmp_path: Path, file: str, change: dict[str, Any], told: str
) -> None:
    folder = make()
    held = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps({**held, **change}))
    with pytest.raises(UserError, match=told):
        export_gguf(folder, tmp_path / "model.gguf")
    assert not list(tmp_path.glob("*.gguf"))


def test_a_file_that_is_there_and_a_folder_without_a_model_are_refused(make: Make, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_text("mine")
    with pytest.raises(UserError, match="is there already"):
        export_gguf(make(), tmp_path / "model.gguf")
    with pytest.raises(UserError, match="is no model folder"):
        export_gguf(tmp_path, tmp_path / "other.gguf")
    with pytest.raises(UserError, match=r"does not end in \.gguf"):
        export_gguf(tmp_path / "llama", tmp_path / "other")


def test_the_modelfile_writes_turns_as_the_template_does(tmp_path: Path, make_tiny_tokenizer: Any) -> None:
    tokenizer = make_tiny_tokenizer()
    assert write_modelfile(tmp_path / "Modelfile", Path("m.gguf"), tokenizer, context_tokens=256)
    text = (tmp_path / "Modelfile").read_text()
    assert text.startswith("FROM ./m.gguf\nPARAMETER num_ctx 256\n") and 'PARAMETER stop "<|im_end|>"' in text
    assert "<|im_start|>{{ .Role }}\n{{ .Content }}<|im_end|>\n" in text
    assert 'SYSTEM """You are tiny."""' in text  # what the template adds by itself


def test_turns_of_another_form_are_left_to_the_template(tmp_path: Path, make_tiny_tokenizer: Any) -> None:
    tokenizer = make_tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}[{{ m['content'] }}]{% endfor %}"
    assert not write_modelfile(tmp_path / "Modelfile", Path("m.gguf"), tokenizer, context_tokens=256)
    assert "TEMPLATE" not in (tmp_path / "Modelfile").read_text()


def test_the_remains_of_a_killed_export_are_cleared_away(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that was killed cannot tidy up: the next one to write the same file does."""
    folder, out = make(), tmp_path / "out" / "model.gguf"
    killed, working = (
        out.parent / ".model.gguf.merging-4194304-a",
        out.parent / f".model.gguf.merging-{os.getpid()}-b",
    )
    for left in (killed, working):
        left.mkdir(parents=True)
        (left / "model.gguf").write_bytes(b"half")
    monkeypatch.setattr("finetune.merge.export.gguf_file._prove", lambda *_: None)
    export_gguf(folder, out)
    assert not killed.exists()
    assert working.exists()  # that of a process that lives is its own
    assert out.stat().st_size > 1000
    assert sorted(path.name for path in out.parent.iterdir()) == [working.name, out.name]
