"""Tiny models and tokenizers, built on the spot: the tests need no network, no GPU and no embedded model."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

settings.register_profile(
    "repeatable", derandomize=True, deadline=None
)  # the same examples on every machine and day
settings.load_profile("repeatable")

_MANY_MODULES = 100
_frozen_at = 0


def pytest_runtest_setup() -> None:
    """Keep the collector off what imports made: with torch loaded, a full collection takes a quarter of a second, and the
    code under test asks for one between two models."""
    global _frozen_at
    if len(sys.modules) - _frozen_at > _MANY_MODULES:
        gc.collect()
        gc.freeze()
        _frozen_at = len(sys.modules)


# Like the embedded model's: a default system turn, no {% generation %} block, end-of-turn == pad.
CHATML_TEMPLATE = (
    "{% for message in messages %}"
    "{% if loop.first and messages[0]['role'] != 'system' %}<|im_start|>system\nYou are tiny.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def build_tiny_tokenizer(chat_template: str = CHATML_TEMPLATE) -> Any:
    """A byte-level BPE without merges: 256 byte tokens and three special ones, lossless on any text."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2}
    vocabulary |= {symbol: index for index, symbol in enumerate(alphabet, start=3)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in list(vocabulary)[:3]])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        unk_token="<|endoftext|>",
    )
    fast.chat_template = chat_template
    return fast


def build_tiny_model(*, seed: int = 0, vocab_size: int = 259, tie: bool = True, layers: int = 2) -> Any:
    """A random Llama with hidden size 64 (4-bit on CPUs needs multiples of 64) in fp32."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=tie,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def make_tiny_model() -> Callable[..., Any]:
    """`build_tiny_model`, for tests that need other models than the default one."""
    return build_tiny_model


def build_architecture(kind: str, **sizes: Any) -> Any:
    """A random model of one of transformers' architectures (`Bloom`, `GptOss`), with weights so large that tokens matter.

    sizes: what its configuration has beside or in place of those that most have.
    """
    import torch
    import transformers

    usual: dict[str, Any] = {
        "vocab_size": 259,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**usual, **sizes})
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape))
    return model


@pytest.fixture
def make_architecture() -> Callable[..., Any]:
    """`build_architecture`, for tests that need another architecture than Llama's."""
    return build_architecture


@pytest.fixture
def make_tiny_tokenizer() -> Callable[..., Any]:
    """`build_tiny_tokenizer`, for tests that need a second tokenizer."""
    return build_tiny_tokenizer


@pytest.fixture
def tiny_tokenizer() -> Any:
    return build_tiny_tokenizer()


@pytest.fixture
def tiny_model() -> Any:
    return build_tiny_model()


@pytest.fixture
def tiny_model_folder(tmp_path: Path) -> Path:
    """A saved tiny model with its tokenizer: what a user's own local model looks like."""
    folder = tmp_path / "tiny-model"
    build_tiny_model().save_pretrained(folder)
    build_tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many prompts each call of the evaluation's decoder was given."""
    from finetune.evaluation import answering

    counts: list[int] = []
    generate = answering.generate

    def counted(model: Any, prompts: Any, rule: Any, **options: Any) -> Any:
        counts.append(len(prompts))
        return generate(model, prompts, rule, **options)

    monkeypatch.setattr(answering, "generate", counted)
    return counts


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test touches the user's runs; the model cache is shared so that a conversion happens once."""
    monkeypatch.setenv("FINETUNE_RUNS", str(tmp_path_factory.mktemp("runs")))
