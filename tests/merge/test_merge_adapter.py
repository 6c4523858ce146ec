"""One merge for each kind of adapter, compared with PEFT and loaded by plain transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from finetune.errors import UserError
from finetune.merge.adapter import PROOF_FILE, merge_adapter
from finetune.model.source import resolve_model

KINDS: dict[str, dict[str, Any]] = {
    "lora": {},
    "all linear layers, untied": {"tie": False, "target_modules": "all-linear"},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True, "target_modules": "all-linear"},
    "rank and alpha by pattern": {
        "rank_pattern": {"q_proj": 2},
        "alpha_pattern": {"layers.1.self_attn.v_proj": 3},
        "use_rslora": True,
    },
    "head trained whole, tied": {"modules_to_save": ["lm_head"]},
    "embedding trained whole, tied": {"modules_to_save": ["embed_tokens"]},
    "embedding trained whole, kept tied": {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    "both ends trained whole, untied": {"tie": False, "modules_to_save": ["embed_tokens", "lm_head"]},
    "norms trained whole": {"modules_to_save": ["norm"]},
    "trained tokens, tied": {"trainable_token_indices": [1, 2]},
    "trained tokens, untied": {
        "tie": False,
        "trainable_token_indices": {"embed_tokens": [1, 2], "lm_head": [1]},
    },
    "trained tokens of one end, tied": {"trainable_token_indices": {"lm_head": [7]}},
    "lora on the embedding, tied": {"target_modules": ["q_proj", "embed_tokens"]},
    "dora on the embedding": {"tie": False, "target_modules": ["embed_tokens"], "use_dora": True},
    "lora on the head, tied": {"target_modules": ["q_proj", "lm_head"]},
    "lora on both ends, kept tied": {"target_modules": ["embed_tokens"], "ensure_weight_tying": True},
    "resized, tied": {"resize": 263},
    "resized, untied": {"tie": False, "resize": 263},
    "resized with trained tokens": {"resize": 263, "trainable_token_indices": [1, 260]},
    "resized with the embedding trained whole": {"resize": 263, "modules_to_save": ["embed_tokens"]},
    "base in several shards": {"max_shard_size": "60KB"},
}
UNTIES = {
    "head trained whole, tied",
    "embedding trained whole, tied",
    "trained tokens of one end, tied",
    "lora on the embedding, tied",
    "lora on the head, tied",
    "resized with the embedding trained whole",
}


def merge(pair: Any, out: Path, **options: Any) -> Any:
    return merge_adapter(resolve_model(str(pair.base)), pair.adapter, out, **options)


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: value for file in folder.glob("model*.safetensors") for name, value in load_file(file).items()
    }


def gpt2() -> Any:
    """A Conv1D model: weights lie transposed, and every layer has a bias."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=259, n_embd=64, n_layer=2, n_head=4, n_positions=128, bos_token_id=1, eos_token_id=2
        )
    )


CONV1D_KINDS: dict[str, dict[str, Any]] = {
    "lora": {"target_modules": ["c_attn", "c_proj"]},
    "dora": {"target_modules": ["c_attn", "c_fc"], "use_dora": True},
    "lora with a bias of its own": {"target_modules": ["c_attn"], "lora_bias": True},
    "lora and the biases of its layers": {
        "target_modules": ["c_attn"],
        "lora_bias": True,
        "bias": "lora_only",
    },
    "lora and all biases": {"target_modules": ["c_attn"], "bias": "all"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_an_fp32_merge_answers_like_the_adapter(
    kind: str, tmp_path: Path, make_pair: Callable[..., Any], logits_of: Callable[..., torch.Tensor]
) -> None:
    pair = make_pair(**KINDS[kind])
    proof = merge(pair, tmp_path / "out", dtype="fp32")
    assert (logits_of(tmp_path / "out") - logits_of(pair.model)).abs().max() < 1e-5
    assert proof.max_logit_difference < 1e-5
    assert proof.greedy_identical == proof.greedy_tokens == 48
    assert proof.effect_kl > 1e-4
    assert proof.untied == (kind in UNTIES)


@pytest.mark.parametrize("kind", KINDS)
def test_a_bf16_merge_stays_within_the_noise_of_bf16(
    kind: str, tmp_path: Path, make_pair: Callable[..., Any], logits_of: Callable[..., torch.Tensor]
) -> None:
    pair = make_pair(**KINDS[kind])
    proof = merge(pair, tmp_path / "out")
    assert all(value.dtype == torch.bfloat16 for value in tensors_of(tmp_path / "out").values())
    assert proof.noise_floor_kl > 0
    assert proof.mean_kl <= 3 * proof.noise_floor_kl
    assert proof.weights_kl < proof.effect_kl / 100
    assert (logits_of(tmp_path / "out") - logits_of(pair.model)).abs().max() < 0.05


@pytest.mark.parametrize("kind", CONV1D_KINDS)
def test_conv1d_layers_and_biases(
    kind: str, tmp_path: Path, make_pair: Callable[..., Any], logits_of: Callable[..., torch.Tensor]
) -> None:
    pair = make_pair(model=gpt2(), fan_in_fan_out=True, **CONV1D_KINDS[kind])
    merge(pair, tmp_path / "out", dtype="fp32")
    assert (logits_of(tmp_path / "out") - logits_of(pair.model)).abs().max() < 1e-5


def test_a_base_whose_files_name_tensors_without_the_prefix(
    tmp_path: Path, make_pair: Callable[..., Any], logits_of: Callable[..., torch.Tensor]
) -> None:
    from safetensors.torch import save_file

    pair = make_pair(model=gpt2(), fan_in_fan_out=True, target_modules=["c_attn"])
    tensors = {name.removeprefix("transformer."): value for name, value in tensors_of(pair.base).items()}
    save_file(tensors, pair.base / "model.safetensors", {"format": "pt"})
    merge(pair, tmp_path / "out", dtype="fp32")
    assert tensors_of(tmp_path / "out").keys() == tensors.keys()
    assert (logits_of(tmp_path / "out") - logits_of(pair.model)).abs().max() < 1e-5


def test_only_the_targets_change_and_all_of_them_do(tmp_path: Path, make_pair: Callable[..., Any]) -> None:
    """The adapter's folder is called run7: it is recognised by what it holds."""
    pair = make_pair()
    proof = merge(pair, tmp_path / "out", dtype="fp32")
    base, merged = tensors_of(pair.base), tensors_of(tmp_path / "out")
    changed = {name for name, value in merged.items() if not torch.equal(value, base[name])}
    assert changed == {
        f"model.layers.{layer}.self_attn.{name}.weight" for layer in (0, 1) for name in ("q_proj", "v_proj")
    }
    assert (proof.n_targets, proof.n_targets_changed, proof.n_tensors) == (4, 4, len(base))


def test_a_tied_head_is_not_written(tmp_path: Path, make_pair: Callable[..., Any]) -> None:
    """The published count: 32,032 parameters, 45,472 when the head is written out."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=420,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )
    pair = make_pair(model=LlamaForCausalLM(config))
    merge(pair, tmp_path / "out")
    merged = tensors_of(tmp_path / "out")
    assert sum(value.numel() for value in merged.values()) == 32_032
    assert "lm_head.weight" not in merged


def test_a_tied_head_that_the_base_wrote_out_is_left_out(
    tmp_path: Path, make_pair: Callable[..., Any], logits_of: Callable[..., torch.Tensor]
) -> None:
    from safetensors.torch import save_file

    pair = make_pair()
    tensors = tensors_of(pair.base)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, pair.base / "model.safetensors", {"format": "pt"})
    merge(pair, tmp_path / "out", dtype="fp32")
    assert "lm_head.weight" not in tensors_of(tmp_path / "out")
    assert (logits_of(tmp_path / "out") - logits_of(pair.model)).abs().max() < 1e-5


def test_a_head_that_only_the_adapter_unties_is_written_and_named_untied(
    tmp_path: Path, make_pair: Callable[..., Any]
) -> None:
    pair = make_pair(modules_to_save=["lm_head"])
    merge(pair, tmp_path / "out", dtype="fp32")
    merged, base = tensors_of(tmp_path / "out"), tensors_of(pair.base)
    assert torch.equal(merged["model.embed_tokens.weight"], base["model.embed_tokens.weight"])
    assert not torch.equal(merged["lm_head.weight"], merged["model.embed_tokens.weight"])
    assert json.loads((tmp_path / "out" / "config.json").read_bytes())["tie_word_embeddings"] is False


def test_a_base_whose_files_hold_apart_what_its_configuration_ties(
    tmp_path: Path, make_pair: Callable[..., Any], logits_of: Callable[..., torch.Tensor]
) -> None:
    from safetensors.torch import save_file

    pair = make_pair()
    tensors = tensors_of(pair.base)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] * 2
    save_file(tensors, pair.base / "model.safetensors", {"format": "pt"})
    merge(pair, tmp_path / "out", dtype="fp32")
    assert torch.equal(tensors_of(tmp_path / "out")["lm_head.weight"], tensors["lm_head.weight"])
    assert json.loads((tmp_path / "out" / "config.json").read_bytes())["tie_word_embeddings"] is False
    assert (logits_of(tmp_path / "out") - 2 * logits_of(pair.model)).abs().max() < 1e-5


def test_several_shards_are_written_and_loaded(
    tmp_path: Path, make_pair: Callable[..., Any], logits_of: Callable[..., torch.Tensor]
) -> None:
    pair = make_pair()
    merge(pair, tmp_path / "out", dtype="fp32", max_shard_bytes=60_000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_bytes())
    assert len(set(index["weight_map"].values())) > 2
    assert index["metadata"]["total_size"] == sum(v.nbytes for v in tensors_of(tmp_path / "out").values())
    assert (logits_of(tmp_path / "out") - logits_of(pair.model)).abs().max() < 1e-5


def test_the_same_merge_gives_the_same_bytes_however_it_is_sharded(
    tmp_path: Path, make_pair: Callable[..., Any]
) -> None:
    pair = make_pair(use_dora=True)
    for name, size in (("one", 10**9), ("two", 10**9), ("three", 50_000)):
        merge(pair, tmp_path / name, max_shard_bytes=size)
    one, two = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "two"))
    assert one == two
    three = tensors_of(tmp_path / "three")
    assert all(torch.equal(three[name], value) for name, value in tensors_of(tmp_path / "one").items())


def test_resized_rows_arrive_and_the_vocabulary_is_told(
    tmp_path: Path, make_pair: Callable[..., Any], logits_of: Callable[..., torch.Tensor]
) -> None:
    """The base on disk has 259 rows, the adapter was trained on 263: the merge resizes by itself."""
    pair = make_pair(resize=263)
    merge(pair, tmp_path / "out", dtype="fp32")
    assert json.loads((tmp_path / "out" / "config.json").read_bytes())["vocab_size"] == 263
    ours, theirs = logits_of(tmp_path / "out", 263), logits_of(pair.model, 263)
    assert ours.shape[-1] == 263
    assert (ours[..., 259:] - theirs[..., 259:]).abs().max() < 1e-5


def test_the_proof_is_kept_beside_the_weights_and_the_card_tells_it(
    tmp_path: Path, make_pair: Callable[..., Any]
) -> None:
    pair = make_pair()
    proof = merge(pair, tmp_path / "out")
    assert json.loads((tmp_path / "out" / PROOF_FILE).read_bytes()) == proof.to_dict()
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"{proof.mean_kl:.2e}" in card
    assert proof.adapter_sha256[:12] in card
    with safe_open(tmp_path / "out" / "model.safetensors", framework="pt") as tensors:
        assert tensors.metadata() == {"format": "pt"}


def test_small_changes_that_bf16_rounds_away_are_counted_and_fp32_is_advised(
    tmp_path: Path, make_pair: Callable[..., Any]
) -> None:
    pair = make_pair(lora_alpha=0.05)
    bf16, fp32 = (merge(pair, tmp_path / dtype, dtype=dtype) for dtype in ("bf16", "fp32"))
    assert bf16.delta_lost > 0.1
    assert bf16.unmoved_share > 0.05
    assert any("--dtype fp32" in hint for hint in bf16.hints)
    assert fp32.delta_lost < 1e-3
    assert fp32.hints == []


def test_an_untrained_adapter_is_refused(tmp_path: Path, make_tiny_model: Any, make_pair: Any) -> None:
    from peft import LoraConfig, get_peft_model

    pair = make_pair()
    get_peft_model(make_tiny_model(), LoraConfig(target_modules=["q_proj"])).save_pretrained(pair.adapter)
    with pytest.raises(UserError, match="was never trained: the matrices B of all 2 layers are zero"):
        merge(pair, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_changes_that_vanish_altogether_in_bf16_are_refused(
    tmp_path: Path, make_pair: Any, make_tiny_model: Any
) -> None:
    pair = make_pair(model=make_tiny_model().bfloat16(), lora_alpha=1e-7)
    with pytest.raises(UserError, match="bf16 rounds every change away"):
        merge(pair, tmp_path / "out")


def test_a_mixture_of_experts_is_merged_where_its_tensors_are_stored_one_to_one(
    tmp_path: Path, make_pair: Any, logits_of: Callable[..., torch.Tensor]
) -> None:
    """transformers fuses the experts while loading, so this model cannot be streamed; its attention can be merged."""
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=259,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        max_position_embeddings=512,
        bos_token_id=1,
        eos_token_id=2,
    )
    pair = make_pair(model=MixtralForCausalLM(config))
    merge(pair, tmp_path / "out", dtype="fp32")
    assert (logits_of(tmp_path / "out") - logits_of(pair.model)).abs().max() < 1e-5


def test_a_head_that_transformers_renames_while_loading_is_kept(
    tmp_path: Path, make_pair: Callable[..., Any], logits_of: Callable[..., torch.Tensor]
) -> None:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = GPTNeoXForCausalLM(GPTNeoXConfig(vocab_size=259, max_position_embeddings=256, **sizes))
    pair = make_pair(model=model, target_modules=["query_key_value"])
    merge_adapter(resolve_model(str(pair.base)), pair.adapter, tmp_path / "out", dtype="fp32")
    assert (logits_of(tmp_path / "out") - logits_of(pair.model)).abs().max() < 1e-5
