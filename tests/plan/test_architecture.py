"""Shapes and parameter counts from config.json, against models that transformers really builds."""

from __future__ import annotations

from typing import Any

import pytest

from finetune.errors import UserError
from finetune.plan.architecture import NoMemoryModelError, adapted_linears, read_architecture

SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 101,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
CASES = [
    ("llama", {}),
    ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    ("mistral", {}),
    ("qwen2", {}),
    ("qwen3", {"head_dim": 32}),
    ("gemma", {"head_dim": 32}),
    ("gemma2", {"head_dim": 32}),
    ("gemma3_text", {"head_dim": 32}),
    ("phi3", {}),
    ("olmo2", {}),
    ("granite", {}),
    ("smollm3", {}),
]


@pytest.mark.parametrize(("model_type", "extra"), CASES)
def test_parameters_equal_those_of_the_built_model(model_type: str, extra: dict[str, Any]) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(model_type, **SMALL, **extra)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    architecture = read_architecture(config.to_dict())
    assert architecture.n_parameters == sum(p.numel() for p in model.parameters())
    built = {
        name.rsplit(".", 1)[-1]: tuple(module.weight.shape)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and "lm_head" not in name
    }
    assert {x.name: (x.n_out, x.n_in) for x in architecture.layer_linears} == built


def test_a_config_without_defaults_counts_the_same() -> None:
    """Configurations on the hub leave out what equals the family's default."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    for model_type in ("gemma", "qwen3", "llama"):
        config = AutoConfig.for_model(model_type, **SMALL)
        with torch.device("meta"):
            n_built = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
        assert read_architecture({**SMALL, "model_type": model_type}).n_parameters == n_built


def test_gpt2_parameters_equal_those_of_the_built_model() -> None:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_embd=64, n_head=4, n_layer=3, vocab_size=101, n_positions=128)
    with torch.device("meta"):
        model = GPT2LMHeadModel(config)
    architecture = read_architecture(config.to_dict())
    assert architecture.n_parameters == sum(p.numel() for p in model.parameters())


def test_a_multimodal_config_is_read_by_its_text_part() -> None:
    text = {**SMALL, "model_type": "llama"}
    assert read_architecture({"model_type": "wrapper", "text_config": text}) == read_architecture(text)


def test_known_large_models_count_their_published_parameters() -> None:
    llama = {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_hidden_layers": 32,
        "vocab_size": 128256,
    }
    assert read_architecture(llama).n_parameters == 8_030_261_248


@pytest.mark.parametrize(
    ("config", "part"),
    [
        ({"model_type": "lama"}, "granite, llama, mistral"),
        ({"model_type": "mixtral"}, "no memory model for model_type 'mixtral'"),
        ({"model_type": "llama", "hidden_size": 64}, "'intermediate_size' is missing"),
        ({**SMALL, "model_type": "llama", "vocab_size": "many"}, "'vocab_size' is 'many'"),
        ({**SMALL, "model_type": "llama", "num_key_value_heads": "two"}, "'num_key_value_heads' is 'two'"),
        ({**SMALL, "model_type": "llama", "head_dim": 0.5}, "'head_dim' is 0.5"),
        ([], "no keys with values"),
    ],
)
def test_what_cannot_be_read_is_refused(config: Any, part: str) -> None:
    with pytest.raises(NoMemoryModelError) as caught:
        read_architecture(config)
    assert part in str(caught.value)


@pytest.mark.parametrize(
    "model_type",
    ["mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "smollm3", "llama", "granite"],
)
def test_sizes_that_a_file_leaves_out_are_the_models_own_defaults(model_type: str) -> None:
    """Published files of Gemma 3 name neither heads nor vocabulary."""
    from transformers import AutoConfig

    given = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 2}
    if model_type != "gemma3_text":
        given |= {"num_attention_heads": 32, "vocab_size": 1000}
    given |= {"max_position_embeddings": 512}
    whole = AutoConfig.for_model(model_type, **given).to_dict()
    read = read_architecture({"model_type": model_type, **given})
    assert read == read_architecture({"model_type": model_type, **whole})
    by_hand = read_architecture(
        {"model_type": model_type, **given, "num_attention_heads": 32, "num_key_value_heads": None}
    )
    assert by_hand.n_kv_heads == 32


def test_target_modules_match_by_their_last_name_and_a_misspelt_one_is_refused() -> None:
    architecture = read_architecture({**SMALL, "model_type": "llama"})
    assert [x.name for x in adapted_linears(architecture, ["q_proj", "self_attn.v_proj"])] == [
        "q_proj",
        "v_proj",
    ]
    assert adapted_linears(architecture, "all-linear") == architecture.layer_linears
    with pytest.raises(UserError, match="did you mean 'q_proj'"):
        adapted_linears(architecture, ["q_prj", "v_proj"])
