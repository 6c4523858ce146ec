"""The forecast of answering: by hand for SmolLM2-135M, and the moment that is the worst."""

from __future__ import annotations

from typing import Any

import pytest

from finetune.plan.kernel_cache import kernel_cache_bytes
from finetune.plan.memory import forecast_generation

PARAMETERS = 134_515_008
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}


def test_weights_and_cache_by_hand() -> None:
    found = forecast_generation(CONFIG, 32, 76, 64, "fp32")
    assert found.n_parameters == PARAMETERS
    assert found.terms_bytes["weights"] == 4 * PARAMETERS
    # keys and values of 3 heads of 64, 30 layers, 32 answers of 140 tokens
    assert found.terms_bytes["kv_cache"] == 2 * 30 * 192 * 4 * 32 * 140
    assert found.moment == "prefill"


def test_loading_in_another_type_is_the_worst_moment_of_few_answers() -> None:
    found = forecast_generation(CONFIG, 1, 76, 16, "fp32")
    assert found.moment == "loading"
    assert found.terms_bytes["buffers"] == 2 * PARAMETERS  # the mapped bf16 file
    assert found.terms_bytes["kv_cache"] == found.terms_bytes["activations"] == 0


@pytest.mark.parametrize(
    ("config", "options"),
    [
        (CONFIG | {"dtype": "float32"}, {}),
        (CONFIG | {"dtype": None}, {}),  # not said: nothing is made up
        (CONFIG, {"device": "cuda"}),
        (CONFIG, {"quantize": "nf4"}),
    ],
)
def test_elsewhere_loading_takes_no_more_than_the_weights(
    config: dict[str, Any], options: dict[str, Any]
) -> None:
    assert forecast_generation(config, 1, 76, 16, "fp32", **options).moment == "prefill"


def test_older_configurations_name_the_type_otherwise() -> None:
    older = {name: value for name, value in CONFIG.items() if name != "dtype"} | {"torch_dtype": "bfloat16"}
    assert forecast_generation(older, 1, 76, 16, "fp32").moment == "loading"


def test_a_training_before_it_leaves_its_kernels() -> None:
    alone = forecast_generation(CONFIG, 32, 76, 64, "fp32")
    behind = forecast_generation(CONFIG, 32, 76, 64, "fp32", behind_training=True)
    assert behind.total_bytes - alone.total_bytes == kernel_cache_bytes()
    assert forecast_generation(CONFIG, 32, 76, 64, "bf16", behind_training=True) == forecast_generation(
        CONFIG, 32, 76, 64, "bf16"
    )
