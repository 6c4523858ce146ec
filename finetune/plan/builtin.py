"""config.json of the embedded models, so that a plan needs neither the converted folder nor torch.

Compared with the converted model's own file in tests/plan/test_builtin.py.
"""

from __future__ import annotations

from typing import Any

BUILTIN_CONFIGS: dict[str, dict[str, Any]] = {
    "smollm2-135m-instruct": {
        "model_type": "llama",
        "attention_bias": False,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "max_position_embeddings": 8192,
        "mlp_bias": False,
        "num_attention_heads": 9,
        "num_hidden_layers": 30,
        "num_key_value_heads": 3,
        "tie_word_embeddings": True,
        "vocab_size": 49152,
    }
}
